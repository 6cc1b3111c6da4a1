// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// fence is a tenant's fence in one cell, as package guard keeps it.
type fence struct {
	open         bool
	epoch, floor cells.Epoch
	move         cells.MoveID
}

type place struct {
	cell   cells.CellID
	tenant cells.TenantID
}

// far stands for all cells: their fences, their events and their rows, with the
// rules that the real ones keep. It fails the test that lets a rule be broken.
type far struct {
	mu     sync.Mutex // guards all below
	fences map[place]*fence
	rows   map[place]int64
	down   map[cells.CellID]bool
	fail   map[string]int // method: how often it fails yet; negative is always
	block  map[string]chan struct{}
	calls  map[string]int
	pauses int64
	// throttles are what the contexts of Prepare and Discard asked for.
	throttles []string
	// groups are those that the contexts of Prepare named, by move.
	groups map[cells.MoveID]transfer.GroupID
	// broken are the violations that were seen.
	broken []string
}

func newFar() *far {
	return &far{fences: map[place]*fence{}, rows: map[place]int64{}, down: map[cells.CellID]bool{}, fail: map[string]int{},
		block: map[string]chan struct{}{}, calls: map[string]int{}, groups: map[cells.MoveID]transfer.GroupID{}}
}

func (f *far) set(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

func (f *far) get(fn func() int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fn()
}

// enter counts a call, waits where the test wants it to, and fails where it wants.
func (f *far) enter(ctx context.Context, method string, cs ...cells.CellID) error {
	f.mu.Lock()
	f.calls[method]++
	gate := f.block[method]
	f.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range cs {
		if f.down[c] {
			return fmt.Errorf("%w: cell %s is down", cells.ErrUnavailable, c)
		}
	}
	if n := f.fail[method]; n != 0 {
		f.fail[method] = n - 1
		return fmt.Errorf("%w: %s fails", cells.ErrUnavailable, method)
	}
	return nil
}

func (f *far) at(c cells.CellID, t cells.TenantID) *fence {
	p := place{c, t}
	if f.fences[p] == nil {
		f.fences[p] = &fence{}
	}
	return f.fences[p]
}

func (f *far) Close(ctx context.Context, o cells.FenceOrder) error {
	if err := f.enter(ctx, "Close", o.Cell); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.at(o.Cell, o.Tenant)
	switch {
	case x.epoch > o.Epoch, x.epoch == o.Epoch && (x.open || x.move != o.Move):
		return cells.ErrStaleOrder
	}
	*x = fence{epoch: o.Epoch, move: o.Move}
	return nil
}

func (f *far) Open(ctx context.Context, o cells.FenceOrder) error {
	if err := f.enter(ctx, "Open", o.Cell); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.at(o.Cell, o.Tenant)
	switch {
	case x.epoch > o.Epoch, x.epoch == o.Epoch && !x.open && x.epoch > 0:
		return cells.ErrStaleOrder
	case x.epoch == o.Epoch && x.open:
		return nil
	}
	*x = fence{open: true, epoch: o.Epoch, floor: o.Floor, move: o.Move}
	for p, other := range f.fences {
		if p.tenant == o.Tenant && p.cell != o.Cell && other.open && other.epoch > 0 {
			f.broken = append(f.broken, fmt.Sprintf("%s: fences of %s (epoch %d) and %s (epoch %d) are open", o.Tenant, p.cell, other.epoch, o.Cell, o.Epoch))
		}
	}
	return nil
}

func (f *far) Pause(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	if err := f.enter(ctx, "Pause", o.Cell); err != nil {
		return 0, err
	}
	return 7, nil
}

func (f *far) Start(ctx context.Context, o cells.BarrierOrder, _ cells.EventSeq) error {
	return f.enter(ctx, "Start", o.Cell)
}

func (f *far) Drain(ctx context.Context, r cells.TenantRoute) error { return f.enter(ctx, "Drain") }

func (f *far) Preflight(ctx context.Context, m cells.MoveRef) (cells.Preflight, error) {
	if err := f.enter(ctx, "Preflight", m.Source, m.Target); err != nil {
		return cells.Preflight{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return cells.Preflight{Findings: []cells.Finding{}, Rows: f.rows[place{m.Source, m.Tenant}], Pause: 1e6}, nil
}

func (f *far) throttled(ctx context.Context, step string) {
	rate, _ := transfer.RateOf(ctx)
	l, _ := transfer.LimitsOf(ctx)
	f.set(func() {
		f.throttles = append(f.throttles, fmt.Sprintf("%s %d %d %v", step, rate, l.MaxRetained, l.MaxReplicaLag))
	})
}

func (f *far) Prepare(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (cells.Prediction, error) {
	f.throttled(ctx, "prepare")
	f.set(func() { f.groups[m.ID] = transfer.GroupOf(ctx) })
	n := int64(f.get(func() int { return int(f.rows[place{m.Source, m.Tenant}]) }))
	progress(cells.Progress{Phase: "snapshot", Done: n / 2, Total: n, Bytes: 50 * n})
	if err := f.enter(ctx, "Prepare", m.Source, m.Target); err != nil {
		return cells.Prediction{}, err
	}
	progress(cells.Progress{Phase: "snapshot", Done: n, Total: n, Bytes: 100 * n})
	progress(cells.Progress{Phase: "catchup", Done: 3})
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.at(m.Target, m.Tenant)
	if x.epoch > m.CloseEpoch() || x.epoch == m.CloseEpoch() && (x.open || x.move != m.ID) {
		return cells.Prediction{}, cells.ErrStaleOrder
	}
	*x = fence{epoch: m.CloseEpoch(), move: m.ID}
	f.rows[place{m.Target, m.Tenant}] = n
	return cells.Prediction{Pause: 2e6}, nil
}

func (f *far) Finish(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (string, error) {
	if err := f.enter(ctx, "Finish", m.Source, m.Target); err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.at(m.Target, m.Tenant)
	if x.open || x.epoch != m.CloseEpoch() || x.move != m.ID {
		return "", cells.ErrStaleOrder
	}
	if s := f.at(m.Source, m.Tenant); s.open || s.epoch != m.CloseEpoch() {
		f.broken = append(f.broken, fmt.Sprintf("%s: finish while the source's fence is %+v", m.Tenant, *s))
	}
	return "mark-1", nil
}

// FinishProved implements cells.Prover.
func (f *far) FinishProved(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (string, []cells.Comparison, error) {
	mark, err := f.Finish(ctx, m, progress)
	if err != nil {
		return "", nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return mark, []cells.Comparison{{Table: "item", Position: "mark-0", Whole: true, Rows: int64(f.rows[place{m.Source, m.Tenant}]), Sum: "aa"},
		{Table: "item", Position: mark, Keys: 3, Rows: 2, Sum: "bb"}}, nil
}

func (f *far) Discard(ctx context.Context, t cells.TenantID, r cells.Residue, progress func(cells.Progress)) error {
	f.throttled(ctx, "discard")
	if err := f.enter(ctx, "Discard", r.Cell); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.at(r.Cell, t)
	if x.epoch > r.Epoch || x.epoch == r.Epoch && x.open {
		return cells.ErrStaleOrder
	}
	*x = fence{epoch: r.Epoch, move: r.Move}
	delete(f.rows, place{r.Cell, t})
	return nil
}
