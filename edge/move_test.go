// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Writers hammer a tenant while it is moved back and forth: no request fails, and
// each runs exactly once.
func TestCutUnderLoad(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	f.place("other", "b")
	bodies := map[string]func() io.Reader{
		"none":    func() io.Reader { return nil },
		"small":   func() io.Reader { return strings.NewReader("hello") },
		"chunked": func() io.Reader { return io.MultiReader(strings.NewReader("a"), strings.NewReader("b")) },
		"large":   func() io.Reader { return bytes.NewReader(make([]byte, 300<<10)) },
		"stream":  func() io.Reader { return io.LimitReader(zeros{}, 200<<10) },
	}
	want := map[string]string{"none": "0", "small": "5", "chunked": "2", "large": "307200", "stream": "204800"}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var total, others atomic.Int64
	hammer := func(c *http.Client, proto, kind, id string, count *atomic.Int64) {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				op := fmt.Sprintf("%s-%s-%s-%d", proto, kind, id, n)
				a, err := f.do(c, "POST", "/v1/x", bodies[kind](), tenant(id), header("X-Op", op))
				switch {
				case err != nil:
					t.Errorf("%s: %v", op, err)
					return
				case a.StatusCode != 200 || a.Header.Get("X-Body") != want[kind]:
					t.Errorf("%s: %d %s (%s)", op, a.StatusCode, a.body, a.Header.Get("X-Body"))
					return
				case f.executions(op) != 1:
					t.Errorf("%s ran %d times", op, f.executions(op))
					return
				}
				count.Add(1)
			}
		})
	}
	for kind := range bodies {
		hammer(f.http, "h1", kind, "acme", &total)
		hammer(f.h2, "h2", kind, "acme", &total)
	}
	hammer(f.http, "h1", "small", "other", &others)
	from, to := cells.CellID("a"), cells.CellID("b")
	for range 12 {
		n := total.Load()
		f.wait(func() bool { return total.Load() > n+20 || t.Failed() }, "requests between moves")
		f.move("acme", from, to)
		from, to = to, from
	}
	stop()
	wg.Wait()
	t.Logf("%d requests to the tenant that moved, %d to the other", total.Load(), others.Load())
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Held requests wait for the outcome of the cut, and go where the tenant is then.
func TestHeldDuringCut(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	release := f.paused("acme", "a", "b")
	f.wait(func() bool { return f.view.Lookup("acme").Route.State == cells.StateCopying }, "the edge sees the cut")
	got := make(chan answer, 3)
	for i := range 3 {
		go func() {
			a, err := f.do(f.http, "POST", "/x", strings.NewReader("body"), tenant("acme"), header("X-Op", fmt.Sprint(i)))
			if err != nil {
				t.Error(err)
			}
			got <- a
		}()
	}
	f.wait(func() bool { return f.held("acme") == 3 }, "three are held")
	f.place("other", "b")
	if a := f.must(f.http, "GET", "/", nil, tenant("other")); a.StatusCode != 200 {
		t.Fatalf("another tenant: %d %s", a.StatusCode, a.body)
	}
	release()
	for range 3 {
		if a := <-got; a.StatusCode != 200 || a.body != "b 3 acme" {
			t.Fatalf("%d %s", a.StatusCode, a.body)
		}
	}
	if f.held("acme") != 0 {
		t.Fatal("the room is not empty")
	}
}

// lagging is a view of the routes that does not hear of changes until it asks.
type lagging struct {
	edgeRoutes
	mu     sync.Mutex // guards frozen
	frozen map[cells.TenantID]cells.Decision
}

type edgeRoutes interface {
	Lookup(cells.TenantID) cells.Decision
	Refresh(context.Context, cells.TenantID) (cells.TenantRoute, error)
	Wait(context.Context, cells.TenantID, cells.Revision) (cells.TenantRoute, error)
	Status() cells.RouterStatus
}

func (l *lagging) freeze(t cells.TenantID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen[t] = l.edgeRoutes.Lookup(t)
}

func (l *lagging) Lookup(t cells.TenantID) cells.Decision {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d, ok := l.frozen[t]; ok {
		return d
	}
	return l.edgeRoutes.Lookup(t)
}

func (l *lagging) Refresh(ctx context.Context, t cells.TenantID) (cells.TenantRoute, error) {
	l.mu.Lock()
	delete(l.frozen, t)
	l.mu.Unlock()
	return l.edgeRoutes.Refresh(ctx, t)
}

// A gate's refusal is repaired behind the client's back, for every kind of body.
func TestRefusalIsRepaired(t *testing.T) {
	lag := &lagging{frozen: map[cells.TenantID]cells.Decision{}}
	table := cells.NewMemTable()
	t.Cleanup(func() { table.Close() })
	r := cells.NewRouter(table, cells.WithRouterLogger(quiet()))
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	lag.edgeRoutes = r
	f := newFleet(t, fleetOptions{table: table, routes: lag})
	f.place("acme", "a")
	f.wait(func() bool { return r.Lookup("acme").Cell == "a" }, "the view")
	from, to := cells.CellID("a"), cells.CellID("b")
	for name, c := range map[string]struct {
		body io.Reader
		size string
	}{
		"none": {nil, "0"}, "small": {strings.NewReader("12345"), "5"}, "chunked": {io.MultiReader(strings.NewReader("123")), "3"},
		"limit": {bytes.NewReader(make([]byte, 64<<10)), "65536"}, "above": {bytes.NewReader(make([]byte, 64<<10+1)), "65537"},
		"large": {bytes.NewReader(make([]byte, 5<<20)), "5242880"}, "endless": {io.LimitReader(zeros{}, 1<<20), "1048576"},
	} {
		for proto, client := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
			t.Run(name+" "+proto, func(t *testing.T) {
				lag.freeze("acme")
				f.move("acme", from, to)
				f.wait(func() bool { return f.process(from).router.Lookup("acme").Cell == to }, "the old cell knows")
				from, to = to, from
				op := name + proto
				if s, ok := c.body.(io.Seeker); ok {
					if _, err := s.Seek(0, io.SeekStart); err != nil {
						t.Fatal(err)
					}
				} else if name == "endless" {
					c.body = io.LimitReader(zeros{}, 1<<20)
				} else if name == "chunked" {
					c.body = io.MultiReader(strings.NewReader("123"))
				}
				a := f.must(client, "POST", "/x", c.body, tenant("acme"), header("X-Op", op))
				if a.StatusCode != 200 || a.Header.Get("X-Cell") != string(from) || a.Header.Get("X-Body") != c.size {
					t.Fatalf("%d %s, body of %s", a.StatusCode, a.body, a.Header.Get("X-Body"))
				}
				if f.executions(op) != 1 {
					t.Fatalf("ran %d times", f.executions(op))
				}
			})
		}
	}
}

// A tenant that nobody ever releases: the request ends with MOVING, in time.
func TestHoldTime(t *testing.T) {
	f := newFleet(t, fleetOptions{cfg: holdTime(150 * time.Millisecond)})
	f.place("acme", "a")
	f.paused("acme", "a", "b")
	start := time.Now()
	a := f.must(f.http, "GET", "/", nil, tenant("acme"))
	if a.StatusCode != 503 || a.code() != cells.CodeMoving || a.Header.Get("Retry-After") == "" || a.Header.Get(cells.HeaderRevision) == "" {
		t.Fatalf("%d %s %v", a.StatusCode, a.body, a.Header)
	}
	if d := time.Since(start); d < 100*time.Millisecond || d > 5*time.Second {
		t.Fatalf("held for %s", d)
	}
}

// One tenant's held requests are bounded, and leave others alone.
func TestHoldCount(t *testing.T) {
	cfg := holdTime(20 * time.Second)
	cfg.Hold.TenantRequests = 2
	f := newFleet(t, fleetOptions{cfg: cfg})
	f.place("acme", "a")
	f.place("other", "a")
	release := f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if a, err := f.do(f.http, "GET", "/", nil, tenant("acme")); err != nil || a.StatusCode != 200 {
				t.Errorf("held: %v %v", a.Response, err)
			}
		})
	}
	f.wait(func() bool { return f.held("acme") == 2 }, "two are held")
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 503 || a.code() != cells.CodeOverloaded {
		t.Fatalf("the third: %d %s", a.StatusCode, a.body)
	}
	if a := f.must(f.http, "GET", "/", nil, tenant("other")); a.StatusCode != 200 {
		t.Fatalf("another tenant: %d %s", a.StatusCode, a.body)
	}
	release()
	wg.Wait()
}

// A held client that goes away gives its place back.
func TestHeldClientGoes(t *testing.T) {
	f := newFleet(t, fleetOptions{})
	f.place("acme", "a")
	f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := f.do(f.http, "GET", "/", nil, tenant("acme"), func(r *http.Request) { *r = *r.WithContext(ctx) })
		if err == nil {
			t.Error("the request was answered")
		}
	}()
	f.wait(func() bool { return f.held("acme") == 1 }, "held")
	cancel()
	<-done
	f.wait(func() bool { return f.held("acme") == 0 }, "the place is free")
}
