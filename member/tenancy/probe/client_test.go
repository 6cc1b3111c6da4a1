// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

var addresses = []struct{ in, want string }{
	{"http://cell:8081", "http://cell:8081"}, {"https://cell", "https://cell"}, {"http://CELL.Example:80/", "http://cell.example"}, {"https://cell:443", "https://cell"},
	{"https://cell:80", "https://cell:80"}, {"http://cell:443", "http://cell:443"}, {"http://[::1]:9", "http://[::1]:9"}, {"http://[0:0::1]", "http://[::1]"},
	{"HTTP://cell:0081", "http://cell:81"}, {"http://10.0.0.7:9", "http://10.0.0.7:9"}, {"http://xn--bcher-kva.example", "http://xn--bcher-kva.example"},
	{"http://user@cell", ""}, {"http://user:secret@cell", ""}, {"http://@cell", ""}, {"http://:@cell", ""}, {"ftp://cell", ""}, {"file:///etc/passwd", ""}, {"unix:///x", ""},
	{"cell:8081", ""}, {"//cell", ""}, {"", ""}, {"http://", ""}, {"http:cell", ""}, {"http://cell/path", ""}, {"http://cell//", ""}, {"http://cell?x", ""}, {"http://cell?", ""},
	{"http://cell#x", ""}, {"http://cell#", ""}, {"http://cell:", ""}, {"http://cell:0", ""}, {"http://cell:65536", ""}, {"http://cell:x", ""}, {"http://ce ll", ""},
	{"http://cell\n", ""}, {"http://[fe80::1%25eth0]", ""}, {"http://[::1", ""}, {"http://::1", ""}, {"http://bücher.example", ""}, {"http://cell\\@evil", ""}, {"http://-cell", ""},
	{"http://c..ell", ""}, {"http://%63ell", ""}, {"http://017.0.0.1", ""},
}

func TestParseAddress(t *testing.T) {
	for _, c := range addresses {
		got, err := ParseAddress(c.in)
		if got != c.want || (err == nil) != (c.want != "") || err != nil && (!errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%q: %q, %v; want %q", c.in, got, err, c.want)
		}
	}
}

func FuzzParseAddress(f *testing.F) {
	for _, c := range addresses {
		f.Add(c.in)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseAddress(s)
		if err != nil {
			return
		}
		if again, err := ParseAddress(got); err != nil || again != got {
			t.Fatalf("%q is read as %q, and that as %q, %v", s, got, again, err)
		}
		if req, err := http.NewRequest(http.MethodGet, got+Path, nil); err != nil || req.URL.Path != Path || req.URL.User != nil {
			t.Fatalf("%q: %v", got, err)
		}
	})
}

// newClient has a bound that a loaded machine meets.
func newClient(cfg ClientConfig) *Client {
	if cfg.Timeout == 0 {
		cfg.Timeout = 30 * time.Second
	}
	return NewClient(cfg)
}

func TestWantCheck(t *testing.T) {
	pg, s3, _ := fakes(t)
	n, m := pg.nonce, s3.nonce
	answer := func() Answer {
		return Answer{Deployment: deployment, Bucket: "bucket", Prefix: "env/a", Stores: []stores.Kind{stores.Postgres, stores.S3}, Nonces: map[stores.Kind]stores.Nonce{stores.Postgres: n, stores.S3: m}}
	}
	if err := want(pg, s3).Check(answer()); err != nil {
		t.Fatal(err)
	}
	for name, edit := range map[string]func(*Want, *Answer){
		"another deployment":             func(_ *Want, a *Answer) { a.Deployment = stores.NewDeploymentID() },
		"no deployment on either side":   func(w *Want, a *Answer) { w.Deployment, a.Deployment = "", "" },
		"another bucket":                 func(_ *Want, a *Answer) { a.Bucket = "bucket2" },
		"another prefix":                 func(_ *Want, a *Answer) { a.Prefix = "env" },
		"a bucket that nobody names":     func(w *Want, _ *Answer) { w.Location = stores.Location{} },
		"a bucket that it does not have": func(_ *Want, a *Answer) { a.Bucket, a.Prefix = "", "" },
		"a store that nobody names":      func(w *Want, _ *Answer) { delete(w.Nonces, stores.S3) },
		"a store that it does not have":  func(_ *Want, a *Answer) { a.Stores = a.Stores[:1] },
		"no nonce in one":                func(_ *Want, a *Answer) { delete(a.Nonces, stores.S3) },
		"another nonce in one":           func(_ *Want, a *Answer) { a.Nonces[stores.Postgres] = stores.NewNonce() },
		"nonces swapped":                 func(_ *Want, a *Answer) { a.Nonces[stores.Postgres], a.Nonces[stores.S3] = m, n },
		"no nonces at all":               func(w *Want, a *Answer) { w.Nonces, a.Nonces, a.Stores = nil, nil, nil },
		"empty nonces":                   func(w *Want, a *Answer) { w.Nonces[stores.S3], a.Nonces[stores.S3] = "", "" },
	} {
		w, a := want(pg, s3), answer()
		w.Nonces = maps.Clone(w.Nonces)
		edit(&w, &a)
		if err := w.Check(a); !errors.Is(err, ErrRefused) || Passing(err) {
			t.Errorf("%s: %v, want ErrRefused", name, err)
		}
	}
}

// What a listener or something else may answer, and what the client makes of it.
func TestClient(t *testing.T) {
	defer goleak.VerifyNone(t)
	pg, s3, set := fakes(t)
	a, err := read(t.Context(), set, deployment)
	if err != nil {
		t.Fatal(err)
	}
	good, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	newer := strings.Replace(string(good), "{", `{"added_later":[1],`, 1)
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(good) }))
	defer other.Close()
	status := func(code int, header, value string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if header != "" {
				w.Header().Set(header, value)
			}
			w.WriteHeader(code)
			_, _ = w.Write(good)
		}
	}
	body := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(s)) }
	}
	busy, away, refused := cells.CodeProbeBusy, cells.CodeProbeUnreachable, cells.Code("")
	for name, c := range map[string]struct {
		h    http.HandlerFunc
		ok   bool
		code cells.Code // "" with !ok: ErrRefused
	}{
		"the answer":        {body(string(good)), true, ""},
		"a newer build's":   {body(newer), true, ""},
		"busy":              {status(429, "Retry-After", "3"), false, busy},
		"a store is away":   {status(503, "", ""), false, away},
		"a proxy's":         {status(502, "", ""), false, away},
		"not there":         {status(404, "", ""), false, refused},
		"a login page":      {status(401, "", ""), false, refused},
		"no content":        {status(204, "", ""), false, refused},
		"another place":     {status(302, "Location", other.URL+Path), false, refused},
		"for ever":          {status(308, "Location", other.URL+Path), false, refused},
		"html":              {body("<html>"), false, refused},
		"nothing":           {body(""), false, refused},
		"null":              {body("null"), false, refused},
		"twice":             {body(string(good) + string(good)), false, refused},
		"too long":          {body(strings.Replace(string(good), "{", `{"x":"`+strings.Repeat("a", maxAnswer)+`",`, 1)), false, refused},
		"only the id":       {body(`{"deployment_id":"` + string(deployment) + `"}`), false, refused},
		"no id":             {body(strings.Replace(string(good), string(deployment), "", 1)), false, refused},
		"a bad nonce":       {body(strings.Replace(string(good), string(pg.nonce), "x", 1)), false, refused},
		"a bad prefix":      {body(strings.Replace(string(good), "env/a", "../a", 1)), false, refused},
		"stores twice":      {body(strings.Replace(string(good), `["postgres"`, `["postgres","postgres"`, 1)), false, refused},
		"nonce of no store": {body(strings.Replace(string(good), `["postgres","s3"]`, `["postgres"]`, 1)), false, refused},
		"breaks off": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(len(good)+9))
			_, _ = w.Write(good)
		}, false, away},
		"headers without end": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 64<<10))
			_, _ = w.Write(good)
		}, false, away},
	} {
		srv := httptest.NewServer(c.h)
		got, err := newClient(ClientConfig{}).Read(t.Context(), srv.URL)
		srv.Close()
		switch ans := cells.AnswerOf(err); {
		case c.ok:
			if err != nil || want(pg, s3).Check(got) != nil {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
		case c.code == refused && (!errors.Is(err, ErrRefused) || Passing(err)):
			t.Errorf("%s: %v, want ErrRefused", name, err)
		case c.code != refused && (ans == nil || ans.Code != c.code || !Passing(err)):
			t.Errorf("%s: %v, want %s", name, err, c.code)
		case c.code == busy && ans.RetryAfter != 3*time.Second:
			t.Errorf("%s: RetryAfter %v", name, ans.RetryAfter)
		}
	}
}

func TestClientUnreachable(t *testing.T) {
	defer goleak.VerifyNone(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c := NewClient(ClientConfig{Timeout: 200 * time.Millisecond})
	for name, at := range map[string]string{"nobody listens": "http://127.0.0.1:1", "nobody answers": "http://" + ln.Addr().String()} {
		if _, err := c.Read(t.Context(), at); !Passing(err) {
			t.Errorf("%s: %v, want PROBE_UNREACHABLE", name, err)
		}
	}
	// A caller who gave up is not told that the probe is away.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Read(ctx, "http://"+ln.Addr().String()); !errors.Is(err, context.Canceled) || Passing(err) {
		t.Errorf("a caller who gave up: %v", err)
	}
	// Headers, and then a body that never ends.
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("{"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	defer slow.Close()
	if _, err := c.Read(t.Context(), slow.URL); !Passing(err) {
		t.Errorf("a body that never ends: %v, want PROBE_UNREACHABLE", err)
	}
	for _, at := range []string{"http://me:hunter2@127.0.0.1:1", "ftp://127.0.0.1"} {
		if _, err := c.Read(t.Context(), at); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want ErrInvalid", at, err)
		}
	}
}

// No proxy of the environment sees what is asked.
func TestClientUsesNoProxy(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	t.Setenv("http_proxy", "http://127.0.0.1:1")
	tr := newClient(ClientConfig{}).http.Transport.(*http.Transport)
	if tr.Proxy != nil {
		t.Error("the transport has a proxy")
	}
}

// An https address is believed when a CA that is given signs its certificate, or one
// of SSL_CERT_FILE, and not otherwise.
func TestClientTLS(t *testing.T) {
	pg, s3, set := fakes(t)
	h := newHandler(Config{Stores: set, Deployment: deployment, Logger: quiet})
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	pool := x509.NewCertPool()
	pool.AddCert(srv.Certificate())
	if err := newClient(ClientConfig{RootCAs: pool}).Check(t.Context(), srv.URL, want(pg, s3)); err != nil {
		t.Errorf("with its CA: %v", err)
	}
	if err := newClient(ClientConfig{RootCAs: x509.NewCertPool()}).Check(t.Context(), srv.URL, want(pg, s3)); !Passing(err) {
		t.Errorf("without its CA: %v, want PROBE_UNREACHABLE", err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ env, want string }{{"SSL_CERT_FILE=" + file, string(deployment)}, {"SSL_CERT_FILE=/dev/null", string(cells.CodeProbeUnreachable)}} {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), childEnv+"="+srv.URL, "SSL_CERT_DIR=/nowhere", c.env)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s: %s, %v; want %s", c.env, out, err, c.want)
		}
	}
}

// child is a process that reads the certificates of its environment.
func child(at string) int {
	d, err := newClient(ClientConfig{}).DeploymentID(context.Background(), at)
	fmt.Println(d, err)
	return 0
}

// Busy and unreachable probes are waited for, and named when the wait is over.
func TestWait(t *testing.T) {
	busy := &cells.Answer{Code: cells.CodeProbeBusy, RetryAfter: 3 * time.Second}
	away := fmt.Errorf("register: %w", &cells.Answer{Code: cells.CodeProbeUnreachable})
	synctest.Test(t, func(t *testing.T) {
		begin, n := time.Now(), 0
		err := Wait(t.Context(), time.Minute, func(context.Context) error {
			if n++; n <= 2 {
				return busy
			}
			return nil
		})
		if took := time.Since(begin); err != nil || n != 3 || took != 6*time.Second {
			t.Errorf("%v after %d tries and %v", err, n, took)
		}
		for code, passing := range map[cells.Code]error{cells.CodeProbeBusy: busy, cells.CodeProbeUnreachable: away} {
			begin, n = time.Now(), 0
			err = Wait(t.Context(), DefaultWait, func(context.Context) error { n++; return passing })
			if took := time.Since(begin); took > DefaultWait || took < DefaultWait-5*time.Second || n < 100 || !Passing(err) || !strings.Contains(err.Error(), string(code)) || !strings.HasPrefix(err.Error(), "waited ") {
				t.Errorf("%s: %v after %d tries and %v", code, err, n, took)
			}
		}
		n = 0
		if err = Wait(t.Context(), DefaultWait, func(context.Context) error { n++; return ErrRefused }); n != 1 || !errors.Is(err, ErrRefused) {
			t.Errorf("a refusal: %v after %d tries", err, n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err = Wait(ctx, DefaultWait, func(context.Context) error { return busy }); !errors.Is(err, context.DeadlineExceeded) || !Passing(err) {
			t.Errorf("a caller who gave up: %v", err)
		}
	})
}
