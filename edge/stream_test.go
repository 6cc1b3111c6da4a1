// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/cloister-dev/cloister/cells"
)

// events streams numbers from Last-Event-ID on until its gate closes or the
// client goes.
func events(w http.ResponseWriter, r *http.Request) {
	ctx := cells.MarkStream(r.Context())
	a, _ := cells.AdmissionFromContext(ctx)
	last, _ := strconv.Atoi(r.Header.Get("Last-Event-ID"))
	w.Header().Set("Content-Type", "text/event-stream")
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for n := last + 1; ; n++ {
		fmt.Fprintf(w, "id: %d\ndata: %s\n\n", n, a.Cell)
		if http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// A client of server-sent events follows its tenant through moves: each stream
// ends cleanly, the next one is held if need be, and no event is missing.
func TestEventsThroughMoves(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(events)})
	f.place("acme", "a")
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex // guards last and seen
		last, ends := 0, 0
		seen := map[string]int{}
		done := make(chan error, 1)
		go func() {
			done <- func() error {
				for {
					r, err := http.NewRequestWithContext(ctx, "GET", f.url+"/events", nil)
					if err != nil {
						return err
					}
					r.Header.Set("X-Tenant", "acme")
					r.Header.Set("Accept", "text/event-stream")
					r.Header.Set("Last-Event-ID", strconv.Itoa(last))
					resp, err := c.Do(r)
					if err != nil {
						return err
					}
					if resp.StatusCode != 200 {
						return fmt.Errorf("%s", resp.Status)
					}
					sc := bufio.NewScanner(resp.Body)
					for sc.Scan() {
						mu.Lock()
						if id, ok := strings.CutPrefix(sc.Text(), "id: "); ok {
							if id != strconv.Itoa(last+1) {
								mu.Unlock()
								return fmt.Errorf("event %s after %d", id, last)
							}
							last++
						} else if cell, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
							seen[cell]++
						}
						mu.Unlock()
					}
					resp.Body.Close()
					if err := sc.Err(); err != nil {
						return fmt.Errorf("the stream broke: %w", err)
					}
					mu.Lock()
					ends++
					mu.Unlock()
				}
			}()
		}()
		from, to := cells.CellID("a"), cells.CellID("b")
		for i := range 4 {
			mu.Lock()
			before := seen[string(from)]
			mu.Unlock()
			f.wait(func() bool {
				mu.Lock()
				defer mu.Unlock()
				return seen[string(from)] > before+3
			}, "%s: events from %s", name, from)
			f.move("acme", from, to)
			f.wait(func() bool {
				mu.Lock()
				defer mu.Unlock()
				return ends >= i+1
			}, "%s: the end of stream %d", name, i+1)
			from, to = to, from
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatalf("%s: %v", name, err)
		}
		if ends != 4 || seen["b"] == 0 {
			t.Fatalf("%s: %d ends, seen %v", name, ends, seen)
		}
	}
}

func wsEcho(w http.ResponseWriter, r *http.Request) {
	ctx := cells.MarkStream(r.Context())
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionContextTakeover})
	if err != nil {
		return
	}
	defer c.CloseNow()
	c.SetReadLimit(1 << 20)
	a, _ := cells.AdmissionFromContext(ctx)
	stop := context.AfterFunc(ctx, func() { _ = c.Close(websocket.StatusServiceRestart, "moved") })
	defer stop()
	for {
		kind, p, err := c.Read(context.WithoutCancel(ctx))
		if err != nil {
			return
		}
		if err := c.Write(context.WithoutCancel(ctx), kind, append([]byte(string(a.Cell)+" "), p...)); err != nil {
			return
		}
	}
}

func (f *fleet) dialWS(id string) (*websocket.Conn, *http.Response, error) {
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	return websocket.Dial(ctx, f.url+"/ws", &websocket.DialOptions{
		HTTPClient: f.http, HTTPHeader: http.Header{"X-Tenant": {id}, "Cell-Tenant": {"evil"}}, CompressionMode: websocket.CompressionContextTakeover})
}

func wsSay(t *testing.T, c *websocket.Conn, s string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := c.Write(ctx, websocket.MessageText, []byte(s)); err != nil {
		t.Fatal(err)
	}
	_, p, err := c.Read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return string(p)
}

func TestWebSocket(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(wsEcho)})
	f.place("acme", "a")
	c, _, err := f.dialWS("acme")
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	c.SetReadLimit(1 << 20)
	for _, s := range []string{"hello", strings.Repeat("x", 200000), ""} {
		if got := wsSay(t, c, s); got != "a "+s {
			t.Fatalf("%d bytes", len(got))
		}
	}
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		f.move("acme", "a", "b")
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusServiceRestart {
		t.Fatalf("at the cut: %v", err)
	}
	c2, resp, err := f.dialWS("acme") // held if it comes too early
	if err != nil {
		t.Fatalf("%v %v", err, resp)
	}
	defer c2.CloseNow()
	if got := wsSay(t, c2, "x"); got != "b x" {
		t.Fatal(got)
	}
	<-moved
	if _, resp, err := f.dialWS("nobody"); err == nil || resp.StatusCode != 404 {
		t.Fatalf("%v %v", resp, err)
	}
	if err := c2.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Fatal(err)
	}
	f.wait(func() bool { return f.process("b").gates.Total() == 0 }, "the upgraded connection has ended in the cell")
}

// Bytes go both ways at once, as they come.
func TestDuplex(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		b := make([]byte, 100)
		for {
			n, err := r.Body.Read(b)
			if n > 0 {
				_, _ = w.Write(b[:n])
				_ = rc.Flush()
			}
			if err != nil {
				return
			}
		}
	})})
	f.place("acme", "a")
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		t.Run(name, func(t *testing.T) {
			pr, pw := io.Pipe()
			defer pw.Close()
			r, err := http.NewRequestWithContext(t.Context(), "POST", f.url+"/", pr)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("X-Tenant", "acme")
			// HTTP/1.1 clients send the first bytes before there is an answer.
			first := make(chan error, 1)
			go func() {
				_, err := io.WriteString(pw, "ping 0\n")
				first <- err
			}()
			resp, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if err := <-first; err != nil {
				t.Fatal(err)
			}
			br := bufio.NewReader(resp.Body)
			for i := range 5 {
				line, err := br.ReadString('\n')
				if err != nil || line != fmt.Sprintf("ping %d\n", i) {
					t.Fatalf("%q %v", line, err)
				}
				if _, err := fmt.Fprintf(pw, "ping %d\n", i+1); err != nil {
					t.Fatal(err)
				}
			}
			pw.Close()
			if rest, err := io.ReadAll(br); err != nil || string(rest) != "ping 5\n" {
				t.Fatalf("%q %v", rest, err)
			}
		})
	}
}

// A download of known length is passed on as it comes.
func TestDownloadFlushes(t *testing.T) {
	next := make(chan struct{})
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = io.WriteString(w, "01234")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-next:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, "56789")
	})})
	f.place("acme", "a")
	r, err := http.NewRequestWithContext(t.Context(), "GET", f.url+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Tenant", "acme")
	resp, err := f.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	half := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, half); err != nil || string(half) != "01234" {
		t.Fatalf("%q %v", half, err)
	}
	close(next)
	if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "56789" || resp.ContentLength != 10 {
		t.Fatalf("%q %v %d", rest, err, resp.ContentLength)
	}
}

// An answer may come before the body was sent.
func TestEarlyAnswer(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "no", http.StatusForbidden)
	})})
	f.place("acme", "a")
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		pr, pw := io.Pipe()
		a, err := f.do(c, "POST", "/", pr, tenant("acme"))
		pw.Close()
		if err != nil || a.StatusCode != 403 {
			t.Fatalf("%s: %v %v", name, a.Response, err)
		}
	}
}

// An answer that breaks off must not look whole.
func TestCutAnswerIsSeen(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "part")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})})
	f.place("acme", "a")
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		if a, err := f.do(c, "GET", "/", nil, tenant("acme")); err == nil {
			t.Fatalf("%s: a cut answer looks whole: %s", name, a.body)
		}
	}
}

// After an answer that came before the end of the request, what is left of the
// request is not taken for another one.
func TestEarlyAnswerClosesTheConnection(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Was", r.Header.Get("X-Op"))
		w.WriteHeader(http.StatusForbidden)
	})})
	f.place("acme", "a")
	r := f.raw("POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nX-Op: 1\nTransfer-Encoding: chunked\n\n5\nhello\n")
	if r.StatusCode != 403 || !r.Close || r.Header.Get("X-Was") != "1" {
		t.Fatalf("%s close=%v", r.Status, r.Close)
	}
	r = f.raw("POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nX-Op: 2\nContent-Length: 5\n\nhello")
	if r.StatusCode != 403 || r.Close {
		t.Fatalf("a request that was whole: %s close=%v", r.Status, r.Close)
	}
}
