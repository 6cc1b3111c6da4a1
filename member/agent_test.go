// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

func moveRef() cells.MoveRef {
	return cells.MoveRef{ID: "m", Tenant: "t", Source: "a", Target: "b", Base: 1}
}

// movingRoute is moveRef's route before the cut.
func movingRoute() cells.TenantRoute {
	r := active("t", "a", 1)
	r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", "a", "b", 1
	r.Residue = []cells.Residue{{Cell: "b", Epoch: 3, Move: "m"}}
	return r
}

// pair joins a process to each of two cells.
func pair(t *testing.T, p *plane, src, dst *fakeAgent) (a, b *Member, ka, kb *memKeeper) {
	t.Helper()
	ka, kb = newMemKeeper(), newMemKeeper()
	a = p.join(t, p.config(t, "a"), WithStore(store(ka, src)))
	b = p.join(t, p.config(t, "b"), WithStore(store(kb, dst)))
	p.ready(t, a)
	p.ready(t, b)
	return a, b, ka, kb
}

func TestOrdersReachTheStore(t *testing.T) {
	p := newPlane(t)
	var rate int
	var limits transfer.Limits
	var grouped atomic.Int32
	agent := &fakeAgent{
		surveyOf: func(ctx context.Context, tn cells.TenantID) (transfer.Survey, error) {
			// Both of a preflight's, but not that of somebody who asks what a cell holds.
			if m := transfer.MoveOf(ctx); m == (cells.MoveRef{Tenant: tn, Source: "a", Target: "b"}) && transfer.GroupOf(ctx) == "g" {
				grouped.Add(1)
			}
			return transfer.Survey{Engine: "mem", Fingerprint: "f", Tables: []transfer.TableInfo{{Table: guard.Table{Name: "items"}, Rows: 7}}}, nil
		},
		prepare: func(ctx context.Context, m cells.MoveRef, s transfer.Source, progress func(cells.Progress)) (cells.Prediction, error) {
			if m != moveRef() {
				return cells.Prediction{}, fmt.Errorf("move %+v", m)
			}
			rate, _ = transfer.RateOf(ctx)
			limits, _ = transfer.LimitsOf(ctx)
			progress(cells.Progress{Phase: "snapshot", Done: 1, Total: 2})
			return cells.Prediction{Pause: time.Second, LagChanges: 3, WriteRate: 1.5}, nil
		},
		finish: func(context.Context, cells.MoveRef, transfer.Source, func(cells.Progress)) (string, error) {
			return "mark", nil
		},
		discard: func(_ context.Context, tn cells.TenantID, r cells.Residue, _ func(cells.Progress)) error {
			if tn != "t" || r != (cells.Residue{Cell: "a", Epoch: 2, Move: "m"}) {
				return fmt.Errorf("discard %s %+v", tn, r)
			}
			return nil
		},
	}
	p.put(t, movingRoute())
	_, _, ka, kb := pair(t, p, agent, agent)
	c := p.client(t)
	ctx := t.Context()
	m := moveRef()

	if err := c.Close(ctx, cells.FenceOrder{Cell: "a", Tenant: "t", Epoch: 2, Move: "m"}); err != nil {
		t.Fatal(err)
	}
	if f, _ := ka.get("t"); f.Open || f.Epoch != 2 || f.Move != "m" {
		t.Fatalf("%+v", f)
	}
	if err := c.Close(ctx, cells.FenceOrder{Cell: "a", Tenant: "t", Epoch: 1, Move: "m"}); !errors.Is(err, cells.ErrStaleOrder) {
		t.Fatal(err)
	}
	ka.set(guard.Fence{Tenant: "t", Epoch: 2, Seq: 41})
	if mark, err := c.Pause(ctx, cells.BarrierOrder{Cell: "a", Tenant: "t", Epoch: 2, Move: "m"}); err != nil || mark != 41 {
		t.Fatal(mark, err)
	}
	if err := c.Start(ctx, cells.BarrierOrder{Cell: "b", Tenant: "t", Epoch: 3, Move: "m"}, 41); err != nil {
		t.Fatal(err)
	}
	if f, _ := kb.get("t"); f.Seq != 41 {
		t.Fatalf("%+v", f)
	}
	if err := c.Open(ctx, cells.FenceOrder{Cell: "b", Tenant: "t", Epoch: 3, Floor: 3}); err != nil {
		t.Fatal(err)
	}
	if f, _ := kb.get("t"); !f.Open || f.Epoch != 3 {
		t.Fatalf("%+v", f)
	}
	pf, err := c.Preflight(transfer.ContextWithGroup(ctx, "g"), m)
	if err != nil || pf.Rows != 7 || pf.Copy <= 0 || pf.Pause <= 0 {
		t.Fatalf("%+v %v", pf, err)
	}
	var seen []cells.Progress
	throttled := transfer.ContextWithRate(transfer.ContextWithLimits(ctx, transfer.Limits{MaxRetained: 7, MaxReplicaLag: time.Minute}), 99)
	if _, err := c.Prepare(throttled, m, nil); err != nil || rate != 99 || limits != (transfer.Limits{MaxRetained: 7, MaxReplicaLag: time.Minute}) {
		t.Fatal(rate, limits, err)
	}
	if _, err := c.Prepare(transfer.ContextWithLimits(ctx, transfer.Limits{MaxReplicaLag: -1}), m, nil); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
	pred, err := c.Prepare(ctx, m, func(p cells.Progress) { seen = append(seen, p) })
	if err != nil || pred != (cells.Prediction{Pause: time.Second, LagChanges: 3, WriteRate: 1.5}) || len(seen) != 1 || seen[0].Done != 1 {
		t.Fatalf("%+v %v %v", pred, seen, err)
	}
	if rate != 0 || limits != (transfer.Limits{}) {
		t.Fatal("without any", rate, limits)
	}
	if mark, compared, err := c.FinishProved(ctx, m, nil); err != nil || mark != "mark" ||
		!slices.Equal(compared, []cells.Comparison{{Table: "item", Position: "mark", Whole: true, Rows: 3, Sum: "abc"}}) {
		t.Fatal(mark, compared, err)
	}
	if mark, err := c.Finish(ctx, m, nil); err != nil || mark != "mark" {
		t.Fatal(mark, err)
	}
	if err := c.Discard(ctx, "t", cells.Residue{Cell: "a", Epoch: 2, Move: "m"}, nil); err != nil {
		t.Fatal(err)
	}
	if has, err := c.Holds(ctx, "a", "t"); err != nil || !has {
		t.Fatal(has, err)
	}
	if n := grouped.Load(); n != 2 {
		t.Errorf("%d surveys knew of the move's group, want those of both cells", n)
	}

	// Nobody there.
	err = c.Close(ctx, cells.FenceOrder{Cell: "c", Tenant: "t", Epoch: 9})
	if !errors.Is(err, cells.ErrUnavailable) || !strings.Contains(err.Error(), "cell c") {
		t.Fatal(err)
	}
	if err := c.Close(ctx, cells.FenceOrder{Cell: "C", Tenant: "t"}); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
	if _, err := c.Prepare(ctx, cells.MoveRef{ID: "x", Tenant: "t", Source: "a", Target: "c", Base: 1}, nil); !errors.Is(err, cells.ErrUnavailable) {
		t.Fatal(err)
	}
}

// Every sentinel arrives as itself, from plain orders and from streams.
func TestErrorsKeepTheirMeaning(t *testing.T) {
	p := newPlane(t)
	var fail error
	agent := &fakeAgent{prepare: func(context.Context, cells.MoveRef, transfer.Source, func(cells.Progress)) (cells.Prediction, error) {
		return cells.Prediction{}, fmt.Errorf("in the store: %w", fail)
	}}
	k := newMemKeeper()
	k.onClose = func(context.Context, cells.FenceOrder) error { return fmt.Errorf("in the store: %w", fail) }
	m := p.join(t, p.config(t, "a"), WithStore(store(k, agent)))
	b := p.join(t, p.config(t, "b"), WithStore(store(newMemKeeper(), agent)))
	p.ready(t, m)
	p.ready(t, b)
	c := p.client(t)
	for _, want := range []error{cells.ErrStaleOrder, cells.ErrFenced, cells.ErrOtherMove, cells.ErrNotApplicable, cells.ErrConflict,
		cells.ErrNotFound, cells.ErrInvalid, cells.ErrUnavailable, transfer.ErrMismatch, errors.New("something else")} {
		fail = want
		err := c.Close(t.Context(), cells.FenceOrder{Cell: "a", Tenant: "t", Epoch: 2})
		_, serr := c.Prepare(t.Context(), moveRef(), nil)
		for _, err := range []error{err, serr} {
			if err == nil || !strings.Contains(err.Error(), want.Error()) {
				t.Errorf("%v: got %v", want, err)
			}
			for _, k := range kinds {
				if errors.Is(err, k.err) != errors.Is(want, k.err) {
					t.Errorf("%v: errors.Is(%v, %v) is %v", want, err, k.err, errors.Is(err, k.err))
				}
			}
		}
	}
}

func TestAnotherProcessIsTried(t *testing.T) {
	p := newPlane(t)
	k := newMemKeeper()
	a1 := p.join(t, p.config(t, "a"), WithStore(store(k, nil)))
	a2 := p.join(t, p.config(t, "a"), WithStore(store(k, nil)))
	p.ready(t, a1)
	p.ready(t, a2)
	c := p.client(t)
	p.waitBeat(t, "both", func(h Heartbeat) bool { return h.Instance == a2.cfg.Instance && h.Ready })
	// One is dead and still listed: nothing listens there.
	dead := Heartbeat{Cell: "a", Instance: "dead", Ready: true, Engine: "mem", AgentURL: "https://127.0.0.1:1"}
	odd := Heartbeat{Cell: "a", Instance: "odd", Ready: true, Engine: "mem", AgentURL: "ftp://x"}
	p.mu.Lock()
	p.lapse = time.Hour
	for _, h := range []Heartbeat{dead, odd} {
		p.members[h.Instance], p.seen[h.Instance] = h, time.Now()
	}
	p.mu.Unlock()
	for i := range 20 {
		o := cells.FenceOrder{Cell: "a", Tenant: cells.TenantID(fmt.Sprint("t", i)), Epoch: 2, Move: "m"}
		if err := c.Close(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	p.forget(a1.cfg.Instance)
	p.forget(a2.cfg.Instance)
	if err := a1.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := a2.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := c.Close(t.Context(), cells.FenceOrder{Cell: "a", Tenant: "t", Epoch: 2})
	if !errors.Is(err, cells.ErrUnavailable) || !strings.Contains(err.Error(), "dead") || !strings.Contains(err.Error(), "odd") {
		t.Fatal(err)
	}
}

// A process that is frozen takes connections and never answers; once it lapses the
// next one is asked, long before the connection itself is given up.
func TestAFrozenProcessIsPassedOver(t *testing.T) {
	p := newPlane(t)
	p.setLapse(time.Second)
	k := newMemKeeper()
	a := p.join(t, p.config(t, "a"), WithStore(store(k, nil)))
	p.ready(t, a)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := p.client(t)
	for i := range 4 {
		p.mu.Lock()
		p.members["frozen"] = Heartbeat{Cell: "a", Instance: "frozen", Ready: true, Engine: "mem", AgentURL: "https://" + l.Addr().String()}
		p.seen["frozen"] = time.Now()
		p.mu.Unlock()
		begun := time.Now()
		if err := c.Close(t.Context(), cells.FenceOrder{Cell: "a", Tenant: cells.TenantID(fmt.Sprint("t", i)), Epoch: 2, Move: "m"}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took > 4*time.Second {
			t.Fatalf("waited %s", took)
		}
	}
}

// A process that lapses while it works, and is the only one, is waited for.
func TestASlowProcessIsNotGivenUpForNobody(t *testing.T) {
	p := newPlane(t)
	p.setLapse(time.Hour)
	began, finish := make(chan struct{}), make(chan struct{})
	k := newMemKeeper()
	k.onClose = func(ctx context.Context, _ cells.FenceOrder) error {
		close(began)
		select {
		case <-finish:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	a := p.join(t, p.config(t, "a"), WithStore(store(k, nil)))
	p.ready(t, a)
	var asked atomic.Int64
	c := NewAgentClient(p.ch, func(ctx context.Context, cell cells.CellID) ([]Heartbeat, error) {
		if asked.Add(1) > 1 {
			return nil, nil
		}
		return p.locate(ctx, cell)
	})
	defer c.CloseIdleConnections()
	done := make(chan error, 1)
	go func() { done <- c.Close(t.Context(), cells.FenceOrder{Cell: "a", Tenant: "t", Epoch: 2, Move: "m"}) }()
	<-began
	eventually(t, "the lapse is noticed", func() bool { return asked.Load() >= 4 })
	close(finish)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// An agent that is somebody else is not given orders.
func TestOrdersGoToTheRightCellOnly(t *testing.T) {
	p := newPlane(t)
	k := newMemKeeper()
	b := p.join(t, p.config(t, "b"), WithStore(store(k, nil)))
	p.ready(t, b)
	p.mu.Lock()
	p.lapse = time.Hour
	p.members["liar"] = Heartbeat{Cell: "a", Instance: "liar", Ready: true, Engine: "mem", AgentURL: b.AgentURL()}
	p.seen["liar"] = time.Now()
	p.mu.Unlock()
	err := p.client(t).Open(t.Context(), cells.FenceOrder{Cell: "a", Tenant: "t", Epoch: 3, Floor: 3})
	var r *channel.RefusedError
	if !errors.As(err, &r) || r.Reason != channel.ReasonUnwanted || len(k.ordersSoFar()) != 0 {
		t.Fatalf("%v; orders %v", err, k.ordersSoFar())
	}
}

// call sends one request to an agent as somebody.
func call(t *testing.T, who *channel.Channel, cell cells.CellID, url, body string) (int, string) {
	t.Helper()
	client := who.Client(channel.Identity{Role: channel.RoleCell, Name: string(cell)})
	defer client.CloseIdleConnections()
	resp, err := client.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

func TestOnlyTheDirectoryGivesOrders(t *testing.T) {
	p := newPlane(t)
	a, _, ka, _ := pair(t, p, &fakeAgent{}, &fakeAgent{})
	before := len(ka.ordersSoFar())
	for _, who := range []*channel.Channel{
		p.fleet.Open(t, channel.RoleCell, "b"), p.fleet.Open(t, channel.RoleCell, "a"),
		p.fleet.Open(t, channel.RoleEdge, "e"), p.fleet.Open(t, channel.RoleOperator, "o"),
	} {
		for _, path := range []string{PathDrain, PathFenceOpen, PathFenceClose, PathEventsPause, PathEventsStart, PathSurvey, PathPrepare, PathFinish, PathDiscard} {
			if code, body := call(t, who, "a", a.AgentURL()+path, "{}"); code != http.StatusForbidden {
				t.Errorf("%s as %s: %d %s", path, who.Self(), code, body)
			}
		}
	}
	if got := len(ka.ordersSoFar()); got != before {
		t.Fatalf("%d orders were obeyed", got-before)
	}
}

func TestMalformedOrders(t *testing.T) {
	p := newPlane(t)
	a, _, _, _ := pair(t, p, &fakeAgent{}, &fakeAgent{})
	for _, tc := range []struct{ path, body string }{
		{PathFenceClose, ""}, {PathFenceClose, "[]"}, {PathFenceClose, `{"cell":"a"`}, {PathFenceClose, `{"cell":"a","tenant":"t","epoch":2} {}`},
		{PathFenceClose, `{"cell":"a","tenant":"t","epoch":2,"surprise":1}`}, {PathFenceClose, `{"cell":"a","tenant":"t","epoch":-2}`},
		{PathFenceClose, `{"cell":"b","tenant":"t","epoch":2}`}, {PathFenceClose, `{"cell":"a","tenant":"t t","epoch":2}`},
		{PathFenceClose, `{"cell":"a","tenant":"` + strings.Repeat("x", maxOrder) + `"}`},
		{PathDrain, `{"tenant":"t","state":"ACTIVE","cell":"b","epoch":1,"floor":1,"revision":1}`}, {PathDrain, `{"tenant":"t","state":"NOPE","cell":"a"}`},
		{PathPrepare, `{"move":{"id":"m","tenant":"t","source":"b","target":"c","base":1},"sources":["https://x"]}`},
		{PathPrepare, `{"move":{"id":"m","tenant":"t","source":"b","target":"a","base":1},"sources":["http://x"]}`},
		{PathPrepare, `{"move":{"id":"m","tenant":"t","source":"b","target":"a","base":1},"sources":["https://x"],"rows_per_second":-1}`},
		{PathDiscard, `{"tenant":"t","residue":{"cell":"b","epoch":2,"move":"m"}}`},
		{PathSurvey, `{"tenant":""}`}, {PathSurvey, `{"tenant":"t","group":"a b"}`},
	} {
		code, body := call(t, p.ch, "a", a.AgentURL()+tc.path, tc.body)
		var line StepLine
		sc := bufio.NewScanner(strings.NewReader(body))
		for sc.Scan() {
			if err := decodeStrict(sc.Bytes(), &line); err != nil {
				t.Errorf("%s %.60s: %v in %s", tc.path, tc.body, err, body)
			}
		}
		if line.Error == nil || line.Error.Kind != "invalid" || line.Error.Message == "" {
			t.Errorf("%s %.60s: %d %s", tc.path, tc.body, code, body)
		}
	}
	client := p.ch.Client(channel.Identity{Role: channel.RoleCell})
	defer client.CloseIdleConnections()
	resp, err := client.Get(a.AgentURL() + PathFenceClose)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Fatal(resp.Status)
	}
	if code, _ := call(t, p.ch, "a", a.AgentURL()+"/cells/v1/agent/nothing", "{}"); code != http.StatusNotFound {
		t.Fatal(code)
	}
}

// A cell reads a tenant's rows only in the move that brings them to it.
func TestRowsGoToTheTargetOnly(t *testing.T) {
	p := newPlane(t)
	p.put(t, movingRoute())
	a, _, _, _ := pair(t, p, &fakeAgent{}, &fakeAgent{})
	survey := func(who *channel.Channel, tenant string) int {
		t.Helper()
		code, _ := call(t, who, "a", a.AgentURL()+PathTransfer+"survey", `{"move":{"tenant":"`+tenant+`","id":"","source":"","target":"","base":0}}`)
		return code
	}
	begin := func(who *channel.Channel, id, source, target string, base int) int {
		t.Helper()
		code, _ := call(t, who, "a", a.AgentURL()+PathTransfer+"nothing", fmt.Sprintf(`{"move":{"id":%q,"tenant":"t","source":%q,"target":%q,"base":%d}}`, id, source, target, base))
		return code
	}
	b, c := p.fleet.Open(t, channel.RoleCell, "b"), p.fleet.Open(t, channel.RoleCell, "c")
	if code := survey(b, "t"); code != 200 {
		t.Errorf("survey by the target: %d", code)
	}
	if code := begin(b, "m", "a", "b", 1); code != http.StatusNotFound { // past the check: there is no such step
		t.Errorf("the target: %d", code)
	}
	for name, code := range map[string]int{
		"survey by another cell":    survey(c, "t"),
		"survey of another tenant":  survey(b, "u"),
		"survey by the directory":   survey(p.ch, "t"),
		"survey by the source":      survey(p.fleet.Open(t, channel.RoleCell, "a"), "t"),
		"another cell":              begin(c, "m", "a", "b", 1),
		"another cell, as target":   begin(c, "m", "a", "c", 1),
		"another move":              begin(b, "m2", "a", "b", 1),
		"another source":            begin(b, "m", "c", "b", 1),
		"another base":              begin(b, "m", "a", "b", 3),
		"survey by an edge":         survey(p.fleet.Open(t, channel.RoleEdge, "e"), "t"),
		"begin by the directory":    begin(p.ch, "m", "a", "b", 1),
		"begin by an operator":      begin(p.fleet.Open(t, channel.RoleOperator, "o"), "m", "a", "b", 1),
		"survey of a malformed one": func() int { return survey(b, "t t") - 400 + 403 }(),
	} {
		if code != http.StatusForbidden {
			t.Errorf("%s: %d", name, code)
		}
	}
	// Once the move is over, nobody.
	r := active("t", "a", 3)
	p.put(t, r)
	eventually(t, "refused", func() bool { return survey(b, "t") == http.StatusForbidden })
	// A new move that the view has not heard of yet is read from the table.
	r = movingRoute()
	r.MoveID, r.Epoch, r.Floor, r.Base, r.Residue = "m9", 5, 5, 5, nil
	p.put(t, r)
	if code := begin(b, "m9", "a", "b", 5); code != http.StatusNotFound {
		t.Errorf("a new move: %d", code)
	}
	// What is written here flows back to the cell that keeps the rows of that very move.
	r = active("t", "a", 7)
	r.Residue = []cells.Residue{{Cell: "b", Epoch: 6, Move: "m9", Back: "a", Until: time.Now().Add(time.Hour)}}
	p.put(t, r)
	eventually(t, "the way back is allowed", func() bool { return begin(b, "m9", "a", "b", 5) == http.StatusNotFound })
	for name, code := range map[string]int{
		"another cell": begin(c, "m9", "a", "b", 5), "another move": begin(b, "m8", "a", "b", 5), "another base": begin(b, "m9", "a", "b", 6), "survey": survey(b, "t"),
	} {
		if code != http.StatusForbidden {
			t.Errorf("on the way back, %s: %d", name, code)
		}
	}
	r.Residue[0].Until = time.Time{}
	p.put(t, r)
	eventually(t, "the window is closed", func() bool { return begin(b, "m9", "a", "b", 5) == http.StatusForbidden })
}

func TestDrainWaitsForAllProcesses(t *testing.T) {
	p := newPlane(t)
	route := p.put(t, active("t", "a", 1))
	members := []*Member{p.join(t, p.config(t, "a")), p.join(t, p.config(t, "a"))}
	out := []chan struct{}{make(chan struct{}), make(chan struct{})}
	release := []func(){sync.OnceFunc(func() { close(out[0]) }), sync.OnceFunc(func() { close(out[1]) })}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer release[0]()
	defer release[1]()
	for i, m := range members {
		p.ready(t, m)
		in := make(chan struct{})
		srv := m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { close(in); <-out[i] }))
		wg.Go(func() { do(srv, request("t", "a", 1)) })
		<-in
	}
	c := p.client(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	begun := time.Now()
	err := c.Drain(ctx, route)
	if err == nil || !strings.Contains(err.Error(), "1 in flight: request /x") || !errors.Is(err, context.DeadlineExceeded) ||
		strings.Count(err.Error(), "in flight") != 2 || time.Since(begun) > 15*time.Second {
		t.Fatal(err)
	}
	for _, m := range members {
		if w := do(m.Handler(hello), request("t", "a", 1)); w.Header().Get(cells.HeaderAnswer) != string(cells.CodeMoving) {
			t.Fatalf("the gate is open: %d %s", w.Code, w.Body)
		}
	}
	release[0]()
	done := make(chan error, 1)
	go func() { done <- c.Drain(t.Context(), route) }()
	eventually(t, "the first is empty", func() bool { return members[0].Gates().Total() == 0 })
	select {
	case err := <-done:
		t.Fatalf("drained while a process works: %v", err)
	default:
	}
	release[1]()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// A process that is gone does not hold a drain back for longer than its lapse; one
// that comes meanwhile is asked, too.
func TestDrainAndProcessesThatComeAndGo(t *testing.T) {
	p := newPlane(t)
	p.setLapse(time.Hour)
	route := p.put(t, active("t", "a", 1))
	// Its kernel takes connections, and nobody answers.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p.mu.Lock()
	p.members["frozen"] = Heartbeat{Cell: "a", Instance: "frozen", AgentURL: "https://" + l.Addr().String()}
	p.seen["frozen"] = time.Now()
	p.mu.Unlock()
	c := p.client(t)
	done := make(chan error, 1)
	go func() { done <- c.Drain(t.Context(), route) }()
	late := p.join(t, p.config(t, "a"))
	p.ready(t, late)
	p.forget("frozen") // it lapses
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if w := do(late.Handler(hello), request("t", "a", 1)); w.Header().Get(cells.HeaderAnswer) != string(cells.CodeMoving) {
		t.Fatalf("the late process was not drained: %d %s", w.Code, w.Body)
	}
	// One that was killed: its port is closed, long before it lapses.
	p.setLapse(time.Hour)
	p.mu.Lock()
	p.members = map[string]Heartbeat{"dead": {Cell: "y", Instance: "dead", AgentURL: "https://127.0.0.1:1"}}
	p.seen["dead"] = time.Now()
	p.mu.Unlock()
	if err := c.Drain(t.Context(), active("t", "y", 1)); err != nil {
		t.Fatal(err)
	}
	// Nobody at all.
	if err := c.Drain(t.Context(), active("t", "z", 1)); err != nil {
		t.Fatal(err)
	}
}

func TestDrainIsRefusedWhenTheEpochIsServedAgain(t *testing.T) {
	p := newPlane(t)
	old := p.put(t, active("t", "a", 1))
	r := active("t", "a", 3)
	r.Floor = 1
	p.put(t, r)
	m := p.join(t, p.config(t, "a"))
	p.ready(t, m)
	if err := p.client(t).Drain(t.Context(), old); !errors.Is(err, cells.ErrStaleOrder) {
		t.Fatal(err)
	}
}
