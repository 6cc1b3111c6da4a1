// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
)

// A process that dies with a request in hand: the client learns that it may have
// run, and nobody runs it again, whatever its method and headers.
func TestKilledInMidRequest(t *testing.T) {
	for _, method := range []string{"GET", "HEAD", "POST", "PUT"} {
		for _, warm := range []bool{false, true} {
			for _, proto := range []string{"h1", "h2"} {
				t.Run(fmt.Sprintf("%s warm=%v %s", method, warm, proto), func(t *testing.T) {
					running, f := make(chan struct{}, 10), (*fleet)(nil)
					o := fleetOptions{cfg: edge.Config{HTTP2ToCells: proto == "h2"}}
					o.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						f.ran(r.Header.Get("X-Op"))
						if r.Header.Get("X-Op") == "kill" {
							_, _ = io.Copy(io.Discard, r.Body) // the server sees the connection end only then
							running <- struct{}{}
							<-r.Context().Done()
						}
					})
					f = newFleet(t, o)
					f.place("acme", "a")
					c := f.http
					if proto == "h2" {
						c = f.h2
					}
					if warm {
						f.must(c, method, "/", nil, tenant("acme"))
					}
					// A second process of the cell is ready to take it.
					old := f.process("a")
					second := f.start("a", o)
					f.topo.Set("a", "http://"+old.addr)
					go func() {
						<-running
						f.topo.Set("a", "http://"+old.addr, "http://"+second.addr)
						old.kill()
					}()
					var body io.Reader
					if method == "POST" || method == "PUT" {
						body = strings.NewReader("small")
					}
					a := f.must(c, method, "/", body, tenant("acme"), header("X-Op", "kill"), header("Idempotency-Key", "k"))
					if a.StatusCode != 502 || a.code() != cells.CodeCellUnreachable {
						t.Fatal(a.Status, a.body)
					}
					if n := f.executions("kill"); n != 1 {
						t.Fatalf("ran %d times", n)
					}
					if a := f.must(c, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 {
						t.Fatalf("afterwards: %s", a.Status)
					}
				})
			}
		}
	}
}

// Nothing listens where one of two processes was: every request goes to the other.
func TestRefusedConnectionGoesToTheOther(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	dead := closedAddr(t)
	f.topo.Set("a", "http://"+dead, "http://"+f.process("a").addr)
	for i := range 20 {
		op := fmt.Sprint(i)
		a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"), header("X-Op", op))
		if a.StatusCode != 200 || a.Header.Get("X-Body") != "1" || f.executions(op) != 1 {
			t.Fatal(a.Status, a.body, f.executions(op))
		}
	}
}

func closedAddr(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// All processes are gone: requests wait for one to come back.
func TestWaitsForAProcess(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	f.place("other", "b")
	addr := f.process("a").addr
	f.topo.Set("a", "http://"+closedAddr(t))
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			a, err := f.do(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"), header("X-Op", fmt.Sprint(i)))
			if err != nil || a.StatusCode != 200 {
				t.Errorf("%v %v", a.Response, err)
			}
		})
	}
	f.wait(func() bool { return f.held("acme") == 3 }, "they wait")
	if a := f.must(f.http, "GET", "/", nil, tenant("other")); a.StatusCode != 200 {
		t.Fatal(a.Status)
	}
	f.topo.Set("a", "http://"+addr)
	wg.Wait()
	for i := range 3 {
		if f.executions(fmt.Sprint(i)) != 1 {
			t.Fatal("not executed once")
		}
	}
}

// A tenant that leaves a dead cell is served by the next one without an error.
func TestMovedAwayFromADeadCell(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	f.topo.Set("a")
	got := make(chan answer, 1)
	go func() {
		a, err := f.do(f.http, "GET", "/", nil, tenant("acme"))
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	f.wait(func() bool { return f.held("acme") == 1 }, "it waits")
	f.move("acme", "a", "b")
	if a := <-got; a.StatusCode != 200 || a.Header.Get("X-Cell") != "b" {
		t.Fatal(a.Status, a.body)
	}
}

func TestUnreachable(t *testing.T) {
	f := newFleet(t, fleetOptions{cfg: edge.Config{ConnectWait: 100 * time.Millisecond}})
	f.place("acme", "a")
	f.topo.Set("a", "http://"+closedAddr(t))
	start := time.Now()
	a := f.must(f.http, "GET", "/", nil, tenant("acme"))
	if a.StatusCode != 502 || a.code() != cells.CodeCellUnreachable || time.Since(start) < 80*time.Millisecond {
		t.Fatal(a.Status, a.body, time.Since(start))
	}
	// Known to be down: later ones do not wait.
	start = time.Now()
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 502 || time.Since(start) > 80*time.Millisecond {
		t.Fatal(a.Status, time.Since(start))
	}
	f.topo.Set("a", "http://"+f.process("a").addr)
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 {
		t.Fatal(a.Status)
	}
	// It is up again: the wait begins anew.
	f.topo.Set("a", "http://"+closedAddr(t))
	start = time.Now()
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 502 || time.Since(start) < 80*time.Millisecond {
		t.Fatal(a.Status, time.Since(start))
	}
}

// The address of a process has passed to another cell: its gate does not take what
// is not its own, and the client is told what is the case.
func TestAddressOfAnotherCell(t *testing.T) {
	cfg := holdTime(200 * time.Millisecond)
	f := newFleet(t, fleetOptions{cfg: cfg})
	f.place("acme", "a")
	good := f.topo.Upstreams("a")[0]
	f.topo.Set("a", f.topo.Upstreams("b")...)
	a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"), header("X-Op", "1"))
	if a.StatusCode != 502 || a.code() != cells.CodeCellUnreachable {
		t.Fatal(a.Status, a.body)
	}
	f.topo.Set("a", good)
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 || f.executions("1") != 0 {
		t.Fatal(a.Status, f.executions("1"))
	}
}

func TestSlowCellTimesOut(t *testing.T) {
	cfg := edge.Config{}
	cfg.Forward.AnswerTimeout = 50 * time.Millisecond
	f := newFleet(t, fleetOptions{cfg: cfg, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})})
	f.place("acme", "a")
	if a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme")); a.StatusCode != 504 || a.code() != cells.CodeBackendTimeout {
		t.Fatal(a.Status, a.body)
	}
}

// Shutdown lets requests end, ends streams cleanly, and holds nobody for ever.
func TestShutdown(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	f := newFleet(t, fleetOptions{cfg: edge.Config{StreamGrace: 10 * time.Millisecond, DrainTimeout: 10 * time.Second},
		handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/events":
				events(w, r)
			case "/ws":
				wsEcho(w, r)
			default:
				close(entered)
				<-release
				_, _ = io.WriteString(w, "done")
			}
		})})
	f.place("acme", "a")
	s, err := edge.New(f.config(edge.Config{StreamGrace: 10 * time.Millisecond, DrainTimeout: 10 * time.Second}), f.view, f.topo)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.url, f.admin = "http://"+s.Addr(), "http://"+s.AdminAddr()
	stop := f.run(s)
	slow := make(chan answer, 1)
	go func() {
		a, err := f.do(f.http, "GET", "/slow", nil, tenant("acme"))
		if err != nil {
			t.Error(err)
		}
		slow <- a
	}()
	<-entered
	sse := make(chan error, 1)
	r, err := http.NewRequestWithContext(t.Context(), "GET", f.url+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Tenant", "acme")
	resp, err := f.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		sse <- err
	}()
	ws, _, err := f.dialWS("acme")
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stop()
	}()
	if err := <-sse; err != nil {
		t.Fatalf("the event stream broke: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, _, err := ws.Read(ctx); err == nil || ctx.Err() != nil {
		t.Fatalf("the upgraded connection goes on: %v", err)
	}
	if resp, err := f.http.Get(f.admin + "/readyz"); err != nil || resp.StatusCode != 503 {
		t.Fatalf("readyz while draining: %v %v", resp, err)
	} else {
		resp.Body.Close()
	}
	close(release)
	if a := <-slow; a.StatusCode != 200 || a.body != "done" {
		t.Fatalf("the request in flight: %v %s", a.Response, a.body)
	}
	<-stopped
}

// A cell that cannot reach its database: a request is sent again for a while, then it
// gets the cell's own answer, and later ones get it at once.
func TestStoreDown(t *testing.T) {
	down := true
	var mu sync.Mutex
	f := newFleet(t, fleetOptions{cfg: edge.Config{ConnectWait: 200 * time.Millisecond}, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if down {
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "the cell's database did not answer"})
		}
	})})
	f.place("acme", "a")
	ask := func() (answer, time.Duration) {
		t.Helper()
		begun := time.Now()
		a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"))
		return a, time.Since(begun)
	}
	a, took := ask()
	if a.StatusCode != 503 || a.code() != cells.CodeBackendUnavailable || took < 150*time.Millisecond || took > 5*time.Second {
		t.Fatal(a.Status, a.body, took)
	}
	if a, took := ask(); a.StatusCode != 503 || took > 150*time.Millisecond {
		t.Fatal(a.Status, took)
	}
	mu.Lock()
	down = false
	mu.Unlock()
	if a, _ := ask(); a.StatusCode != 200 {
		t.Fatal(a.Status)
	}
}

// A path that climbs out of its tenant's prefix is refused, however it is written; a
// tenant that nobody can be asked about is not called unknown.
func TestClimbingPaths(t *testing.T) {
	f := newFleet(t, fleetOptions{cfg: edge.Config{Extractors: []extract.Spec{{Path: "/t/{tenant}/", Strip: true}}}})
	f.place("acme", "a")
	for _, path := range []string{"/t/acme/../victim/v1", "/t/acme/%2e%2e/victim", "/t/acme/./v1", "/t/acme/x/..;a/y", "/t/acme/%252e%252e/x", "/t/acme/..\\victim"} {
		if a := f.must(f.http, "GET", path, nil); a.StatusCode != 400 || a.code() != cells.CodeBadRequest {
			t.Errorf("%s: %s %s", path, a.Status, a.body)
		}
	}
	if a := f.must(f.http, "GET", "/t/acme/v1/a..b", nil); a.StatusCode != 200 {
		t.Errorf("dots in a name: %s", a.Status)
	}
}
