// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"time"
)

// settleKeys is how many keys, of so many in all, settle compares as one: one that has
// changed again meanwhile keeps the others back, and each set is a question of its own.
func settleKeys(all int64) int { return int(min(max(all/100, 4), 64)) }

// finishKeys bounds the keys of one set where all of them have to be equal.
const finishKeys = 5000

// settle compares the keys that changed since they were last compared, and has the
// import forget those that are equal, so that Finish has few left; keys is about how
// many there are. The run goes on where it is, which keeps the source's stream of changes open.
//
// The rows here are those of the source at A, the position that is applied; the view
// shows the source at P, not before A. Where a key's rows are equal and no change
// between A and P concerns it, the rows were equal at A. A change that does concern it
// is yet to be applied and will have the key compared again. Keys that differ are no
// mismatch for the same reason: they stay, and Finish compares them at one position.
func (p *preparing) settle(ctx context.Context, r *run, keys int64) error {
	return r.call(ctx, func(imp Import) error {
		began := time.Now()
		sets, err := imp.Touched(ctx, settleKeys(keys))
		if err != nil || len(sets) == 0 {
			return err
		}
		view, err := p.settleView(ctx)
		if view == nil {
			return err
		}
		defer view.Close()
		if view.Position() < imp.State().Applied {
			return nil // it was taken for the whole group, before
		}
		watch := stopwatch{last: began}
		watch.lap("view")
		start := time.Now()
		ours, theirs, err := digestBoth(ctx, imp, view, sets)
		if err != nil {
			return err
		}
		p.perKey = time.Since(start) / time.Duration(max(1, keyCount(sets)))
		equal, digests := sets[:0:0], ours[:0:0]
		for i := range sets {
			if ours[i] == theirs[i] {
				equal, digests = append(equal, sets[i]), append(digests, ours[i])
			}
		}
		watch.lap("compare")
		if len(equal) == 0 {
			return nil
		}
		if err := imp.Settle(ctx, equal, compared(imp.State().Compared, fold(string(view.Position()), equal, digests))); err != nil {
			return err
		}
		watch.lap("settle")
		p.v.o.log.Debug("transfer: settled", append([]any{"move", p.m.ID, "tenant", p.m.Tenant, "position", view.Position(), "keys", keyCount(sets), "equal", keyCount(equal)}, watch.laps...)...)
		return p.v.o.fault("settled")
	})
}

// settleWait bounds how long changes are kept waiting for a view of the source, which may
// have to wait for everybody's open transactions there.
const settleWait = 2 * time.Second

// settleView is a view, or nil when there is none soon: what is not settled is compared
// by Finish.
func (p *preparing) settleView(ctx context.Context) (View, error) {
	vctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	view, err := p.view(vctx)
	if err == nil {
		return view, nil
	}
	if ctx.Err() == nil && (vctx.Err() != nil || retryable(err)) {
		p.v.o.log.Info("transfer: the keys that changed are compared in the cut: there is no view of the source", "move", p.m.ID, "tenant", p.m.Tenant, "err", err)
		return nil, nil
	}
	return nil, err
}

// touched counts the keys that Finish would compare now.
func touched(ctx context.Context, r *run) (n int64, err error) {
	err = r.call(ctx, func(imp Import) error {
		sets, err := imp.Touched(ctx, finishKeys)
		n = keyCount(sets)
		return err
	})
	return n, err
}

// digestBoth asks both sides at once.
func digestBoth(ctx context.Context, imp Import, view View, sets []KeySet) (ours, theirs []Digest, err error) {
	type answer struct {
		ds  []Digest
		err error
	}
	far := make(chan answer, 1)
	go func() {
		ds, err := view.Digests(ctx, sets)
		far <- answer{ds, err}
	}()
	ours, err = imp.Digests(ctx, sets)
	a := <-far
	if a.err != nil {
		return nil, nil, a.err
	}
	if err == nil && len(ours) > 0 && len(a.ds) > 0 && ours[0].kind() != "" && a.ds[0].kind() == "" {
		// The other side's agent is of an earlier build.
		ours, err = imp.Digests(ContextWithPlainDigests(ctx), sets)
	}
	if err == nil && (len(a.ds) != len(sets) || len(ours) != len(sets)) {
		err = fmt.Errorf("transfer: asked for %d digests, got %d and %d", len(sets), len(a.ds), len(ours))
	}
	return ours, a.ds, err
}
