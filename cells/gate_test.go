// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
)

// gatesOf returns the gates of cell-a over a table with acme there at epoch 4.
func gatesOf(t *testing.T, opts ...cells.GateOption) (*cells.Gates, *cells.MemTable) {
	t.Helper()
	table := cells.NewMemTable()
	t.Cleanup(func() { _ = table.Close() })
	set(t, table, active("acme", "cell-a", 4))
	r := startRouter(t, table)
	return cells.NewGates("cell-a", r, append(opts, cells.WithGateLogger(quiet))...), table
}

func admit(t *testing.T, g *cells.Gates, req cells.AdmitRequest) *cells.Admission {
	t.Helper()
	a, err := g.Admit(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func codeOf(err error) cells.Code {
	if a := cells.AnswerOf(err); a != nil {
		return a.Code
	}
	return ""
}

// draining takes acme's row from ACTIVE(4) to DRAINING(4).
func draining(t *testing.T, table cells.RoutingTable) cells.TenantRoute {
	t.Helper()
	set(t, table, inMove("acme", cells.StateQuiescing, "cell-a", 4, 4))
	return set(t, table, inMove("acme", cells.StateDraining, "cell-a", 4, 4))
}

func TestDoneCountsOnce(t *testing.T) {
	noLeaks(t)
	g, _ := gatesOf(t)
	var all []*cells.Admission
	for i := range 100 {
		all = append(all, admit(t, g, cells.AdmitRequest{Tenant: "acme", Stream: i%3 == 0}))
	}
	if g.InFlight("acme") != 100 || g.Total() != 100 || g.InFlight("bolt") != 0 {
		t.Fatalf("in flight: %d, in all %d", g.InFlight("acme"), g.Total())
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for i, a := range all {
		a.Done()
		a.Done()
		if n := g.InFlight("acme"); n != int64(99-i) {
			t.Fatalf("after %d were done %d are in flight", i+1, n)
		}
		if a.Context().Err() == nil {
			t.Fatal("the context of what is done has not ended")
		}
	}
}

func TestAdmissionInContext(t *testing.T) {
	noLeaks(t)
	g, _ := gatesOf(t)
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "v")
	a, err := g.Admit(ctx, cells.AdmitRequest{Tenant: "acme"})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Done()
	got, ok := cells.AdmissionFromContext(a.Context())
	if !ok || got != a || a.Context().Value(key{}) != "v" || a.Tenant != "acme" || a.Cell != "cell-a" || a.Epoch != 4 {
		t.Errorf("admission %+v in its context: %v", a, ok)
	}
	if _, ok := cells.AdmissionFromContext(t.Context()); ok {
		t.Error("found an admission where there is none")
	}
	if ctx := t.Context(); cells.MarkStream(ctx) != ctx {
		t.Error("MarkStream without an admission should do nothing")
	}
}

// Requests are waited for; streams and jobs are told to end, and why.
func TestDrain(t *testing.T) {
	noLeaks(t)
	g, table := gatesOf(t)
	request := admit(t, g, cells.AdmitRequest{Tenant: "acme", Label: "/v1/slow"})
	stream := admit(t, g, cells.AdmitRequest{Tenant: "acme", Stream: true, Label: "/v1/events"})
	job := admit(t, g, cells.AdmitRequest{Tenant: "acme", Internal: true, Label: "nightly"})
	marked := admit(t, g, cells.AdmitRequest{Tenant: "acme"})
	markedCtx := cells.MarkStream(marked.Context())

	row := draining(t, table)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := g.Drain(ctx, row)
	var de *cells.DrainError
	if !errors.As(err, &de) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a drain that runs out of time: %v", err)
	}
	if de.InFlight != 4 || len(de.Holders) != 4 || de.Tenant != "acme" || de.Epoch != 4 {
		t.Errorf("%+v", de)
	}
	for _, want := range []string{"request /v1/slow", "stream /v1/events", "stream nightly", "4 in flight"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %q", err, want)
		}
	}
	if request.Context().Err() != nil {
		t.Error("a request was cancelled")
	}
	for name, ctx := range map[string]context.Context{"stream": stream.Context(), "job": job.Context(), "marked": markedCtx} {
		cause := context.Cause(ctx)
		if a := cells.AnswerOf(cause); a == nil || a.Code != cells.CodeMoving || a.Revision != row.Revision-1 && a.Revision != row.Revision {
			t.Errorf("%s: cause %v", name, cause)
		}
		if !errors.Is(cause, cells.ErrGateClosed) {
			t.Errorf("%s: the cause does not say that the gate closed", name)
		}
	}
	// What is marked now has ended already.
	if late := cells.MarkStream(request.Context()); !errors.Is(context.Cause(late), cells.ErrGateClosed) {
		t.Errorf("marked after the gate had closed: %v", context.Cause(late))
	}
	if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"}); codeOf(err) != cells.CodeMoving {
		t.Errorf("admitted through a closed gate: %v", err)
	}

	drained := make(chan error)
	go func() { drained <- g.Drain(t.Context(), row) }()
	for i, a := range []*cells.Admission{request, stream, job, marked} {
		select {
		case err := <-drained:
			t.Fatalf("drained (%v) with %d in flight", err, 4-i)
		default:
		}
		a.Done()
	}
	if err := <-drained; err != nil {
		t.Fatal(err)
	}
	if err := g.Drain(t.Context(), row); err != nil {
		t.Errorf("the same drain again: %v", err)
	}
}

func TestDrainRefuses(t *testing.T) {
	noLeaks(t)
	g, table := gatesOf(t)
	row := draining(t, table)
	other := row
	other.CellID = "cell-b"
	if err := g.Drain(t.Context(), other); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("of another cell: %v", err)
	}
	none := row
	none.Revision = 0
	if err := g.Drain(t.Context(), none); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("without a revision: %v", err)
	}
	if err := g.Drain(t.Context(), cells.TenantRoute{Revision: 1}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("without anything: %v", err)
	}
	// The move was given up: the cell serves again, and epoch 4 is still good.
	decided := inMove("acme", cells.StateCommitting, "cell-a", 4, 6)
	decided.Floor = 4
	set(t, table, decided)
	back := active("acme", "cell-a", 6)
	back.Floor = 4
	seen(t, g.Router(), set(t, table, back))
	a := admit(t, g, cells.AdmitRequest{Tenant: "acme", HasEpoch: true, Epoch: 4, Stream: true})
	defer a.Done()
	if err := g.Drain(t.Context(), row); !errors.Is(err, cells.ErrStaleOrder) {
		t.Errorf("an order that comes late: %v", err)
	}
	if a.Context().Err() != nil {
		t.Error("a late order has ended a stream of the newer route")
	}
}

// A gate opens again only with a newer route that serves here.
func TestGateOpensAgain(t *testing.T) {
	noLeaks(t)
	g, table := gatesOf(t)
	row := draining(t, table)
	if err := g.Drain(t.Context(), row); err != nil {
		t.Fatal(err)
	}
	// Somebody hands in an older ACTIVE row: it changes nothing.
	old := active("acme", "cell-a", 4)
	old.Revision = 1
	g.Router().Observe(old)
	if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"}); codeOf(err) != cells.CodeMoving {
		t.Errorf("an older row opened the gate: %v", err)
	}
	set(t, table, inMove("acme", cells.StateCopying, "cell-a", 4, 5))
	set(t, table, inMove("acme", cells.StateCommitting, "cell-a", 4, 6))
	seen(t, g.Router(), set(t, table, active("acme", "cell-a", 6)))
	a := admit(t, g, cells.AdmitRequest{Tenant: "acme"})
	if a.Epoch != 6 {
		t.Errorf("admitted at %d", a.Epoch)
	}
	a.Done()
	if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme", HasEpoch: true, Epoch: 4}); codeOf(err) != cells.CodeStaleRoute {
		t.Errorf("routed by the epoch before the cut: %v", err)
	}
}

// An order to drain a route that still serves closes the gate too.
func TestDrainOfServingRoute(t *testing.T) {
	noLeaks(t)
	g, table := gatesOf(t)
	row, err := table.Get(t.Context(), "acme")
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Drain(t.Context(), row); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"}); codeOf(err) != cells.CodeMoving {
		t.Errorf("admitted: %v", err)
	}
}

// Streams end when the view learns that the tenant leaves, without any order.
func TestStreamsEndByTheView(t *testing.T) {
	deleted := active("acme", "cell-a", 5)
	deleted.State = cells.StateDeleting
	kept := active("acme", "cell-a", 6)
	kept.Floor = 4
	for _, c := range []struct {
		name string
		next cells.TenantRoute
		code cells.Code
	}{
		{"prepared", inMove("acme", cells.StateActive, "cell-a", 4, 4), ""},
		{"quiescing", inMove("acme", cells.StateQuiescing, "cell-a", 4, 4), cells.CodeMoving},
		{"gone to another cell", active("acme", "cell-b", 6), cells.CodeMoving},
		{"back after a cut", active("acme", "cell-a", 6), cells.CodeMoving},
		{"back without a cut", kept, ""},
		{"deleted", deleted, cells.CodeUnknownTenant},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			g, table := gatesOf(t)
			stream := admit(t, g, cells.AdmitRequest{Tenant: "acme", Stream: true})
			defer stream.Done()
			seen(t, g.Router(), set(t, table, c.next))
			if got := codeOf(context.Cause(stream.Context())); got != c.code {
				t.Errorf("the stream ended with %q, want %q", got, c.code)
			}
		})
	}
}

// A stream that is admitted while the view changes is not overlooked.
func TestStreamsAgainstTheView(t *testing.T) {
	noLeaks(t)
	r := startRouter(t, cells.NewMemTable())
	g := cells.NewGates("cell-a", r)
	for i := range 5000 {
		tenant := cells.TenantID(fmt.Sprintf("t-%d", i))
		row := active(tenant, "cell-a", 4)
		row.Revision = 1
		r.Observe(row)
		var wg sync.WaitGroup
		var stream *cells.Admission
		wg.Go(func() { stream, _ = g.Admit(t.Context(), cells.AdmitRequest{Tenant: tenant, Stream: true}) })
		next := inMove(tenant, cells.StateQuiescing, "cell-a", 4, 4)
		next.Revision = 2
		r.Observe(next)
		wg.Wait()
		if stream == nil {
			continue // the view was first
		}
		if stream.Context().Err() == nil {
			t.Fatalf("round %d: the stream goes on", i)
		}
		stream.Done()
	}
}

// However drains and admissions race: once a drain has returned, nothing admitted
// at its epoch is in flight, ever.
func TestDrainAgainstAdmit(t *testing.T) {
	noLeaks(t)
	rounds := 300
	if testing.Short() {
		rounds = 30
	}
	for round := range rounds {
		table := cells.NewMemTable()
		row := set(t, table, active("acme", "cell-a", 4))
		r := cells.NewRouter(table, cells.WithRouterLogger(quiet))
		if err := r.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		var opens atomic.Int32
		g := cells.NewGates("cell-a", r, cells.WithOpener(func(context.Context, cells.FenceOrder) error {
			opens.Add(1)
			return nil
		}))
		var drained atomic.Bool // set after Drain returned
		var wrong atomic.Int32
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for w := range 4 {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(round), uint64(w)))
				for {
					select {
					case <-stop:
						return
					default:
					}
					a, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme", HasEpoch: rnd.IntN(2) == 0, Epoch: 4, Stream: rnd.IntN(3) == 0})
					if err != nil {
						continue
					}
					if a.Epoch <= 4 && drained.Load() {
						wrong.Add(1)
					}
					for range rnd.IntN(50) {
						if a.Epoch <= 4 && drained.Load() {
							wrong.Add(1)
						}
					}
					a.Done()
				}
			})
		}
		want := int32(1)
		if round%3 != 0 {
			want = 2
			eventually(t, "something was admitted", func() bool { return opens.Load() == 1 })
		}
		// Half of the rounds the view learns of the cut first, half the gate does.
		next := inMove("acme", cells.StateDraining, "cell-a", 4, 4)
		next.Revision = row.Revision + 1
		if round%2 == 0 {
			next = set(t, table, next)
		}
		if err := g.Drain(t.Context(), next); err != nil {
			t.Fatal(err)
		}
		drained.Store(true)
		if n := g.InFlight("acme"); n != 0 {
			t.Fatalf("round %d: drained with %d in flight", round, n)
		}
		// It is given back to the cell at a higher epoch, under the same load.
		after := active("acme", "cell-a", 6)
		after.Revision = row.Revision + 5
		r.Observe(after)
		eventually(t, "it is served again", func() bool {
			a, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme"})
			if err != nil {
				return false
			}
			defer a.Done()
			return a.Epoch == 6
		})
		close(stop)
		wg.Wait()
		if wrong.Load() > 0 || g.Total() != 0 || opens.Load() < want || opens.Load() > 2 {
			t.Fatalf("round %d: %d admissions outlived the drain, %d in flight at the end, %d fences opened", round, wrong.Load(), g.Total(), opens.Load())
		}
		r.Close()
		table.Close()
	}
}

// The gate against a naive version of itself: random routes, admissions and drains.
func TestGatesAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r := cells.NewRouter(cells.NewMemTable(), cells.WithRouterLogger(quiet))
		defer r.Close()
		if err := r.Start(context.Background()); err != nil {
			rt.Fatal(err)
		}
		g := cells.NewGates("cell-a", r, cells.WithGateLogger(quiet))
		cur := cells.TenantRoute{}
		var closed cells.Revision
		live := map[*cells.Admission]bool{}  // whether it is a stream
		ended := map[*cells.Admission]bool{} // what has ended stays so
		rt.Repeat(map[string]func(*rapid.T){
			"route": func(rt *rapid.T) {
				next := active("acme", "cell-a", cur.Epoch+cells.Epoch(rapid.IntRange(1, 2).Draw(rt, "up")))
				next.Floor = cells.Epoch(rapid.IntRange(0, int(next.Epoch)).Draw(rt, "floor"))
				switch rapid.IntRange(0, 3).Draw(rt, "kind") {
				case 0:
					next.CellID = "cell-b"
				case 1:
					next.State = cells.StateDeleted
				case 2:
					st := cells.RouteState(rapid.IntRange(int(cells.StateQuiescing), int(cells.StateCommitting)).Draw(rt, "state"))
					next = inMove("acme", st, "cell-a", next.Epoch, next.Epoch)
				}
				next.Revision = cur.Revision + 1
				cur = next
				r.Observe(cur)
			},
			"late route": func(rt *rapid.T) {
				old := active("acme", "cell-a", 1)
				old.Revision = min(1, cur.Revision)
				r.Observe(old)
			},
			"admit": func(rt *rapid.T) {
				req := cells.AdmitRequest{Tenant: "acme", HasEpoch: rapid.Bool().Draw(rt, "has"), Stream: rapid.Bool().Draw(rt, "stream")}
				if req.HasEpoch {
					req.Epoch = cells.Epoch(rapid.IntRange(0, int(cur.Epoch)).Draw(rt, "epoch"))
				}
				want := cells.Code("")
				switch {
				case cur.State == 0 || cur.State == cells.StateDeleted:
					want = cells.CodeUnknownTenant
				case cur.CellID != "cell-a":
					want = cells.CodeWrongCell
				case cur.State != cells.StateActive:
					want = cells.CodeMoving
				case req.HasEpoch && req.Epoch < cur.Floor:
					want = cells.CodeStaleRoute
				case cur.Revision <= closed:
					want = cells.CodeMoving
				}
				a, err := g.Admit(context.Background(), req)
				if codeOf(err) != want {
					rt.Fatalf("%+v under %s(%s,%d..%d): %v, want %q", req, cur.State, cur.CellID, cur.Floor, cur.Epoch, err, want)
				}
				if a != nil {
					if a.Epoch != cur.Epoch {
						rt.Fatalf("admitted at %d under %d", a.Epoch, cur.Epoch)
					}
					live[a] = req.Stream
				}
			},
			"done": func(rt *rapid.T) {
				for a := range live {
					a.Done()
					delete(live, a)
					break
				}
			},
			"drain": func(rt *rapid.T) {
				if cur.State == 0 || cur.CellID != "cell-a" {
					return
				}
				closed = cur.Revision
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				err := g.Drain(ctx, cur)
				if (err == nil) != (len(live) == 0) {
					rt.Fatalf("drain with %d in flight: %v", len(live), err)
				}
			},
			"": func(rt *rapid.T) {
				if g.InFlight("acme") != int64(len(live)) {
					rt.Fatalf("%d in flight, want %d", g.InFlight("acme"), len(live))
				}
				for a, stream := range live {
					good := cur.State == cells.StateActive && cur.CellID == "cell-a" && cur.Floor <= a.Epoch && cur.Revision > closed
					ended[a] = ended[a] || stream && !good
					if got := a.Context().Err() != nil; got != ended[a] {
						rt.Fatalf("stream %v of epoch %d under %s(%s,%d..%d): ended %v", stream, a.Epoch, cur.State, cur.CellID, cur.Floor, cur.Epoch, got)
					}
				}
			},
		})
	})
}

// Epoch 0 has no fence to raise, and a tenant that gets a row later keeps what was
// admitted without one.
func TestDefaultCellGetsARow(t *testing.T) {
	noLeaks(t)
	table := cells.NewMemTable()
	r := startRouter(t, table, cells.WithDefaultCell("cell-a"))
	var orders atomic.Int32
	g := cells.NewGates("cell-a", r, cells.WithOpener(func(context.Context, cells.FenceOrder) error { orders.Add(1); return nil }))
	stream := admit(t, g, cells.AdmitRequest{Tenant: "acme", HasEpoch: true, Stream: true})
	defer stream.Done()
	if stream.Epoch != 0 || orders.Load() != 0 {
		t.Errorf("epoch %d, %d orders", stream.Epoch, orders.Load())
	}
	row := active("acme", "cell-a", 1)
	row.Floor = 0
	seen(t, r, set(t, table, row))
	if stream.Context().Err() != nil {
		t.Error("the stream was ended although its epoch is good")
	}
	late := admit(t, g, cells.AdmitRequest{Tenant: "acme", HasEpoch: true, Epoch: 0})
	late.Done()
	if late.Epoch != 1 || orders.Load() != 1 {
		t.Errorf("epoch %d, %d orders", late.Epoch, orders.Load())
	}
	seen(t, r, set(t, table, active("acme", "cell-b", 3)))
	if codeOf(context.Cause(stream.Context())) != cells.CodeMoving {
		t.Errorf("the stream goes on: %v", context.Cause(stream.Context()))
	}
}

// Names that are asked for once do not stay.
func TestIdleGatesAreDropped(t *testing.T) {
	noLeaks(t)
	r := startRouter(t, cells.NewMemTable(), cells.WithDefaultCell("cell-a"))
	g := cells.NewGates("cell-a", r)
	held := admit(t, g, cells.AdmitRequest{Tenant: "held"})
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			for i := range 70000 {
				a, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: cells.TenantID(fmt.Sprintf("t-%d-%d", w, i))})
				if err != nil {
					t.Error(err)
					return
				}
				a.Done()
			}
		})
	}
	wg.Wait()
	if n := cells.GateCount(g); n > 80000 {
		t.Errorf("%d gates for 140001 names", n)
	}
	if g.Total() != 1 || g.InFlight("held") != 1 {
		t.Errorf("%d in flight", g.Total())
	}
	held.Done()
}

func TestNewGatesPanics(t *testing.T) {
	r := cells.NewRouter(cells.NewMemTable())
	for name, f := range map[string]func(){
		"cell":   func() { cells.NewGates("Cell A", r) },
		"router": func() { cells.NewGates("cell-a", nil) },
		"key":    func() { cells.NewGates("cell-a", r, cells.WithAdmissionKey([]byte("short"))) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

func TestRefusalOfFencedWork(t *testing.T) {
	noLeaks(t)
	g, table := gatesOf(t)
	a := admit(t, g, cells.AdmitRequest{Tenant: "acme"})
	defer a.Done()
	if got := a.Refusal(errors.New("disk full")); got != nil {
		t.Errorf("an error that is no refusal: %v", got)
	}
	fenced := fmt.Errorf("commit: %w", cells.ErrFenced)
	if got := a.Refusal(fenced); got == nil || got.Code != cells.CodeStaleRoute || !errors.Is(got, cells.ErrFenced) {
		t.Errorf("fenced while the view knows nothing: %v", got)
	}
	seen(t, g.Router(), draining(t, table))
	if got := a.Refusal(fenced); got == nil || got.Code != cells.CodeMoving {
		t.Errorf("fenced during a cut: %v", got)
	}
}
