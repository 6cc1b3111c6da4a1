// SPDX-License-Identifier: Apache-2.0

package bot_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/bot"
	"github.com/cloister-dev/cloister/member/signin/sqlite"
)

const base = "https://a.example"

// cell is a cell that bots prove themselves to.
type cell struct {
	testing.TB
	*httptest.Server
	bots  *bot.Server
	store signin.Store
	mu    sync.Mutex // guards now
	now   time.Time
}

func newCell(t testing.TB, perSecond float64) *cell {
	c := &cell{TB: t, now: time.Now()}
	var err error
	if c.store, err = sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "s.db")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.store.Close() })
	if c.bots, err = bot.New(bot.Config{Store: c.store, Base: base, PerSecond: perSecond, Now: func() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }}); err != nil {
		t.Fatal(err)
	}
	c.Server = httptest.NewServer(c.bots)
	t.Cleanup(c.Server.Close)
	return c
}

// make makes a bot and returns its private key.
func (c *cell) make(name string, change ...func(*signin.Bot)) []byte {
	c.Helper()
	private, public, thumb, err := bot.NewKey()
	if err != nil {
		c.Fatal(err)
	}
	b := signin.Bot{Name: name, Key: public, Thumbprint: thumb, Admin: true}
	for _, f := range change {
		f(&b)
	}
	if err := c.store.PutBot(c.Context(), b, signin.Entry{Actor: "operator", Action: "bot.put"}); err != nil {
		c.Fatal(err)
	}
	return private
}

func (c *cell) proof(name string, key []byte) bot.Proof {
	return bot.Proof{Name: name, Key: key, Base: base, Address: c.URL}
}

func (c *cell) audit() (out []string) {
	c.Helper()
	list, err := c.store.Audit(c.Context(), "", 100)
	if err != nil {
		c.Fatal(err)
	}
	for _, e := range list {
		out = append(out, e.Actor+" "+e.Action)
	}
	return out
}

func code(err error) cells.Code {
	if a := cells.AnswerOf(err); a != nil {
		return a.Code
	}
	return ""
}

func TestBreakGlass(t *testing.T) {
	c := newCell(t, 1000)
	key := c.make("glass")
	token, err := c.proof("glass", key).Token(t.Context())
	if err != nil || !bot.Is(token) {
		t.Fatal(err)
	}
	who, err := c.bots.Principal(t.Context(), token, "POST /x")
	if err != nil || !who.Wide || who.Subject != "sa:glass" || who.Tenant != "" {
		t.Errorf("%+v, %v", who, err)
	}
	if got := strings.Join(c.audit(), ", "); got != "operator bot.put, sa:glass bot.token, sa:glass bot.use" {
		t.Errorf("audit: %s", got)
	}
	refused := func(what string, err error) {
		t.Helper()
		if code(err) != cells.CodeUnauthenticated {
			t.Errorf("%s: %v", what, err)
		}
	}
	use := func(raw string) error { _, err := c.bots.Principal(t.Context(), raw, ""); return err }
	refused("another token", use("lcb_"+strings.Repeat("0", 128)))
	refused("no token's form", use("lcb_"))
	other := c.make("other")
	_, err = c.proof("glass", other).Token(t.Context())
	refused("with the key of another", err)
	_, err = c.proof("nobody", key).Token(t.Context())
	refused("an unknown name", err)
	elsewhere := c.proof("glass", key)
	elsewhere.Base = "https://b.example"
	_, err = elsewhere.Token(t.Context())
	refused("signed for another cell", err)
	c.make("off", func(b *signin.Bot) { b.Disabled = true })
	_, err = c.proof("off", key).Token(t.Context())
	refused("a disabled bot", err)
	narrow := c.make("narrow", func(b *signin.Bot) { b.Admin = false })
	if token, err := c.proof("narrow", narrow).Token(t.Context()); err != nil {
		t.Error(err)
	} else if who, err := c.bots.Principal(t.Context(), token, ""); err != nil || who.Wide || who.MayActIn("t1") {
		t.Errorf("a bot that is no admin: %+v, %v", who, err)
	}

	// Another key, and the time, end a token.
	c.mu.Lock()
	c.now = c.now.Add(bot.TokenFor)
	c.mu.Unlock()
	refused("an old token", use(token))
	before := len(c.audit())
	refused("again", use(token))
	if len(c.audit()) != before {
		t.Error("what is refused is in the audit as a use")
	}

	// Keys of elliptic curves, too, and none that are weak or public.
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := (&jose.JSONWebKey{Key: p256}).MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	public, thumb, err := bot.Public(private)
	if err != nil || bytes.Contains(public, []byte(`"d"`)) {
		t.Fatalf("%s, %v", public, err)
	}
	c.mu.Lock()
	c.now = time.Now()
	c.mu.Unlock()
	c.make("curve", func(b *signin.Bot) { b.Key, b.Thumbprint = public, thumb })
	if _, err := c.proof("curve", private).Token(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := c.proof("curve", public).Token(t.Context()); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("with the public key: %v", err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []any{p384, []byte("0123456789abcdef0123456789abcdef")} {
		b, err := (&jose.JSONWebKey{Key: bad}).MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := bot.Public(b); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%T is a bot's key: %v", bad, err)
		}
	}
	insecure := c.proof("glass", key)
	insecure.Address = "http://a.example"
	if _, err := insecure.Token(t.Context()); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("over http: %v", err)
	}
}

// post asks the server itself.
func (c *cell) post(path string, in any) (int, map[string]any) {
	c.Helper()
	b, err := json.Marshal(in)
	if err != nil {
		c.Fatal(err)
	}
	resp, err := http.Post(c.URL+path, "application/json", bytes.NewReader(b))
	if err != nil {
		c.Fatal(err)
	}
	defer resp.Body.Close()
	all, _ := io.ReadAll(resp.Body)
	out := map[string]any{}
	_ = json.Unmarshal(all, &out)
	return resp.StatusCode, out
}

// A proof is good once, soon, and in the form that the cell asks for.
func TestProofs(t *testing.T) {
	c := newCell(t, 1000)
	raw := c.make("glass")
	var key jose.JSONWebKey
	if err := json.Unmarshal(raw, &key); err != nil {
		t.Fatal(err)
	}
	challenge := func(name string) string {
		t.Helper()
		status, doc := c.post(bot.PathChallenge, map[string]string{"bot": name})
		if status != 200 {
			t.Fatalf("%d %v", status, doc)
		}
		return doc["challenge"].(string)
	}
	assertion := func(typ string, change map[string]any) string {
		t.Helper()
		claims := map[string]any{"iss": "glass", "sub": "glass", "aud": base + bot.PathToken, "iat": time.Now().Unix(), "exp": time.Now().Unix() + 60, "jti": challenge("glass")}
		for k, v := range change {
			if claims[k] = v; v == nil {
				delete(claims, k)
			}
		}
		s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: key.Key}, (&jose.SignerOptions{}).WithType(jose.ContentType(typ)))
		if err != nil {
			t.Fatal(err)
		}
		out, err := jwt.Signed(s).Claims(claims).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	want := func(what string, status int, a string) {
		t.Helper()
		if got, doc := c.post(bot.PathToken, map[string]string{"assertion": a}); got != status {
			t.Errorf("%s: %d %v, want %d", what, got, doc, status)
		}
	}
	good := assertion("cell-bot+jwt", nil)
	want("good", 200, good)
	want("a second time", 401, good)
	if a, b := challenge("nobody"), challenge("nobody"); a == b || len(a) != len(challenge("glass")) {
		t.Error("the challenge of nobody is told from another")
	}
	now := time.Now().Unix()
	for what, change := range map[string]map[string]any{
		"another challenge": {"jti": "x"}, "no challenge": {"jti": nil}, "for a list": {"aud": []string{base + bot.PathToken, "https://b.example"}}, "for nobody": {"aud": nil},
		"for its base": {"aud": base}, "for too long": {"exp": now + 3600}, "for ever": {"exp": nil}, "of no time": {"iat": nil}, "old": {"iat": now - 600, "exp": now - 540},
		"by another": {"iss": "other"}, "of no name": {"sub": ""}, "of a path": {"sub": "../glass"},
	} {
		want(what, 401, assertion("cell-bot+jwt", change))
	}
	want("a token of another type", 401, assertion("JWT", nil))
	want("nothing", 401, "")
	want("no signature", 401, good[:strings.LastIndex(good, ".")+1])
	if status, _ := c.post(bot.PathToken, map[string]string{"assertion": good, "more": "x"}); status != 400 {
		t.Errorf("more than is asked for: %d", status)
	}
	if status, _ := c.post(bot.PathToken, []string{strings.Repeat("a", 64<<10)}); status != 400 {
		t.Errorf("a large request: %d", status)
	}
	late := assertion("cell-bot+jwt", nil)
	c.mu.Lock()
	c.now = c.now.Add(61 * time.Second)
	c.mu.Unlock()
	want("after a minute", 401, late)

	// Neither the store nor the audit answers: nobody is let in.
	token, err := c.proof("glass", raw).Token(t.Context())
	_ = c.store.Close()
	if err == nil {
		if _, err := c.bots.Principal(t.Context(), token, ""); code(err) != cells.CodeAuthUnavailable {
			t.Errorf("without a store: %v", err)
		}
	}
	if status, _ := c.post(bot.PathChallenge, map[string]string{"bot": "glass"}); status != 503 {
		t.Errorf("a challenge without a store: %d", status)
	}
}

// Challenges cost a write: they are given at a pace, which is one of each name and each
// address, and says nothing of who is a bot.
func TestPace(t *testing.T) {
	c := newCell(t, 0.001)
	key := c.make("glass")
	ask := func(name, from string) int {
		r := httptest.NewRequestWithContext(t.Context(), "POST", bot.PathChallenge, strings.NewReader(`{"bot":"`+name+`"}`))
		r.RemoteAddr = from
		w := httptest.NewRecorder()
		c.bots.ServeHTTP(w, r)
		return w.Code
	}
	var paces []int
	for _, name := range []string{"nobody", "glass", strings.Repeat("x", 100)} {
		n := 0
		for ask(name, "192.0.2.1:1") == 200 && n < 100 {
			n++
		}
		paces = append(paces, n)
	}
	if paces[0] != 20 || paces[1] != paces[0] || paces[2] != paces[0] {
		t.Errorf("challenges in a burst, of nobody, of a bot, of no name: %v", paces)
	}
	// Nobody else's questions count for the bot, however many names and addresses there are.
	for n := range 5000 {
		ask(fmt.Sprintf("n%d", n), "192.0.2.1:1")
	}
	if got := ask("glass", "192.0.2.1:2"); got != 429 {
		t.Errorf("the pace of a bot was forgotten for the names of others: %d", got)
	}
	if _, err := c.proof("glass", key).Token(t.Context()); err != nil {
		t.Errorf("from another address: %v", err)
	}
	for n := range 20 {
		ask("glass", fmt.Sprintf("[2001:db8::%d]:1", n))
	}
	if got := ask("glass", "[2001:db8::ffff]:1"); got != 429 {
		t.Errorf("another address of the same network: %d", got)
	}
}

// A bot that is told to come back does, a few times.
func TestBusyCell(t *testing.T) {
	c := newCell(t, 1000)
	key := c.make("glass")
	var left atomic.Int64
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == bot.PathChallenge && left.Add(-1) >= 0 {
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: time.Second})
			return
		}
		c.bots.ServeHTTP(w, r)
	}))
	defer front.Close()
	p := c.proof("glass", key)
	p.Address = front.URL
	left.Store(1)
	if _, err := p.Token(t.Context()); err != nil {
		t.Errorf("busy once: %v", err)
	}
	synctest.Test(t, func(t *testing.T) {
		asked, begun := 0, time.Now()
		p.HTTP = &http.Client{Transport: busy(func() { asked++ })}
		if _, err := p.Token(t.Context()); code(err) != cells.CodeRateLimited || asked != 4 || time.Since(begun) != 6*time.Second {
			t.Errorf("busy for long: %v, asked %d times in %s", err, asked, time.Since(begun))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := p.Token(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody waits: %v", err)
		}
	})
}

// busy answers everything with a refusal for the pace.
type busy func()

func (b busy) RoundTrip(r *http.Request) (*http.Response, error) {
	b()
	w := httptest.NewRecorder()
	cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: 2 * time.Second})
	return w.Result(), nil
}

// FuzzAssertion presents anything as a proof.
func FuzzAssertion(f *testing.F) {
	c := newCell(f, 1000)
	c.make("glass")
	for _, s := range []string{"", "..", "eyJhbGciOiJub25lIiwidHlwIjoiY2VsbC1ib3Qrand0In0.eyJzdWIiOiJnbGFzcyJ9.", "eyJhbGciOiJFZERTQSIsInR5cCI6ImNlbGwtYm90K2p3dCJ9.eyJzdWIiOiJnbGFzcyJ9.AAAA", `{"payload":"e30"}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		body, err := json.Marshal(map[string]string{"assertion": s})
		if err != nil {
			t.Skip()
		}
		w := httptest.NewRecorder()
		c.bots.ServeHTTP(w, httptest.NewRequestWithContext(context.Background(), "POST", bot.PathToken, bytes.NewReader(body)))
		if w.Code != 401 && w.Code != 400 {
			t.Fatalf("%q: %d %s", s, w.Code, w.Body)
		}
	})
}
