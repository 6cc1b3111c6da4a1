// SPDX-License-Identifier: Apache-2.0

package signin_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// issuer publishes the keys that a test gives it.
type issuer struct {
	*httptest.Server
	mu        sync.Mutex // guards what follows
	set       any
	discovery any
	status    int
	fetched   int
	now       time.Time
}

func newIssuer(t testing.TB) *issuer {
	i := &issuer{status: 200, now: time.Now()}
	i.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.mu.Lock()
		defer i.mu.Unlock()
		if r.URL.Path == "/keys" {
			i.fetched++
		}
		if i.status != 200 {
			http.Redirect(w, r, "/elsewhere", i.status)
			return
		}
		v := i.set
		if r.URL.Path != "/keys" {
			v = i.discovery
		}
		_ = json.NewEncoder(w).Encode(v)
	}))
	t.Cleanup(i.Close)
	i.discovery = map[string]any{"issuer": i.URL, "jwks_uri": i.URL + "/keys"}
	return i
}

func (i *issuer) do(f func()) { i.mu.Lock(); defer i.mu.Unlock(); f() }

func (i *issuer) later(d time.Duration) { i.do(func() { i.now = i.now.Add(d) }) }

func (i *issuer) clock() time.Time { i.mu.Lock(); defer i.mu.Unlock(); return i.now }

func (i *issuer) publish(keys ...jose.JSONWebKey) {
	i.do(func() { i.set = jose.JSONWebKeySet{Keys: keys} })
}

func (i *issuer) verifier(t testing.TB, change ...func(*signin.Config)) *signin.Verifier {
	t.Helper()
	cfg := signin.Config{Issuers: signin.Issuers{{Issuer: i.URL, Audience: "svc"}}, Now: i.clock, KeysFor: time.Minute, KeysStale: time.Hour, RefreshEvery: 5 * time.Second}
	for _, c := range change {
		c(&cfg)
	}
	v, err := signin.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	return v
}

// signer signs with a key of its own.
type signer struct {
	alg  jose.SignatureAlgorithm
	kid  string
	priv any
	pub  jose.JSONWebKey
}

func newSigner(t testing.TB, kid string) *signer {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &signer{jose.ES256, kid, k, jose.JSONWebKey{Key: k.Public(), KeyID: kid, Algorithm: "ES256", Use: "sig"}}
}

func (s *signer) sign(t testing.TB, payload any, typ string) string {
	t.Helper()
	o := (&jose.SignerOptions{}).WithType(jose.ContentType(typ))
	if typ == "" {
		o = nil
	}
	sig, err := jose.NewSigner(jose.SigningKey{Algorithm: s.alg, Key: jose.JSONWebKey{Key: s.priv, KeyID: s.kid}}, o)
	if err != nil {
		t.Fatal(err)
	}
	if text, ok := payload.(string); ok {
		j, err := sig.Sign([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		out, err := j.CompactSerialize()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	out, err := jwt.Signed(sig).Claims(payload).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// with are good claims with changes; nil leaves one out.
func (i *issuer) with(change map[string]any) map[string]any {
	c := map[string]any{"iss": i.URL, "sub": "ann", "aud": "svc", "exp": i.clock().Add(time.Hour).Unix(), "iat": i.clock().Unix(), "tenant": "t1"}
	for k, v := range change {
		if c[k] = v; v == nil {
			delete(c, k)
		}
	}
	return c
}

func code(err error) cells.Code {
	if a := cells.AnswerOf(err); a != nil {
		return a.Code
	}
	return ""
}

func TestVerify(t *testing.T) {
	is, s := newIssuer(t), newSigner(t, "k")
	is.publish(s.pub)
	v := is.verifier(t)
	got, err := v.Verify(t.Context(), s.sign(t, is.with(map[string]any{"email": "a@x.org", "email_verified": true, "creator": "bob", "act": map[string]any{"sub": "sa:x", "act": map[string]any{"sub": "carl"}}}), "at+jwt"))
	if err != nil || got.Subject != "ann" || got.Tenant != "t1" || got.Email != "a@x.org" || got.Creator != "bob" || strings.Join(got.Actors, " ") != "sa:x carl" || got.Kind != signin.People {
		t.Fatalf("%+v, %v", got, err)
	}
	if got, err := v.Verify(t.Context(), s.sign(t, is.with(map[string]any{"email": "a@x.org", "email_verified": "true", "tenant": nil}), "")); err != nil || got.Email != "" || got.Tenant != "" {
		t.Errorf("an email that is not verified: %+v, %v", got, err)
	}
	hour := int64(3600)
	now := is.clock().Unix()
	chain := any(map[string]any{"sub": "x"})
	for range 9 {
		chain = map[string]any{"sub": "x", "act": chain}
	}
	for what, change := range map[string]map[string]any{
		"expired":             {"exp": now - hour},
		"without exp":         {"exp": nil},
		"not yet":             {"nbf": now + hour},
		"from the future":     {"iat": now + hour},
		"another audience":    {"aud": "other"},
		"no audience":         {"aud": nil},
		"no subject":          {"sub": nil},
		"a padded subject":    {"sub": " ann"},
		"a subject of a line": {"sub": "a\nb"},
		"a long subject":      {"sub": strings.Repeat("a", 600)},
		"a tenant of numbers": {"tenant": 7},
		"no tenant's name":    {"tenant": "a b"},
		"an actor of nobody":  {"act": map[string]any{}},
		"too many actors":     {"act": chain},
		"a bad creator":       {"creator": " "},
		"an email of numbers": {"email": 1},
	} {
		if _, err := v.Verify(t.Context(), s.sign(t, is.with(change), "")); code(err) != cells.CodeUnauthenticated {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := v.Verify(t.Context(), s.sign(t, is.with(map[string]any{"iss": is.URL + "/"}), "")); code(err) != cells.CodeUnknownIssuer {
		t.Errorf("an issuer with a slash: %v", err)
	}
	good := s.sign(t, is.with(nil), "")
	part := strings.Split(good, ".")
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none"}`))
	for what, raw := range map[string]string{
		"empty": "", "two parts": part[0] + "." + part[1], "no signature": part[0] + "." + part[1] + ".", "alg none": none + "." + part[1] + ".",
		"alg none, signed": none + "." + part[1] + "." + part[2], "of another type": s.sign(t, is.with(nil), "logout+jwt"),
		"large":             good + strings.Repeat("A", signin.MaxToken),
		"a claim twice":     s.sign(t, `{"iss":"`+is.URL+`","sub":"ann","sub":"eve","aud":"svc","exp":`+jsonOf(now+hour)+`}`, ""),
		"claims of no form": s.sign(t, `[]`, ""), "another's signature": newSigner(t, "k").sign(t, is.with(nil), ""),
	} {
		if _, err := v.Verify(t.Context(), raw); code(err) != cells.CodeUnauthenticated {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func jsonOf(v any) string { b, _ := json.Marshal(v); return string(b) }

// The public key of an issuer, taken for a secret, or sent along, signs nothing.
func TestConfusedAlgorithms(t *testing.T) {
	is := newIssuer(t)
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	s := &signer{jose.RS256, "k", k, jose.JSONWebKey{Key: k.Public(), KeyID: "k", Algorithm: "RS256"}}
	is.publish(s.pub)
	v := is.verifier(t)
	if _, err := v.Verify(t.Context(), s.sign(t, is.with(nil), "")); err != nil {
		t.Fatal(err)
	}
	other := &signer{jose.PS256, "k", k, s.pub}
	if _, err := v.Verify(t.Context(), other.sign(t, is.with(nil), "")); code(err) != cells.CodeUnauthenticated {
		t.Errorf("an algorithm that is not listed: %v", err)
	}
	public, err := s.pub.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range [][]byte{public, k.N.Bytes()} {
		hs := &signer{jose.HS256, "k", secret, jose.JSONWebKey{}}
		if _, err := v.Verify(t.Context(), hs.sign(t, is.with(nil), "")); code(err) != cells.CodeUnauthenticated {
			t.Errorf("a public key as a secret: %v", err)
		}
	}
	eve := newSigner(t, "k")
	sig, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: eve.priv}, &jose.SignerOptions{EmbedJWK: true})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := jwt.Signed(sig).Claims(is.with(nil)).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Verify(t.Context(), raw); code(err) != cells.CodeUnauthenticated {
		t.Errorf("a key that comes with the token: %v", err)
	}
}

func TestKindsOfIssuers(t *testing.T) {
	is, s := newIssuer(t), newSigner(t, "k")
	is.publish(s.pub)
	v := is.verifier(t, func(c *signin.Config) {
		c.Issuers = signin.Issuers{{Issuer: is.URL, Tenants: []string{"u-*", "one"}, TenantClaim: "org"}}
	})
	for tenant, want := range map[string]cells.Code{"u-7": "", "one": "", "one1": cells.CodeForbidden, "x": cells.CodeForbidden, "": cells.CodeForbidden} {
		c := is.with(map[string]any{"org": tenant, "tenant": "u-1"})
		if tenant == "" {
			delete(c, "org")
		}
		if got, err := v.Verify(t.Context(), s.sign(t, c, "")); code(err) != want || err == nil && got.Kind != signin.EndUsers {
			t.Errorf("%q: %+v, %v", tenant, got, err)
		}
	}
	for what, bad := range map[string]signin.Issuers{
		"none": {}, "no name": {{}}, "no https": {{Issuer: "http://a.example"}}, "a user": {{Issuer: "https://u@a.example"}},
		"http keys": {{Issuer: "x", Keys: "http://a.example/k"}}, "kind": {{Issuer: "https://a.example", Kind: "x"}},
		"end users of any tenant": {{Issuer: "https://a.example", Kind: signin.EndUsers}},
		"people of some":          {{Issuer: "https://a.example", Kind: signin.People, Tenants: []string{"a"}}},
		"HS256":                   {{Issuer: "https://a.example", Algorithms: []string{"HS256"}}},
		"no algorithm":            {{Issuer: "https://a.example", Algorithms: []string{}}},
		"claim":                   {{Issuer: "https://a.example", TenantClaim: "sub"}},
		"twice":                   {{Issuer: "https://a.example"}, {Issuer: "https://a.example"}},
	} {
		if v, err := signin.New(signin.Config{Issuers: bad}); err == nil {
			v.Close()
			t.Errorf("%s: accepted", what)
		}
	}
}

// The keys are fetched once for many, when they are old, and when a token names one
// that is not there, at a bounded pace.
func TestKeysAreFetchedSeldom(t *testing.T) {
	is, one, two := newIssuer(t), newSigner(t, "1"), newSigner(t, "2")
	is.publish(one.pub)
	v := is.verifier(t)
	fetched := func(want int) {
		t.Helper()
		is.do(func() {
			if is.fetched != want {
				t.Errorf("%d fetches, want %d", is.fetched, want)
			}
		})
	}
	good, unknown := one.sign(t, is.with(nil), ""), two.sign(t, is.with(nil), "")
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := v.Verify(t.Context(), good); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	fetched(1)
	for range 20 {
		if _, err := v.Verify(t.Context(), unknown); code(err) != cells.CodeUnauthenticated {
			t.Fatal(err)
		}
	}
	fetched(1) // it was fetched just now
	is.later(6 * time.Second)
	is.publish(one.pub, two.pub)
	if _, err := v.Verify(t.Context(), unknown); err != nil {
		t.Errorf("a key that was added: %v", err)
	}
	fetched(2)
	// A key that is gone is used until the next fetch.
	is.publish(two.pub)
	is.later(30 * time.Second)
	if _, err := v.Verify(t.Context(), good); err != nil {
		t.Errorf("before the keys are old: %v", err)
	}
	is.later(31 * time.Second)
	// However long nobody asked: the first request waits for the fetch.
	if _, err := v.Verify(t.Context(), good); code(err) != cells.CodeUnauthenticated {
		t.Fatalf("a key that is gone: %v", err)
	}
	fetched(3)
	// Before that, the keys are fetched beside a request.
	three := newSigner(t, "3")
	is.later(50 * time.Second)
	is.publish(three.pub)
	if _, err := v.Verify(t.Context(), unknown); err != nil {
		t.Errorf("keys that are due: %v", err)
	}
	end := time.Now().Add(time.Minute)
	for n := 0; n != 4; {
		if is.do(func() { n = is.fetched }); time.Now().After(end) {
			t.Fatalf("%d fetches, want 4", n)
		}
	}
	// Keys that are old are used when the fetch fails.
	if _, err := v.Verify(t.Context(), three.sign(t, is.with(nil), "")); err != nil {
		t.Fatal(err)
	}
	is.later(30 * time.Minute)
	is.do(func() { is.status = 500 })
	if _, err := v.Verify(t.Context(), three.sign(t, is.with(nil), "")); err != nil {
		t.Errorf("old keys while the issuer does not answer: %v", err)
	}
	fetched(4) // discovery failed
}

// A key that is not known here is passed over; the others of its set are used.
func TestUnknownKeysArePassedOver(t *testing.T) {
	is, s := newIssuer(t), newSigner(t, "k")
	good := map[string]any{}
	if err := json.Unmarshal([]byte(jsonOf(s.pub)), &good); err != nil {
		t.Fatal(err)
	}
	for what, other := range map[string]any{"a kind": map[string]any{"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"}, "a curve": map[string]any{"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}, "no kind": map[string]any{"kid": "x"}} {
		is.do(func() { is.set = map[string]any{"keys": []any{other, good}} })
		if _, err := is.verifier(t).Verify(t.Context(), s.sign(t, is.with(nil), "")); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, other := range map[string]any{"a private key": map[string]any{"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA", "priv": "AA"}, "a private exponent": map[string]any{"kty": "EC", "crv": "secp256k1", "d": "AA"},
		"a secret": map[string]any{"kty": "oct", "k": ""}, "no key": "x"} {
		is.do(func() { is.set = map[string]any{"keys": []any{good, other}} })
		if _, err := is.verifier(t).Verify(t.Context(), s.sign(t, is.with(nil), "")); code(err) != cells.CodeAuthUnavailable {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Keys that cannot be had are no verdict: neither a pass nor a refusal.
func TestKeysCannotBeHad(t *testing.T) {
	is, one, two := newIssuer(t), newSigner(t, "1"), newSigner(t, "2")
	private := jose.JSONWebKey{Key: one.priv, KeyID: "1"}
	small, err := rsa.GenerateKey(rand.Reader, 1024) //nolint:gosec // a weak key, to be refused
	if err != nil {
		t.Skip("weak keys cannot be made here:", err)
	}
	for what, bad := range map[string]func(){
		"a redirect":    func() { is.status = 302 },
		"an error":      func() { is.status = 500 },
		"nothing":       func() { is.set = map[string]any{} },
		"no set":        func() { is.set = "x" },
		"a private key": func() { is.set = jose.JSONWebKeySet{Keys: []jose.JSONWebKey{one.pub, private}} },
		"a secret": func() {
			is.set = jose.JSONWebKeySet{Keys: []jose.JSONWebKey{one.pub, {Key: []byte("0123456789abcdef0123456789abcdef")}}}
		},
		"a weak key":       func() { is.set = jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: small.Public(), KeyID: "1"}}} },
		"another issuer's": func() { is.discovery = map[string]any{"issuer": "https://x.example", "jwks_uri": is.URL + "/keys"} },
		"keys over http":   func() { is.discovery = map[string]any{"issuer": is.URL, "jwks_uri": "http://x.example/keys"} },
	} {
		t.Run(what, func(t *testing.T) {
			is.publish(one.pub)
			is.do(func() { is.status, is.discovery = 200, map[string]any{"issuer": is.URL, "jwks_uri": is.URL + "/keys"} })
			good, unknown := one.sign(t, is.with(nil), ""), two.sign(t, is.with(nil), "")
			v := is.verifier(t)
			if _, err := v.Verify(t.Context(), good); err != nil {
				t.Fatal(err)
			}
			is.do(bad)
			is.later(6 * time.Second)
			_, err := v.Verify(t.Context(), unknown)
			if a := cells.AnswerOf(err); a == nil || a.Code != cells.CodeAuthUnavailable || a.RetryAfter <= 0 {
				t.Errorf("a key that is not known: %v", err)
			}
			if _, err := v.Verify(t.Context(), good); err != nil {
				t.Errorf("a known key: %v", err)
			}
			is.later(2 * time.Hour)
			again := one.sign(t, is.with(nil), "")
			if _, err := v.Verify(t.Context(), again); code(err) != cells.CodeAuthUnavailable {
				t.Errorf("keys that are too old: %v", err)
			}
			if _, err := is.verifier(t).Verify(t.Context(), again); code(err) != cells.CodeAuthUnavailable {
				t.Errorf("keys that were never had: %v", err)
			}
			is.publish(one.pub)
			is.do(func() { is.status, is.discovery = 200, map[string]any{"issuer": is.URL, "jwks_uri": is.URL + "/keys"} })
			is.later(6 * time.Second)
			if _, err := v.Verify(t.Context(), again); err != nil {
				t.Errorf("the issuer is back: %v", err)
			}
		})
	}
}

func TestBearer(t *testing.T) {
	for header, want := range map[string]string{"Bearer x": "x", "bearer x": "x", "Basic x": "", "": "", "Bearer": "", "Bearer ": "", "Bearer x y": "", "Bearer x,y": ""} {
		h := http.Header{}
		h.Set("Authorization", header)
		if got, err := signin.Bearer(h); got != want || (want == "") != (code(err) == cells.CodeUnauthenticated) {
			t.Errorf("%q: %q, %v", header, got, err)
		}
		if h.Add("Authorization", "Bearer y"); code(second(signin.Bearer(h))) != cells.CodeUnauthenticated {
			t.Error("two headers were taken")
		}
	}
}

func second(_ string, err error) error { return err }

// FuzzVerify presents anything: it is refused, and never verified by chance.
func FuzzVerify(f *testing.F) {
	is, s := newIssuer(f), newSigner(f, "k")
	is.publish(s.pub)
	v := is.verifier(f)
	good := s.sign(f, is.with(nil), "")
	for _, seed := range []string{"", "..", good, good + ".", strings.Replace(good, ".", "..", 1), good[:len(good)-2], `{"payload":"","signatures":[]}`, "eyJhbGciOiJub25lIn0.e30.", "eyJhbGciOiJFUzI1NiIsImNyaXQiOlsieCJdLCJ4IjoxfQ.e30.AA"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		tok, err := v.Verify(t.Context(), raw)
		if err == nil && raw != good && !strings.HasPrefix(raw, good[:strings.LastIndex(good, ".")]) {
			t.Fatalf("%q: %+v", raw, tok)
		}
		if err != nil && cells.AnswerOf(err) == nil {
			t.Fatalf("%q: %v", raw, err)
		}
	})
}

// FuzzIssuers reads anything as a list of issuers: what is accepted has issuers that
// may be asked.
func FuzzIssuers(f *testing.F) {
	for _, seed := range []string{`[]`, `[{"issuer":"https://a.example"}]`, `[{"issuer":"https://a.example","tenants":["u-*"]}]`, `[{"issuer":"x","jwks":"file"}] x`, `[{"issuer":"https://a","algorithms":["none"]}]`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := signin.ParseIssuers(b)
		if err == nil {
			if v, err := signin.New(signin.Config{Issuers: list}); err != nil {
				t.Fatalf("%q is read and refused: %v", b, err)
			} else {
				v.Close()
			}
		}
	})
}
