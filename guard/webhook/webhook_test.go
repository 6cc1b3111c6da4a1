// SPDX-License-Identifier: Apache-2.0

package webhook_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/webhook"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	secret = []byte("a secret of some length")
	older  = []byte("the secret that was used before")
	event  = guard.Event{Tenant: "a", Seq: 7, Epoch: 3, Cell: "c", ID: "id-7", Type: "put", Payload: json.RawMessage(`{"k":"v"}`), At: time.Unix(1700000000, 0).UTC()}
)

func publisher(t *testing.T, url string, cfg webhook.Config) *webhook.Publisher {
	t.Helper()
	cfg.URL = url
	if cfg.Secrets == nil {
		cfg.Secrets = [][]byte{secret}
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
	good := webhook.Config{URL: "https://example.com/hook", Secrets: [][]byte{secret}}
	if _, err := webhook.New(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*webhook.Config){
		"no url": func(c *webhook.Config) { c.URL = "" }, "relative": func(c *webhook.Config) { c.URL = "/hook" }, "scheme": func(c *webhook.Config) { c.URL = "ftp://x/y" },
		"no secret": func(c *webhook.Config) { c.Secrets = nil }, "short secret": func(c *webhook.Config) { c.Secrets = [][]byte{[]byte("hunter2")} },
		"timeout": func(c *webhook.Config) { c.Timeout = -1 },
	} {
		c := good
		change(&c)
		_, err := webhook.New(c)
		if !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
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
	p := publisher(t, url+"/hook", webhook.Config{Secrets: [][]byte{secret, older}, Now: func() time.Time { return now }})
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
	var ev guard.Event
	if err := json.Unmarshal(body, &ev); err != nil || ev.Seq != 7 || ev.ID != "id-7" || string(ev.Payload) != `{"k":"v"}` || ev.Epoch != 3 {
		t.Errorf("the body is %s (%v)", body, err)
	}
	for _, s := range [][]byte{secret, older} {
		if err := webhook.Verify(s, got.Header, body, now.Add(time.Minute), 5*time.Minute); err != nil {
			t.Error(err)
		}
	}
	changed := got.Header.Clone()
	changed.Set(webhook.HeaderID, "id-8")
	noTime := got.Header.Clone()
	noTime.Del(webhook.HeaderTimestamp)
	for name, err := range map[string]error{
		"another secret": webhook.Verify([]byte("not the secret of it"), got.Header, body, now, time.Minute),
		"another body":   webhook.Verify(secret, got.Header, append(body, ' '), now, time.Minute),
		"another id":     webhook.Verify(secret, changed, body, now, time.Minute),
		"no time":        webhook.Verify(secret, noTime, body, now, time.Minute),
		"too old":        webhook.Verify(secret, got.Header, body, now.Add(time.Hour), time.Minute),
		"too new":        webhook.Verify(secret, got.Header, body, now.Add(-time.Hour), time.Minute),
	} {
		if !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
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
	for _, status = range []int{199 + 101, http.StatusFound, 400, 410, 429, 500, 503} {
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
