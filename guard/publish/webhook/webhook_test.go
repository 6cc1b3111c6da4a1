// SPDX-License-Identifier: Apache-2.0

package webhook_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	secret = webhook.NewSecret()
	older  = webhook.NewSecret()
	event  = guard.Event{Tenant: "a", Seq: 7, Epoch: 3, Cell: "c", ID: "id-7", Type: "put", Payload: json.RawMessage(`{"k":"v"}`), At: time.Unix(1700000000, 0).UTC()}
)

func publisher(t *testing.T, url string, cfg webhook.Config) *webhook.Publisher {
	t.Helper()
	cfg.URL = url
	if cfg.Keys == nil {
		cfg.Keys = []webhook.Key{secret}
	}
	p, err := webhook.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func serve(t *testing.T, h http.HandlerFunc) string {
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestConfig(t *testing.T) {
	good := webhook.Config{URL: "https://example.com/hook", Keys: []webhook.Key{secret}}
	if _, err := webhook.New(good); err != nil {
		t.Fatal(err)
	}
	public, _ := webhook.NewPrivateKey().Public()
	for name, change := range map[string]func(*webhook.Config){
		"no url": func(c *webhook.Config) { c.URL = "" }, "relative": func(c *webhook.Config) { c.URL = "/hook" }, "scheme": func(c *webhook.Config) { c.URL = "ftp://x/y" },
		"user": func(c *webhook.Config) { c.URL = "https://me:hunter2@example.com/" }, "http": func(c *webhook.Config) { c.URL = "http://example.com/hook" },
		"no key": func(c *webhook.Config) { c.Keys = nil }, "zero key": func(c *webhook.Config) { c.Keys = []webhook.Key{secret, {}} },
		"public key": func(c *webhook.Config) { c.Keys = []webhook.Key{public} }, "many keys": func(c *webhook.Config) { c.Keys = make([]webhook.Key, 17) },
		"timeout":                func(c *webhook.Config) { c.Timeout = -1 },
		"client and public only": func(c *webhook.Config) { c.PublicOnly, c.Client = true, http.DefaultClient },
	} {
		c := good
		change(&c)
		_, err := webhook.New(c)
		if !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, u := range []string{"http://127.0.0.1:1/", "http://[::1]:1/", "http://localhost/"} {
		if _, err := webhook.New(webhook.Config{URL: u, Keys: []webhook.Key{secret}}); err != nil {
			t.Errorf("%s: %v", u, err)
		}
	}
	if _, err := webhook.New(webhook.Config{URL: "http://example.com/", Insecure: true, Keys: []webhook.Key{secret}}); err != nil {
		t.Error(err)
	}
}

func TestRequest(t *testing.T) {
	now := time.Unix(1800000000, 0)
	var got *http.Request
	var body []byte
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
		w.WriteHeader(http.StatusAccepted)
	})
	p := publisher(t, url+"/hook", webhook.Config{Keys: []webhook.Key{secret, older}, Now: func() time.Time { return now }})
	if err := p.Publish(t.Context(), []guard.Event{event}); err != nil {
		t.Fatal(err)
	}
	for k, want := range map[string]string{
		webhook.HeaderID: "id-7", webhook.HeaderSequence: "7", webhook.HeaderTenant: "a", webhook.HeaderTimestamp: "1800000000", "Content-Type": "application/json",
	} {
		if got.Header.Get(k) != want {
			t.Errorf("%s is %q, want %q", k, got.Header.Get(k), want)
		}
	}
	if got.Method != http.MethodPost || got.URL.Path != "/hook" {
		t.Errorf("%s %s", got.Method, got.URL)
	}
	const want = `{"type":"put","timestamp":"2023-11-14T22:13:20Z","data":{"k":"v"},"id":"id-7","tenant":"a","event_seq":7,"epoch":3,"cell":"c"}`
	if string(body) != want {
		t.Errorf("the body is %s, want %s", body, want)
	}
	if ev, err := webhook.Decode(body); err != nil || !reflect.DeepEqual(ev, event) {
		t.Errorf("decoded %+v, %v", ev, err)
	}
	for _, s := range []webhook.Key{secret, older} {
		if err := webhook.Verify([]webhook.Key{s}, got.Header, body, now.Add(time.Minute), 5*time.Minute); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "{}", "[]", `{"id":"x","event_seq":1}`, `{"id":"x","event_seq":0,"tenant":"a"}`, `{"id":"x","event_seq":1,"tenant":"a/b"}`} {
		if _, err := webhook.Decode([]byte(bad)); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	dotted := event
	dotted.ID = "a.1"
	if err := p.Publish(t.Context(), []guard.Event{dotted}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("an id with a full stop: %v", err)
	}
}

func TestFailures(t *testing.T) {
	var n atomic.Int64
	var after atomic.Int64
	status := http.StatusOK
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/elsewhere" {
			after.Add(1)
			return
		}
		if n.Add(1) == 3 {
			if status == http.StatusFound {
				http.Redirect(w, r, "/elsewhere", status)
				return
			}
			w.WriteHeader(status)
			_, _ = w.Write([]byte(strings.Repeat("x", 1<<20))) // more than is read
		}
	})
	p := publisher(t, url, webhook.Config{})
	list := []guard.Event{event, event, event, event}
	for _, status = range []int{199 + 101, http.StatusFound, 400, 429, 500, 502, 503, 504} {
		n.Store(0)
		err := p.Publish(t.Context(), list)
		if guard.Accepted(err, 4) != 2 || n.Load() != 3 {
			t.Errorf("status %d: %v, accepted %d after %d requests", status, err, guard.Accepted(err, 4), n.Load())
		}
	}
	if after.Load() != 0 {
		t.Error("a redirect was followed")
	}
	n.Store(10)
	if err := p.Publish(t.Context(), list); err != nil {
		t.Errorf("after failures: %v", err)
	}
}

func TestTimeout(t *testing.T) {
	release := make(chan struct{})
	url := serve(t, func(http.ResponseWriter, *http.Request) { <-release })
	defer close(release)
	p := publisher(t, url, webhook.Config{Timeout: 30 * time.Millisecond})
	start := time.Now()
	err := p.Publish(t.Context(), []guard.Event{event, event})
	if err == nil || guard.Accepted(err, 2) != 0 || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %s", err, time.Since(start))
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(guard.ErrPaused)
	if err := p.Publish(ctx, []guard.Event{event}); !errors.Is(err, guard.ErrPaused) {
		t.Errorf("paused: %v", err)
	}
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	if err := publisher(t, closed.URL, webhook.Config{}).Publish(t.Context(), []guard.Event{event}); err == nil {
		t.Error("published to nobody")
	}
}

// 410 ends everything until it is opened again; Retry-After is for all tenants.
func TestGoneAndThrottled(t *testing.T) {
	now := time.Unix(1800000000, 0)
	var requests int
	var answer func(http.Header) int
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		requests++
		w.WriteHeader(answer(w.Header()))
	})
	p := publisher(t, url, webhook.Config{Now: func() time.Time { return now }})
	other := event
	other.Tenant = "b"
	for name, c := range map[string]struct {
		status int
		after  string
		want   time.Duration
	}{
		"seconds": {429, "90", 90 * time.Second}, "date": {503, "+2m", 2 * time.Minute},
		"too long": {502, "999999", time.Hour}, "past": {504, "-1m", 0},
		"malformed": {429, "soon", 0}, "negative": {429, "-5", 0}, "none": {429, "", 0},
	} {
		if d, err := time.ParseDuration(c.after); err == nil {
			c.after = now.Add(d).UTC().Format(http.TimeFormat)
		}
		answer = func(h http.Header) int { h.Set("Retry-After", c.after); return c.status }
		p.Reopen()
		requests = 0
		err := p.Publish(t.Context(), []guard.Event{event, event})
		var d *guard.DelayError
		if got := errors.As(err, &d); got != (c.want > 0) || got && d.After != c.want || guard.Accepted(err, 2) != 0 {
			t.Errorf("%s: %v, want a delay of %s", name, err, c.want)
		}
		if c.want == 0 {
			continue
		}
		answer = func(http.Header) int { return 204 }
		if err := p.Publish(t.Context(), []guard.Event{other}); !errors.As(err, &d) || requests != 1 {
			t.Errorf("%s: another tenant while throttled: %v after %d requests", name, err, requests)
		}
		now = now.Add(c.want)
		if err := p.Publish(t.Context(), []guard.Event{event}); err != nil {
			t.Errorf("%s: afterwards: %v", name, err)
		}
	}
	answer = func(http.Header) int { return http.StatusGone }
	requests = 0
	for range 3 {
		err := p.Publish(t.Context(), []guard.Event{event})
		var d *guard.DelayError
		if !errors.Is(err, webhook.ErrGone) || !errors.As(err, &d) || d.After <= 0 {
			t.Errorf("gone: %v", err)
		}
	}
	if requests != 1 || !p.Gone() {
		t.Errorf("%d requests to a receiver that is gone", requests)
	}
	answer = func(http.Header) int { return 204 }
	p.Reopen()
	if err := p.Publish(t.Context(), []guard.Event{event}); err != nil || p.Gone() {
		t.Errorf("reopened: %v", err)
	}
}

// The address is looked at when the connection is made, whatever its name is.
func TestPublicOnly(t *testing.T) {
	reached := false
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	defer srv.Close()
	_, port, _ := strings.Cut(strings.TrimPrefix(srv.URL, "http://"), ":")
	for _, host := range []string{"127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"} {
		p := publisher(t, "http://"+host+":"+port, webhook.Config{PublicOnly: true, Insecure: true})
		if err := p.Publish(t.Context(), []guard.Event{event}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", host, err)
		}
	}
	if reached {
		t.Error("an address inside was reached")
	}
}
