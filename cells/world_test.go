// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"
)

var randomID = regexp.MustCompile(`\b(mv|del)-[A-Z2-7]{26}\b`)

// maskRandom hides ids that the controller made.
func maskRandom(s string) string { return randomID.ReplaceAllString(s, "$1-*") }

// world is what surrounds a controller in tests: a table that can fail, and the
// cells of the explorer's model behind the interfaces of roles.go, whose every
// call can fail before or after it has taken effect, or hang.
type world struct {
	t     reporter
	inner RoutingTable

	mu     sync.Mutex // guards what follows
	s      xstate
	moves  map[MoveID]uint8
	faults map[string][]fault
	// before runs once, in front of the call that it is keyed by.
	before map[string]func()
	// chaos, if set, is asked in front of every call what goes wrong with it.
	chaos func(point string) faultMode
	pred  time.Duration
	find  []Finding
	refs  []MoveRef // of every Prepare
	lost  bool      // ways back are
}

// reporter is what the world needs of a test: testing.TB or rapid.TB.
type reporter interface {
	Errorf(format string, args ...any)
	Fatal(args ...any)
}

type faultMode string

const (
	failBefore faultMode = "error"       // nothing happens, the caller gets an error
	failAfter  faultMode = "lost-answer" // it happens, the caller gets an error
	failHang   faultMode = "hang"        // nothing happens until the context ends
	failStale  faultMode = "stale"       // nothing happens, the caller gets ErrStaleOrder
)

type fault struct {
	mode  faultMode
	times int // -1: for ever
}

var errInjected = errors.New("injected")

func newWorld(t reporter) *world {
	return &world{t: t, inner: NewMemTable(), moves: map[MoveID]uint8{}, faults: map[string][]fault{}, before: map[string]func(){}}
}

func (w *world) options() []ControllerOption {
	return []ControllerOption{WithFencer(w), WithEventBarrier(w), WithDataMover(w), WithDrainer(w)}
}

func (w *world) fail(point string, mode faultMode, times int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[point] = append(w.faults[point], fault{mode, times})
}

func (w *world) once(point string, f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before[point] = f
}

// call runs f under the point's faults. Without the lock held.
func (w *world) call(ctx context.Context, point string, f func() error) error {
	w.mu.Lock()
	hook := w.before[point]
	delete(w.before, point)
	var mode faultMode
	if q := w.faults[point]; len(q) > 0 {
		mode = q[0].mode
		if q[0].times > 0 {
			if q[0].times--; q[0].times == 0 {
				w.faults[point] = q[1:]
			}
		}
	}
	chaos := w.chaos
	w.mu.Unlock()
	if hook != nil {
		hook()
	}
	if chaos != nil {
		mode = chaos(point)
	}
	switch mode {
	case failHang:
		<-ctx.Done()
		return context.Cause(ctx)
	case failBefore:
		return fmt.Errorf("%w: %w", ErrUnavailable, errInjected)
	case failStale:
		return fmt.Errorf("%w: %w", ErrStaleOrder, errInjected)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	if mode == failAfter {
		return fmt.Errorf("%w: %w", ErrUnavailable, errInjected)
	}
	return nil
}

// move numbers move ids. Called with mu held.
func (w *world) move(m MoveID) uint8 {
	if m == "" {
		return 0
	}
	if _, ok := w.moves[m]; !ok {
		w.moves[m] = uint8(len(w.moves) + 1)
	}
	return w.moves[m]
}

// order delivers an order to a cell of the model.
func (w *world) order(kind xorderKind, cell CellID, e, floor Epoch, m MoveID, arg uint8) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := xorder{kind: kind, cell: uint8(xcellIndex(cell)), epoch: uint8(e), floor: uint8(floor), move: w.move(m), arg: arg}
	ok := w.s.apply(o, &xrules{})
	w.checkLocked(o.String())
	if !ok {
		return fmt.Errorf("%w: %s", ErrStaleOrder, o)
	}
	return nil
}

// checkLocked tests what must hold of the cells after everything that happens.
func (w *world) checkLocked(what string) {
	open := 0
	for i, c := range w.s.cells {
		if c.merged {
			w.t.Errorf("after %s: rows came to cell %s over older ones", what, xcellNames[i])
		}
		if !c.open {
			continue
		}
		open++
		if c.value != w.s.exp {
			w.t.Errorf("after %s: cell %s is open with write %d, %d was acknowledged", what, xcellNames[i], c.value, w.s.exp)
		}
		if c.seq != w.s.expSeq {
			w.t.Errorf("after %s: cell %s is open and would number on from %d instead of %d", what, xcellNames[i], c.seq, w.s.expSeq)
		}
		if c.floor < c.since {
			w.t.Errorf("after %s: cell %s admits epoch %d, closed before %d", what, xcellNames[i], c.floor, c.since)
		}
	}
	if open > 1 {
		w.t.Errorf("after %s: %d cells are open", what, open)
	}
}

// write has whoever is open take a write, as a client would.
func (w *world) write() (CellID, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.s.cells {
		c := &w.s.cells[i]
		if !c.open {
			continue
		}
		w.s.wid++
		w.s.expSeq++
		c.seq++
		w.s.exp, c.value, c.rows = w.s.wid, w.s.wid, true
		w.checkLocked("a write")
		return xcellNames[i], true
	}
	return "", false
}

func (w *world) Close(ctx context.Context, o FenceOrder) error {
	return w.call(ctx, "close", func() error { return w.order(xClose, o.Cell, o.Epoch, o.Floor, o.Move, 0) })
}

func (w *world) Open(ctx context.Context, o FenceOrder) error {
	return w.call(ctx, "open", func() error { return w.order(xOpen, o.Cell, o.Epoch, o.Floor, o.Move, 0) })
}

func (w *world) Pause(ctx context.Context, o BarrierOrder) (EventSeq, error) {
	var mark EventSeq
	err := w.call(ctx, "pause", func() error {
		if err := w.order(xPause, o.Cell, o.Epoch, 0, o.Move, 0); err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		mark = EventSeq(w.s.cells[xcellIndex(o.Cell)].seq)
		return nil
	})
	return mark, err
}

func (w *world) Start(ctx context.Context, o BarrierOrder, mark EventSeq) error {
	return w.call(ctx, "start", func() error { return w.order(xStart, o.Cell, o.Epoch, 0, o.Move, uint8(mark)) })
}

func (w *world) Drain(ctx context.Context, r TenantRoute) error {
	return w.call(ctx, "drain", func() error {
		if r.State != StateDraining || r.Revision == 0 {
			w.t.Errorf("drain of %s at revision %d", describe(r), r.Revision)
		}
		return nil
	})
}

func (w *world) Preflight(ctx context.Context, m MoveRef) (Preflight, error) {
	var p Preflight
	err := w.call(ctx, "preflight", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		p = Preflight{Findings: w.find, Rows: 1, Pause: w.pred}
		return nil
	})
	return p, err
}

func (w *world) Prepare(ctx context.Context, m MoveRef, progress func(Progress)) (Prediction, error) {
	var p Prediction
	err := w.call(ctx, "prepare", func() error {
		w.mu.Lock()
		w.refs = append(w.refs, m)
		p.Pause = w.pred
		v := w.s.cells[xcellIndex(m.Source)].value
		w.mu.Unlock()
		progress(Progress{Phase: "snapshot", Done: 1, Total: 1})
		if m.Undoes != "" {
			w.mu.Lock()
			undone := w.move(m.Undoes)
			w.mu.Unlock()
			if err := w.order(xAdopt, m.Target, m.CloseEpoch(), m.CloseEpoch(), m.ID, undone); err != nil {
				return err
			}
		} else if err := w.order(xClose, m.Target, m.CloseEpoch(), m.CloseEpoch(), m.ID, 0); err != nil {
			return err
		}
		return w.order(xImport, m.Target, m.CloseEpoch(), 0, m.ID, v)
	})
	return p, err
}

func (w *world) Finish(ctx context.Context, m MoveRef, progress func(Progress)) (string, error) {
	var mark string
	err := w.call(ctx, "finish", func() error {
		w.mu.Lock()
		v := w.s.cells[xcellIndex(m.Source)].value
		w.mu.Unlock()
		if err := w.order(xImport, m.Target, m.CloseEpoch(), 0, m.ID, v); err != nil {
			return err
		}
		mark = fmt.Sprintf("pos-%d", v)
		return nil
	})
	return mark, err
}

func (w *world) Discard(ctx context.Context, _ TenantID, r Residue, progress func(Progress)) error {
	return w.call(ctx, "discard", func() error {
		progress(Progress{Phase: "remove"})
		return w.order(xDiscard, r.Cell, r.Epoch, r.Epoch, r.Move, 0)
	})
}

// Return implements Returner.
func (w *world) Return(ctx context.Context, tenant TenantID, r Residue) (Returned, error) {
	var out Returned
	err := w.call(ctx, "return", func() error {
		if w.lost {
			return fmt.Errorf("%w: the slot is gone", ErrReturnLost)
		}
		back, ok := r.Return(tenant)
		if !ok {
			w.t.Errorf("return of an entry without a way back: %+v", r)
		}
		w.mu.Lock()
		v := w.s.cells[xcellIndex(back.Source)].value
		out.Changes = int64(v) - int64(w.s.cells[xcellIndex(back.Target)].value)
		w.mu.Unlock()
		return w.order(xReturn, back.Target, back.CloseEpoch(), 0, back.ID, v)
	})
	return out, err
}

// The table. Its points are get, and cas/STATE after the state that is written.

func (w *world) Get(ctx context.Context, tenant TenantID) (TenantRoute, error) {
	var r TenantRoute
	err := w.call(ctx, "get", func() (err error) {
		r, err = w.inner.Get(ctx, tenant)
		return err
	})
	return r, err
}

func (w *world) CompareAndSet(ctx context.Context, old Revision, next TenantRoute) (TenantRoute, error) {
	var r TenantRoute
	err := w.call(ctx, "cas/"+next.State.String(), func() (err error) {
		before, _ := w.inner.Get(ctx, next.TenantID)
		if r, err = w.inner.CompareAndSet(ctx, old, next); err == nil && !before.Exists() && next.Exists() && next.Floor > 0 {
			// A new life: what was acknowledged in the one before does not count.
			w.mu.Lock()
			w.s.exp, w.s.expSeq = 0, w.s.cells[xcellIndex(next.CellID)].seq
			w.mu.Unlock()
		}
		return err
	})
	if err != nil {
		return TenantRoute{}, err
	}
	return r, nil
}

func (w *world) List(ctx context.Context, o ListOptions) (RoutePage, error) {
	return w.inner.List(ctx, o)
}

func (w *world) Watch(ctx context.Context, from Revision) (RouteWatcher, error) {
	return w.inner.Watch(ctx, from)
}

func (w *world) row(tenant TenantID) TenantRoute {
	r, err := w.inner.Get(context.Background(), tenant)
	if err != nil && !errors.Is(err, ErrNotFound) {
		w.t.Fatal(err)
	}
	return r
}

func (w *world) showCells() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var b strings.Builder
	for i, c := range w.s.cells {
		if !c.exists {
			continue
		}
		state := "closed"
		if c.open {
			state = "open"
		}
		fmt.Fprintf(&b, "  cell %s: %s at %d", xcellNames[i], state, c.epoch)
		if c.open && c.floor != c.epoch {
			fmt.Fprintf(&b, " floor %d", c.floor)
		}
		if c.rows {
			fmt.Fprintf(&b, ", rows up to write %d", c.value)
		}
		if c.paused {
			b.WriteString(", events paused")
		}
		b.WriteString("\n")
	}
	return b.String()
}
