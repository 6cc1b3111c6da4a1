// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/cloister-dev/cloister/cells"
)

// acmeService is a service in cell-a, with acme there at epoch 4.
func acmeService(t *testing.T, opts ...cells.GateOption) (*service, *cells.MemTable) {
	t.Helper()
	g, table := gatesOf(t, opts...)
	return newService(t, g), table
}

var toAcme = hdr(cells.HeaderTenant, "acme", cells.HeaderEpoch, "4")

// deadline is for what a test waits for outside of a bubble.
func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func idle(t *testing.T, g *cells.Gates) {
	t.Helper()
	eventually(t, "nothing is in flight", func() bool { return g.Total() == 0 })
}

// A service cannot pass its own answers off as the platform's, whichever way it
// sends headers; the platform's answer from inside a handler is let through.
func TestServiceAnswersAreNotThePlatforms(t *testing.T) {
	noLeaks(t)
	svc, _ := acmeService(t)
	forge := func(w http.ResponseWriter) { w.Header().Set(cells.HeaderAnswer, "MOVING") }
	for name, c := range map[string]struct {
		serve http.HandlerFunc
		code  cells.Code
	}{
		"WriteHeader":     {serve: func(w http.ResponseWriter, _ *http.Request) { forge(w); w.WriteHeader(503) }},
		"Write":           {serve: func(w http.ResponseWriter, _ *http.Request) { forge(w); _, _ = w.Write([]byte("x")) }},
		"nothing written": {serve: func(w http.ResponseWriter, _ *http.Request) { forge(w) }},
		"Flush":           {serve: func(w http.ResponseWriter, _ *http.Request) { forge(w); w.(http.Flusher).Flush() }},
		"controller":      {serve: func(w http.ResponseWriter, _ *http.Request) { forge(w); _ = http.NewResponseController(w).Flush() }},
		"ReadFrom": {serve: func(w http.ResponseWriter, _ *http.Request) {
			forge(w)
			_, _ = io.Copy(w, struct{ io.Reader }{strings.NewReader("x")})
		}},
		"early hints": {serve: func(w http.ResponseWriter, _ *http.Request) {
			forge(w)
			w.WriteHeader(103)
			forge(w)
			w.WriteHeader(200)
		}},
		"trailer": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", cells.HeaderAnswer)
			_, _ = w.Write([]byte("x"))
			forge(w)
		}},
		"undeclared trailer": {serve: func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("x"))
			w.Header().Set(http.TrailerPrefix+cells.HeaderAnswer, "MOVING")
		}},
		"other cell": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(cells.HeaderCell, "cell-b")
			w.Header().Set(cells.HeaderEpoch, "99")
			w.WriteHeader(200)
		}},
		"WriteProblem": {serve: func(w http.ResponseWriter, r *http.Request) {
			forge(w)
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeStaleRoute, Tenant: "acme"})
		}, code: cells.CodeStaleRoute},
		"WriteProblem of an unknown code": {serve: func(w http.ResponseWriter, r *http.Request) {
			cells.WriteProblem(w, r, &cells.Answer{Code: "EVIL", Tenant: "acme"})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			svc.serveHTTP = c.serve
			got, resp := svc.overHTTP(t, http.MethodGet, toAcme)
			if got.err != nil {
				t.Fatal(got.err)
			}
			if got.mark != string(c.code) || (got.answer == nil) != (c.code == "") {
				t.Errorf("mark %q, answer %v, want %q", got.mark, got.answer, c.code)
			}
			if v := resp.Trailer.Get(cells.HeaderAnswer); v != "" {
				t.Errorf("a trailer %q", v)
			}
			if got.cell != "cell-a" || got.epoch != "4" {
				t.Errorf("answered by %q at %q", got.cell, got.epoch)
			}
		})
	}
}

func TestPanicCountsOut(t *testing.T) {
	noLeaks(t)
	svc, _ := acmeService(t)
	svc.http.Config.ErrorLog = nil
	svc.serveHTTP = func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	if got, _ := svc.overHTTP(t, http.MethodGet, toAcme); got.err == nil {
		t.Errorf("%+v", got)
	}
	idle(t, svc.gates)
}

// Server-sent events end when the tenant leaves, and their handler knows why.
func TestEventStreamEnds(t *testing.T) {
	for _, how := range []string{"Accept", "MarkStream"} {
		t.Run(how, func(t *testing.T) {
			noLeaks(t)
			svc, table := acmeService(t)
			cause := make(chan error, 1)
			svc.serveHTTP = func(w http.ResponseWriter, r *http.Request) {
				ctx := r.Context()
				if how == "MarkStream" {
					ctx = cells.MarkStream(ctx)
				}
				fmt.Fprint(w, "event: hello\n\n")
				w.(http.Flusher).Flush()
				<-ctx.Done()
				cause <- context.Cause(ctx)
				fmt.Fprint(w, "event: bye\n\n")
			}
			send := toAcme.Clone()
			if how == "Accept" {
				send.Set("Accept", "text/event-stream")
			}
			go func() {
				eventually(t, "the stream is open", func() bool { return svc.ran.Load() == 1 })
				draining(t, table)
			}()
			got, _ := svc.overHTTP(t, http.MethodGet, send)
			if got.err != nil || got.body != "event: hello\n\nevent: bye\n\n" {
				t.Errorf("%+v", got)
			}
			if err := <-cause; codeOf(err) != cells.CodeMoving || !errors.Is(err, cells.ErrGateClosed) {
				t.Errorf("cause %v", err)
			}
			idle(t, svc.gates)
		})
	}
}

// A handler that waits for its client, to read from it or to write to it, does not
// hold a move up for ever.
func TestStuckStreamIsForced(t *testing.T) {
	for _, how := range []string{"reading", "writing"} {
		t.Run(how, func(t *testing.T) {
			noLeaks(t)
			svc, table := acmeService(t, cells.WithStreamGrace(10*time.Millisecond))
			stuck := make(chan error, 1)
			svc.serveHTTP = func(w http.ResponseWriter, r *http.Request) {
				cells.MarkStream(r.Context())
				var err error
				if how == "reading" {
					_, err = io.Copy(io.Discard, r.Body)
				} else {
					for err == nil {
						_, err = w.Write(make([]byte, 1<<20))
					}
				}
				stuck <- err
			}
			body, feed := io.Pipe()
			defer feed.Close()
			req, err := http.NewRequestWithContext(deadline(t), http.MethodPost, svc.http.URL, body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header = toAcme.Clone()
			go func() {
				resp, err := svc.http.Client().Do(req)
				if err == nil {
					<-req.Context().Done()
					resp.Body.Close()
				}
			}()
			eventually(t, "the handler runs", func() bool { return svc.ran.Load() == 1 })
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // the client stays for longer
			defer cancel()
			if err := svc.gates.Drain(ctx, draining(t, table)); err != nil {
				t.Fatal(err)
			}
			if err := <-stuck; err == nil {
				t.Error("the handler saw no error")
			}
		})
	}
}

// A WebSocket is in flight until it is closed, whoever closes it.
func TestWebSocket(t *testing.T) {
	for _, end := range []string{"client", "gate", "stubborn"} {
		t.Run(end, func(t *testing.T) {
			noLeaks(t)
			svc, table := acmeService(t, cells.WithStreamGrace(20*time.Millisecond))
			svc.serveHTTP = func(w http.ResponseWriter, r *http.Request) {
				c, err := websocket.Accept(w, r, nil)
				if err != nil {
					t.Error(err)
					return
				}
				defer c.CloseNow()
				ctx := r.Context()
				if end == "stubborn" {
					ctx = context.WithoutCancel(ctx)
				}
				for {
					kind, b, err := c.Read(ctx)
					if err != nil {
						if errors.Is(context.Cause(ctx), cells.ErrGateClosed) {
							c.Close(websocket.StatusServiceRestart, "moving")
						}
						return
					}
					if err := c.Write(ctx, kind, b); err != nil {
						return
					}
				}
			}
			c, resp, err := websocket.Dial(deadline(t), svc.http.URL, &websocket.DialOptions{HTTPHeader: toAcme})
			if err != nil {
				t.Fatal(err)
			}
			defer c.CloseNow()
			if resp.StatusCode != http.StatusSwitchingProtocols {
				t.Fatalf("status %d", resp.StatusCode)
			}
			if err := c.Write(deadline(t), websocket.MessageText, []byte("hello")); err != nil {
				t.Fatal(err)
			}
			if _, b, err := c.Read(deadline(t)); err != nil || string(b) != "hello" {
				t.Fatalf("%q %v", b, err)
			}
			if svc.gates.Total() != 1 {
				t.Errorf("%d in flight while it is open", svc.gates.Total())
			}
			if end == "client" {
				c.Close(websocket.StatusNormalClosure, "")
			} else {
				if err := svc.gates.Drain(deadline(t), draining(t, table)); err != nil {
					t.Fatal(err)
				}
				// A handler that does not end it has the gate say goodbye.
				if _, _, err := c.Read(deadline(t)); err == nil || end == "stubborn" && websocket.CloseStatus(err) != websocket.StatusServiceRestart {
					t.Errorf("the client got %v", err)
				}
			}
			idle(t, svc.gates)
		})
	}
}

// A handler may leave a hijacked connection to others: it is in flight until they
// have closed it.
func TestHijackedAndLeft(t *testing.T) {
	noLeaks(t)
	svc, table := acmeService(t, cells.WithStreamGrace(time.Millisecond))
	conns := make(chan net.Conn, 1)
	svc.serveHTTP = func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conns <- c
	}
	client, err := net.Dial("tcp", svc.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	fmt.Fprintf(client, "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: raw\r\nConnection: Upgrade\r\nCell-Tenant: acme\r\n\r\n")
	server := <-conns
	fmt.Fprint(server, "hello\n")
	if line, err := bufio.NewReader(client).ReadString('\n'); err != nil || line != "hello\n" {
		t.Fatalf("%q %v", line, err)
	}
	row := draining(t, table)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := svc.gates.Drain(ctx, row); err == nil {
		t.Error("drained although the connection's owner has not closed it")
	}
	if _, err := server.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on after its grace")
	}
	server.Close()
	server.Close()
	if err := svc.gates.Drain(deadline(t), row); err != nil {
		t.Error(err)
	}
}

// Over a connection that cannot be taken over, handlers do not find Hijack.
func TestHijackOnlyWhereItWorks(t *testing.T) {
	noLeaks(t)
	g, _ := gatesOf(t)
	ran := false
	h := cells.HTTPMiddleware(g.Router(), g)(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		ran = true
		if _, ok := w.(http.Hijacker); ok {
			t.Error("says that it can be hijacked")
		}
	}))
	req := httptest.NewRequest("GET", "/", nil)
	req.Header = toAcme
	h.ServeHTTP(httptest.NewRecorder(), req)
	if !ran {
		t.Error("the handler did not run")
	}
}

// After a forced end the connection serves other requests again.
func TestConnectionAfterForcedEnd(t *testing.T) {
	noLeaks(t)
	svc, table := acmeService(t, cells.WithStreamGrace(time.Millisecond))
	svc.serveHTTP = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/do" {
			return
		}
		cells.MarkStream(r.Context())
		_, _ = io.Copy(io.Discard, r.Body)
	}
	body, feed := io.Pipe()
	req, _ := http.NewRequestWithContext(deadline(t), http.MethodPost, svc.http.URL+"/upload", body)
	req.Header = toAcme.Clone()
	done := make(chan struct{})
	go func() {
		defer close(done)
		resp, err := svc.http.Client().Do(req)
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}()
	eventually(t, "the upload runs", func() bool { return svc.ran.Load() == 1 })
	if err := svc.gates.Drain(deadline(t), draining(t, table)); err != nil {
		t.Fatal(err)
	}
	feed.Close()
	<-done
	set(t, table, inMove("acme", cells.StateCommitting, "cell-a", 4, 6))
	seen(t, svc.gates.Router(), set(t, table, active("acme", "cell-a", 6)))
	for range 3 {
		if got, _ := svc.overHTTP(t, http.MethodGet, hdr(cells.HeaderTenant, "acme")); got.err != nil || got.answer != nil {
			t.Errorf("%+v", got)
		}
	}
}

// The label of an admission is the path, for whoever waits.
func TestHolderIsNamed(t *testing.T) {
	noLeaks(t)
	svc, table := acmeService(t)
	release := make(chan struct{})
	var entered atomic.Bool
	svc.serveHTTP = func(http.ResponseWriter, *http.Request) { entered.Store(true); <-release }
	req, err := http.NewRequestWithContext(deadline(t), http.MethodGet, svc.http.URL+"/v1/do", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = toAcme.Clone()
	go func() {
		if resp, err := svc.http.Client().Do(req); err == nil {
			resp.Body.Close()
		}
	}()
	eventually(t, "it runs", entered.Load)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err = svc.gates.Drain(ctx, draining(t, table))
	if err == nil || !strings.Contains(err.Error(), "request /v1/do") {
		t.Errorf("%v", err)
	}
	close(release)
	idle(t, svc.gates)
}
