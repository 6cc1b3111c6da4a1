// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// mutant is a store that is broken in one way.
type mutant struct {
	name  string
	h     func(Harness) Harness
	tests []string // one of these must fail
}

// Mutants runs the suite against stores that are broken on purpose; the test
// fails if the suite passes one of them.
func Mutants(t *testing.T, h Harness) {
	sinkOf := func(wrap func(transfer.Import) transfer.Import) func(Harness) Harness {
		return func(h Harness) Harness {
			h.sink = func(s transfer.Sink) transfer.Sink { return brokenSink{s, wrap} }
			return h
		}
	}
	for _, m := range []mutant{
		{"drops a batch of the copy", sinkOf(func(i transfer.Import) transfer.Import { return &dropsCopy{Import: i} }), []string{"values"}},
		{"drops changes", sinkOf(func(i transfer.Import) transfer.Import { return &dropsChanges{Import: i} }), []string{"changes in order"}},
		{"applies changes out of order", sinkOf(func(i transfer.Import) transfer.Import { return &reorders{Import: i} }), []string{"changes in order"}},
		{"skips changes before the cut", sinkOf(func(i transfer.Import) transfer.Import { return &skipsAhead{Import: i} }), []string{"every kind of change", "changes between copies"}},
		{"compares nothing", sinkOf(func(i transfer.Import) transfer.Import { return &blind{Import: i} }), []string{"difference found before the cut", "difference found in the cut"}},
		{"settles what differs", sinkOf(func(i transfer.Import) transfer.Import { return &settlesAll{i} }), []string{"keys settled before the cut"}},
		{"settles for ever", sinkOf(func(i transfer.Import) transfer.Import { return &settlesForEver{Import: i} }), []string{"keys settled before the cut"}},
		{"forgets what changed", sinkOf(func(i transfer.Import) transfer.Import { return &forgets{Import: i} }), []string{"difference found in the cut"}},
		{"ignores the fence", func(h Harness) Harness { h.cell.IgnoreFence = true; return h }, []string{"late import", "late removal"}},
		{"loses changes on the way back", sinkOf(func(i transfer.Import) transfer.Import { return &dropsChanges{Import: i} }), []string{"way back"}},
		{"begins the way back late", func(h Harness) Harness {
			h.source = func(s transfer.Source) transfer.Source { return startsLate{s} }
			return h
		}, []string{"way back"}},
		{"frees the way back", func(h Harness) Harness {
			h.sink = func(s transfer.Sink) transfer.Sink { return freesAll{s} }
			return h
		}, []string{"way back"}},
		{"ignores the fence on the way back", func(h Harness) Harness { h.cell.IgnoreFence = true; return h }, []string{"way back, late"}},
		{"removes nothing", func(h Harness) Harness {
			h.sink = func(s transfer.Sink) transfer.Sink { return removesNothing{s} }
			return h
		}, []string{"removal"}},
		{"says that it holds nothing", func(h Harness) Harness {
			h.sink = func(s transfer.Sink) transfer.Sink { return holdsNothing{s} }
			return h
		}, []string{"removal"}},
		{"never says what it keeps", func(h Harness) Harness {
			h.source = func(s transfer.Source) transfer.Source { return neverChecks{s} }
			return h
		}, []string{"retention"}},
		{"never releases", func(h Harness) Harness {
			h.sink = func(s transfer.Sink) transfer.Sink { return neverSweeps{s} }
			return h
		}, []string{"rolled back"}},
		{"keeps what a group holds", func(h Harness) Harness {
			h.source = func(s transfer.Source) transfer.Source { return neverReleases{s} }
			return h
		}, []string{"group"}},
		{"ends a group with its first member", func(h Harness) Harness {
			h.source = func(s transfer.Source) transfer.Source { return endsAll{s} }
			return h
		}, []string{"group"}},
		{"loses a member's changes", func(h Harness) Harness {
			h.source = func(s transfer.Source) transfer.Source { return dropsMember{s} }
			return h
		}, []string{"group", "group, read anew"}},
		{"waits for the slowest of a group", func(h Harness) Harness {
			turn := make(chan struct{}, 1)
			h.source = func(s transfer.Source) transfer.Source { return slowest{s, turn} }
			return h
		}, []string{"group, one stalls"}},
		{"sweeps no tenant", func(h Harness) Harness {
			h.sink = func(s transfer.Sink) transfer.Sink { return neverSweeps{s} }
			return h
		}, []string{"group, one rolled back"}},
	} {
		t.Run(m.name, func(t *testing.T) {
			broken := m.h(h)
			for _, c := range checks {
				if !slices.Contains(m.tests, c.name) {
					continue
				}
				if got := record(t, c.name, func(tb TB) { c.f(tb, broken) }); len(got) > 0 {
					t.Logf("noticed by %q: %.300s", c.name, got[0])
					return
				}
			}
			t.Errorf("the suite passes a store that %s", m.name)
		})
	}
}

type brokenSink struct {
	transfer.Sink
	wrap func(transfer.Import) transfer.Import
}

func (s brokenSink) Import(ctx context.Context, m cells.MoveRef) (transfer.Import, error) {
	i, err := s.Sink.Import(ctx, m)
	if err != nil {
		return nil, err
	}
	return s.wrap(i), nil
}

func (s brokenSink) ImportBack(ctx context.Context, m cells.MoveRef, start transfer.Position) (transfer.Import, error) {
	i, err := s.Sink.ImportBack(ctx, m, start)
	if err != nil {
		return nil, err
	}
	return s.wrap(i), nil
}

// startsLate takes a way back from where the owner is when it is asked for.
type startsLate struct{ transfer.Source }

func (s startsLate) Kept(ctx context.Context, m cells.MoveRef) (transfer.Position, error) {
	if _, err := s.Source.Kept(ctx, m); err != nil {
		return "", err
	}
	return s.Source.Head(ctx, m)
}

// freesAll frees what is captured for ways back that are still open.
type freesAll struct{ transfer.Sink }

func (s freesAll) Sweep(ctx context.Context) error {
	return errors.Join(s.Sink.Sweep(ctx), s.Sink.Free(ctx, tenant, "m1"))
}

// dropsCopy loses the first batch with more than one row.
type dropsCopy struct {
	transfer.Import
	done bool
}

func (d *dropsCopy) Copy(ctx context.Context, b transfer.Batch) error {
	if !d.done && b.Count > 1 {
		d.done = true
		b.Data, b.Count = nil, 0
	}
	return d.Import.Copy(ctx, b)
}

// dropsChanges loses every other batch of changes.
type dropsChanges struct {
	transfer.Import
	n atomic.Int64
}

func (d *dropsChanges) Apply(ctx context.Context, b transfer.Batch) error {
	if b.Count > 0 && d.n.Add(1)%2 == 1 {
		b.Table, b.Data, b.Count = "", nil, 0
	}
	return d.Import.Apply(ctx, b)
}

// reorders applies each batch with changes once more, after a later one of its table.
type reorders struct {
	transfer.Import
	held map[string]transfer.Batch
}

func (r *reorders) Apply(ctx context.Context, b transfer.Batch) error {
	if b.Count == 0 {
		return r.Import.Apply(ctx, b)
	}
	late, ok := r.held[b.Table]
	if r.held == nil {
		r.held = map[string]transfer.Batch{}
	}
	r.held[b.Table] = b
	if !ok {
		return r.Import.Apply(ctx, b)
	}
	late.Upto, late.End = b.Upto, b.End
	b.End = false
	if err := r.Import.Apply(ctx, b); err != nil {
		return err
	}
	return r.Import.Apply(ctx, late)
}

// skipsAhead takes the position of changes without the changes, as an
// implementation would that reads on from where the source is now.
type skipsAhead struct{ transfer.Import }

func (s *skipsAhead) Apply(ctx context.Context, b transfer.Batch) error {
	return s.Import.Apply(ctx, transfer.Batch{Upto: b.Upto, End: b.End})
}

// blind says that everything is equal.
type blind struct{ transfer.Import }

func (b *blind) Touched(context.Context, int) ([]transfer.KeySet, error) { return nil, nil }

func (b *blind) Digests(context.Context, []transfer.KeySet) ([]transfer.Digest, error) {
	return nil, nil
}

// forgets compares no key that has changed.
type forgets struct{ transfer.Import }

func (f *forgets) Touched(context.Context, int) ([]transfer.KeySet, error) { return nil, nil }

type removesNothing struct{ transfer.Sink }

func (removesNothing) Discard(context.Context, cells.TenantID, cells.Residue, transfer.RemoveOptions) error {
	return nil
}

type holdsNothing struct{ transfer.Sink }

func (holdsNothing) Holdings(context.Context, int) ([]transfer.Holding, error) { return nil, nil }

// neverChecks finds nothing wrong with any move.
type neverChecks struct{ transfer.Source }

func (neverChecks) Check(context.Context, cells.MoveRef, transfer.Limits) (transfer.Health, error) {
	return transfer.Health{}, nil
}

type neverSweeps struct{ transfer.Sink }

func (neverSweeps) Sweep(context.Context) error { return nil }

func (neverSweeps) SweepTenant(context.Context, cells.TenantID) error { return nil }

// neverReleases leaves captures as they are.
type neverReleases struct{ transfer.Source }

func (neverReleases) Release(context.Context, cells.MoveRef) error { return nil }

// endsAll takes the other members of the group along.
type endsAll struct{ transfer.Source }

func (s endsAll) Release(ctx context.Context, m cells.MoveRef) error {
	err := s.Source.Release(ctx, m)
	for i := range 5 {
		m.ID, m.Tenant = cells.MoveID(fmt.Sprintf("m%d", i)), cells.TenantID(fmt.Sprintf("crowd:%d", i))
		err = errors.Join(err, s.Source.Release(ctx, m))
	}
	return err
}

// dropsMember hands a member positions without what has changed.
type dropsMember struct{ transfer.Source }

func (s dropsMember) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	return s.Source.Changes(ctx, m, from, func(b transfer.Batch) error {
		if m.ID == "m1" {
			b.Table, b.Data, b.Count = "", nil, 0
		}
		return yield(b)
	})
}

// slowest hands changes to one member after the other.
type slowest struct {
	transfer.Source
	turn chan struct{}
}

func (s slowest) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	return s.Source.Changes(ctx, m, from, func(b transfer.Batch) error {
		select {
		case s.turn <- struct{}{}:
			defer func() { <-s.turn }()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return yield(b)
	})
}
