// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/hold"
)

// ledger takes reports as a directory does: the newest of each move counts.
type ledger struct {
	mu    sync.Mutex // guards all below
	fail  error
	calls int
	moves map[cells.TenantID]api.SeenMove
	bad   []string
}

func (l *ledger) ReportSeen(_ context.Context, r api.SeenReport) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	if err := r.Normalize(); err != nil {
		l.bad = append(l.bad, err.Error())
	}
	if l.fail != nil {
		return l.fail
	}
	for _, m := range r.Moves {
		if old, ok := l.moves[m.Tenant]; ok && old.Base == m.Base && m.Seq <= old.Seq {
			l.bad = append(l.bad, fmt.Sprintf("report %+v after %+v", m, old))
		}
		if l.moves == nil {
			l.moves = map[cells.TenantID]api.SeenMove{}
		}
		l.moves[m.Tenant] = m
	}
	return nil
}

func (l *ledger) seen(t cells.TenantID) (api.SeenMove, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, ok := l.moves[t]
	return m, ok
}

func (l *ledger) setFail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = err
}

// witnessed is a fleet whose edge reports to a ledger.
func witnessedFleet(t *testing.T, cfg edge.Config) (*fleet, *ledger) {
	t.Helper()
	l := &ledger{}
	cfg.Witness = edge.NewWitness(l, quiet())
	f := newFleet(t, fleetOptions{cfg: cfg})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		cfg.Witness.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
		for _, b := range l.bad {
			t.Error(b)
		}
	})
	return f, l
}

func (f *fleet) reported(l *ledger, t cells.TenantID, ok func(api.SeenMove) bool) api.SeenMove {
	f.t.Helper()
	var m api.SeenMove
	f.wait(func() bool {
		var known bool
		m, known = l.seen(t)
		return known && ok(m)
	}, "a report about %s; the last is %+v", t, m)
	return m
}

// Requests that were held and answered cost nothing, and the edge says so.
func TestHeldIsNoDowntime(t *testing.T) {
	f, l := witnessedFleet(t, edge.Config{})
	f.place("acme", "a")
	release := f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	got := make(chan answer, 1)
	go func() {
		a, err := f.do(f.http, "GET", "/", nil, tenant("acme"))
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	f.wait(func() bool { return f.held("acme") == 1 }, "it is held")
	release()
	if a := <-got; a.StatusCode != 200 {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	m := f.reported(l, "acme", func(api.SeenMove) bool { return true })
	if m.Refused != 0 || m.Base != 1 || m.Move == "" {
		t.Errorf("%+v", m)
	}
	// Nor does a move that nobody asked for anything meanwhile.
	f.move("acme", "b", "a")
	if m := f.reported(l, "acme", func(m api.SeenMove) bool { return m.Base == 3 }); m.Refused != 0 {
		t.Errorf("%+v", m)
	}
}

// What is refused because of the move is counted, from the first arrival until the
// last may come again, and nothing else.
func TestRefusalsAreCounted(t *testing.T) {
	const holdTime = 150 * time.Millisecond
	f, l := witnessedFleet(t, edge.Config{Hold: hold.Limits{Time: holdTime, TenantRequests: 2}})
	f.place("acme", "a")
	f.place("other", "a")
	if a := f.must(f.http, "GET", "/", nil, tenant("unknown")); a.StatusCode != 404 {
		t.Fatalf("%d", a.StatusCode)
	}
	release := f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	began := time.Now()
	a := f.must(f.http, "GET", "/", nil, tenant("acme"))
	if a.StatusCode != http.StatusServiceUnavailable || !strings.Contains(a.body, "MOVING") {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	ended := time.Now()
	// Before the cut is over, the directory knows.
	m := f.reported(l, "acme", func(m api.SeenMove) bool { return m.Refused == 1 })
	span := m.FirstAgo - m.LastAgo
	if span < holdTime+time.Second || span > ended.Sub(began)+3*time.Second || m.Base != 1 || m.Move == "" {
		t.Errorf("span %v of %+v", span, m)
	}
	// A client that gives up while it is held, and one that finds the room full.
	ctx, giveUp := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(ctx, "GET", f.url+"/", nil)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("X-Tenant", "acme")
			resp, err := f.http.Do(req)
			if err == nil {
				resp.Body.Close()
			}
		})
	}
	f.wait(func() bool { return f.held("acme") == 2 }, "two are held")
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); !strings.Contains(a.body, "OVERLOADED") {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	giveUp()
	wg.Wait()
	if a := f.must(f.http, "GET", "/", nil, tenant("other")); a.StatusCode != 200 {
		t.Fatalf("%d", a.StatusCode)
	}
	m = f.reported(l, "acme", func(m api.SeenMove) bool { return m.Refused == 4 })
	if later := m.FirstAgo - m.LastAgo; later < span {
		t.Errorf("the span was %v and is %v", span, later)
	}
	release()
	f.wait(func() bool { return !f.moving("acme") }, "the move is over")
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	seq := m.Seq
	if m = f.reported(l, "acme", func(m api.SeenMove) bool { return m.Seq > seq }); m.Refused != 4 || m.Base != 1 {
		t.Errorf("in the end %+v", m)
	}
	for _, id := range []cells.TenantID{"unknown", "other"} {
		if m, ok := l.seen(id); ok {
			t.Errorf("%s was counted: %+v", id, m)
		}
	}
}

// Refusals that do not end are reported all the same.
func TestEndlessRefusalsAreReported(t *testing.T) {
	f, l := witnessedFleet(t, edge.Config{Hold: hold.Limits{Time: 20 * time.Millisecond}})
	f.place("acme", "a")
	release := f.paused("acme", "a", "b")
	defer release()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := f.do(f.http, "GET", "/", nil, tenant("acme")); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	m := f.reported(l, "acme", func(m api.SeenMove) bool { return m.Refused > 3 })
	f.reported(l, "acme", func(next api.SeenMove) bool {
		return next.Refused > m.Refused && next.FirstAgo-next.LastAgo > m.FirstAgo-m.LastAgo
	})
	stop()
	wg.Wait()
}

// A directory that cannot be reached gets the same later; one that refuses is not asked
// for ever.
func TestReportsAreRepeated(t *testing.T) {
	f, l := witnessedFleet(t, edge.Config{})
	l.setFail(cells.ErrUnavailable)
	f.place("acme", "a")
	f.move("acme", "a", "b")
	calls := func() int { l.mu.Lock(); defer l.mu.Unlock(); return l.calls }
	f.wait(func() bool { return calls() >= 1 }, "a report is tried")
	l.setFail(nil)
	if m := f.reported(l, "acme", func(api.SeenMove) bool { return true }); m.Base != 1 {
		t.Errorf("%+v", m)
	}
	l.setFail(&cells.Answer{Code: cells.CodeBadRequest})
	f.move("acme", "b", "a")
	n := calls()
	f.wait(func() bool { return calls() > n }, "a report is tried")
	l.setFail(nil)
	f.move("acme", "a", "b")
	f.reported(l, "acme", func(m api.SeenMove) bool { return m.Base == 5 })
	if calls() != n+2 {
		t.Errorf("%d reports after one that was refused and one that was not", calls()-n)
	}
}

// What is not reported when the edge ends is reported then.
func TestLastReport(t *testing.T) {
	l := &ledger{}
	w := edge.NewWitness(l, quiet())
	row := func(state cells.RouteState, cell cells.CellID, epoch cells.Epoch, move cells.MoveID) cells.TenantRoute {
		r := cells.TenantRoute{TenantID: "t", State: state, CellID: cell, Epoch: epoch, MoveID: move}
		if move != "" {
			r.SourceCell, r.TargetCell, r.Base = "a", "b", 1
		}
		return r
	}
	w.Route(cells.TenantRoute{}, row(cells.StateActive, "a", 1, ""))
	w.Route(row(cells.StateActive, "a", 1, ""), row(cells.StateQuiescing, "a", 1, "m1"))
	w.Route(row(cells.StateQuiescing, "a", 1, "m1"), row(cells.StateActive, "b", 3, ""))
	// Another tenant's move, which this edge has only seen the ends of.
	x, y := row(cells.StateActive, "a", 7, ""), row(cells.StateActive, "b", 9, "")
	x.TenantID, y.TenantID = "u", "u"
	w.Route(x, y)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.Run(ctx)
	if m, ok := l.seen("t"); !ok || m.Move != "m1" || m.Base != 1 || m.Refused != 0 {
		t.Errorf("%+v", m)
	}
	if m, ok := l.seen("u"); !ok || m.Move != "" || m.Base != 7 || m.Refused != 0 {
		t.Errorf("%+v", m)
	}
	w.Run(ctx)
	if l.calls != 1 || len(l.bad) > 0 {
		t.Errorf("%d reports, %v", l.calls, l.bad)
	}
}
