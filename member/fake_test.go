// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// memKeeper keeps fences in memory, by the rules of guard.Keeper.
type memKeeper struct {
	mu        sync.Mutex
	rows      map[cells.TenantID]guard.Fence
	installed []guard.Table
	orders    []string
	fail      error // returned by every method while set
	failed    int   // how often it was
	onClose   func(context.Context, cells.FenceOrder) error
}

func newMemKeeper() *memKeeper { return &memKeeper{rows: map[cells.TenantID]guard.Fence{}} }

func (k *memKeeper) Install(_ context.Context, t []guard.Table) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.installed = t
	return k.fail
}

func (k *memKeeper) MovedTables() []guard.Table { return nil }

func (k *memKeeper) ForgetEvents(context.Context, cells.FenceOrder) error { return nil }

func (k *memKeeper) OpenFence(_ context.Context, o cells.FenceOrder) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fail != nil {
		return k.fail
	}
	k.orders = append(k.orders, fmt.Sprintf("open %s %d floor %d", o.Tenant, o.Epoch, o.Floor))
	f, ok := k.rows[o.Tenant]
	switch {
	case ok && f.Epoch == o.Epoch && f.Open:
		return nil
	case ok && f.Epoch >= o.Epoch:
		return fmt.Errorf("%w: fence of %s is at %d", cells.ErrStaleOrder, o.Tenant, f.Epoch)
	}
	floor := o.Epoch
	if ok && f.Open && f.Epoch >= o.Floor {
		floor = max(f.Floor, o.Floor)
	}
	f.Tenant, f.Epoch, f.Floor, f.Open, f.Move = o.Tenant, o.Epoch, floor, true, o.Move
	k.rows[o.Tenant] = f
	return nil
}

func (k *memKeeper) CloseFence(ctx context.Context, o cells.FenceOrder) error {
	if k.onClose != nil {
		if err := k.onClose(ctx, o); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fail != nil {
		return k.fail
	}
	k.orders = append(k.orders, fmt.Sprintf("close %s %d %s", o.Tenant, o.Epoch, o.Move))
	f, ok := k.rows[o.Tenant]
	switch {
	case ok && f.Epoch == o.Epoch && !f.Open && f.Move == o.Move:
		return nil
	case ok && f.Epoch >= o.Epoch:
		return fmt.Errorf("%w: fence of %s is at %d", cells.ErrStaleOrder, o.Tenant, f.Epoch)
	}
	f.Tenant, f.Epoch, f.Floor, f.Open, f.Move = o.Tenant, o.Epoch, o.Epoch, false, o.Move
	k.rows[o.Tenant] = f
	return nil
}

func (k *memKeeper) Fence(_ context.Context, t cells.TenantID) (guard.Fence, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f, ok := k.rows[t]
	switch {
	case k.fail != nil:
		k.failed++
		return f, k.fail
	case !ok:
		return f, cells.ErrNotFound
	}
	return f, nil
}

func (k *memKeeper) Fences(_ context.Context, after cells.TenantID, limit int) ([]guard.Fence, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fail != nil {
		return nil, k.fail
	}
	var out []guard.Fence
	for t, f := range k.rows {
		if t > after {
			out = append(out, f)
		}
	}
	slices.SortFunc(out, func(a, b guard.Fence) int {
		if a.Tenant < b.Tenant {
			return -1
		}
		return 1
	})
	return out[:min(len(out), limit)], nil
}

func (k *memKeeper) PauseEvents(_ context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.rows[o.Tenant]
	f.Paused = true
	k.rows[o.Tenant] = f
	return f.Seq, k.fail
}

func (k *memKeeper) StartEvents(_ context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.rows[o.Tenant]
	f.Paused, f.Seq = false, max(f.Seq, mark)
	k.rows[o.Tenant] = f
	return k.fail
}

func (k *memKeeper) set(f guard.Fence) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rows[f.Tenant] = f
}

func (k *memKeeper) get(t cells.TenantID) (guard.Fence, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f, ok := k.rows[t]
	return f, ok
}

func (k *memKeeper) setFail(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fail = err
}

func (k *memKeeper) ordersSoFar() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.orders)
}

// fakeAgent is a transfer.Agent whose steps are given by a test.
type fakeAgent struct {
	surveyOf func(context.Context, cells.TenantID) (transfer.Survey, error)
	prepare  func(context.Context, cells.MoveRef, transfer.Source, func(cells.Progress)) (cells.Prediction, error)
	finish   func(context.Context, cells.MoveRef, transfer.Source, func(cells.Progress)) (string, error)
	discard  func(context.Context, cells.TenantID, cells.Residue, func(cells.Progress)) error
	back     func(context.Context, cells.MoveRef, transfer.Source) (cells.Returned, error)
	free     func(context.Context, cells.TenantID, cells.MoveID) error
}

func (a *fakeAgent) Return(ctx context.Context, m cells.MoveRef, src transfer.Source) (cells.Returned, error) {
	return a.back(ctx, m, src)
}

func (a *fakeAgent) Free(ctx context.Context, t cells.TenantID, m cells.MoveID) error {
	return a.free(ctx, t, m)
}

func (a *fakeAgent) Survey(ctx context.Context, t cells.TenantID) (transfer.Survey, error) {
	if a.surveyOf == nil {
		return transfer.Survey{Engine: "mem"}, nil
	}
	return a.surveyOf(ctx, t)
}

func (a *fakeAgent) Prepare(ctx context.Context, m cells.MoveRef, s transfer.Source, p func(cells.Progress)) (cells.Prediction, error) {
	return a.prepare(ctx, m, s, p)
}

// FinishProved implements transfer.Prover.
func (a *fakeAgent) FinishProved(ctx context.Context, m cells.MoveRef, s transfer.Source, p func(cells.Progress)) (string, []cells.Comparison, error) {
	mark, err := a.Finish(ctx, m, s, p)
	return mark, []cells.Comparison{{Table: "item", Position: mark, Whole: true, Rows: 3, Sum: "abc"}}, err
}

func (a *fakeAgent) Finish(ctx context.Context, m cells.MoveRef, s transfer.Source, p func(cells.Progress)) (string, error) {
	return a.finish(ctx, m, s, p)
}

func (a *fakeAgent) Discard(ctx context.Context, t cells.TenantID, r cells.Residue, p func(cells.Progress)) error {
	return a.discard(ctx, t, r, p)
}

func (a *fakeAgent) Source() transfer.Source { return fakeSource{agent: a} }

// fakeSource only surveys.
type fakeSource struct {
	transfer.Source
	agent *fakeAgent
}

func (s fakeSource) Survey(ctx context.Context, t cells.TenantID) (transfer.Survey, error) {
	return s.agent.Survey(ctx, t)
}
