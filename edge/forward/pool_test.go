// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func call(t *testing.T, method string, body *Body) Call {
	t.Helper()
	r, err := http.NewRequest(method, "http://edge/x", nil)
	if err != nil {
		t.Fatal(err)
	}
	c := Call{Request: r}
	if body != nil {
		c.Request.ContentLength = -1
		c.Body = body.Attempt()
		c.Again = body.Attempt
	}
	return c
}

func pools(t *testing.T, o Options) *Pools {
	t.Helper()
	p := NewPools(o)
	t.Cleanup(p.Close)
	return p
}

func TestPickPrefersTheIdle(t *testing.T) {
	release := make(chan struct{})
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		<-release
	}))
	defer busy.Close()
	defer close(release)
	idle := httptest.NewServer(http.NotFoundHandler())
	defer idle.Close()
	p := pools(t, Options{})
	bases := []string{busy.URL, idle.URL}
	seen := map[string]int{}
	for range 10 {
		b, _ := p.Pick("a", bases, nil)
		seen[b]++
	}
	if len(seen) != 2 {
		t.Fatalf("ties are not spread: %v", seen)
	}
	resp, err := p.Send(t.Context(), "a", busy.URL, call(t, "GET", nil))
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if b, _ := p.Pick("a", bases, nil); b != idle.URL {
			t.Fatal("the busy one was picked")
		}
	}
	if b, ok := p.Pick("a", bases, []string{idle.URL}); !ok || b != busy.URL {
		t.Fatal("the other one was not picked")
	}
	if _, ok := p.Pick("a", bases, bases); ok {
		t.Fatal("one that was tried is picked")
	}
	resp.Body.Close()
	resp.Body.Close() // counted once
	seen = map[string]int{}
	for range 10 {
		b, _ := p.Pick("a", bases, nil)
		seen[b]++
	}
	if len(seen) != 2 {
		t.Fatalf("the request is still counted: %v", seen)
	}
}

func TestRefusedIsNotSentAndShunned(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := "http://" + l.Addr().String()
	l.Close()
	up := httptest.NewServer(http.NotFoundHandler())
	defer up.Close()
	for _, h2 := range []bool{false, true} {
		p := pools(t, Options{})
		body := NewBody(strings.NewReader("abc"), 3, 100, nil, nil)
		c := call(t, "POST", body)
		c.HTTP2 = h2
		_, err = p.Send(t.Context(), "a", dead, c)
		var unsent *NotSentError
		if !errors.As(err, &unsent) || unsent.Upstream != dead || !body.Replayable() {
			t.Fatal(err)
		}
		for range 10 {
			if b, _ := p.Pick("a", []string{dead, up.URL}, nil); b != up.URL {
				t.Fatal("a process that has just refused was picked")
			}
		}
		body.Close()
	}
	p := pools(t, Options{})
	for _, bad := range []string{"", "x", "ftp://h", "http://u:p@h", "http://h/path", "http://"} {
		var unsent *NotSentError
		if _, err := p.Send(t.Context(), "a", bad, call(t, "GET", nil)); !errors.As(err, &unsent) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A connection that breaks once a byte was written: never "not sent", for no
// method, on new connections and on used ones.
func TestBrokenIsSent(t *testing.T) {
	kill := make(chan bool, 1)
	var got atomic.Int64
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if <-kill {
			got.Add(1)
			c, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				c.Close()
			}
		}
	}))
	defer up.Close()
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE", "POST", "DELETE"} {
		for _, warm := range []bool{false, true} {
			p := pools(t, Options{})
			if warm {
				kill <- false
				resp, err := p.Send(t.Context(), "a", up.URL, call(t, method, nil))
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			kill <- true
			c := call(t, method, nil)
			c.Request.Header.Set("Idempotency-Key", "x")
			before := got.Load()
			_, err := p.Send(t.Context(), "a", up.URL, c)
			var unsent *NotSentError
			if err == nil || errors.As(err, &unsent) || got.Load() != before+1 {
				t.Fatalf("%s warm=%v: %v, ran %d times", method, warm, err, got.Load()-before)
			}
			p.Close()
		}
	}
}

// The process dies while its client is slow to send: that ends the call at once.
func TestDeathEndsASlowUpload(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = r.Body.Read(make([]byte, 1))
		c, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			c.Close()
		}
	}))
	defer up.Close()
	pr, pw := io.Pipe()
	defer pw.Close()
	body := NewBody(pr, -1, 100, nil, nil)
	defer body.Close()
	go func() { _, _ = pw.Write([]byte("x")) }()
	p := pools(t, Options{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := p.Send(ctx, "a", up.URL, call(t, "POST", body)); err == nil || ctx.Err() != nil {
		t.Fatal(err)
	}
}

func TestSendKeepsTheRequest(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(204)
	}))
	defer up.Close()
	p := pools(t, Options{})
	c := call(t, "GET", nil)
	before, u := *c.Request, *c.Request.URL
	hints := 0
	c.Informational = func(code int, _ http.Header) { hints += code }
	resp, err := p.Send(t.Context(), "a", up.URL, c)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if c.Request.Body != before.Body || *c.Request.URL != u || c.Request.URL.Host != "edge" || hints != 103 {
		t.Fatal("the request was changed")
	}
	p.Retain(func(cells.CellID) bool { return false })
	if len(*p.cells.Load()) != 0 {
		t.Fatal("the pool was kept")
	}
}
