// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Return implements Agent. It reads the changes for as long as it takes to reach
// where the owner was when it was called, and no longer: an undo window holds no
// connection between two rounds.
//
// A schema that has changed, and more kept for it than the limits allow, end a way
// back for good.
func (v *Mover) Return(ctx context.Context, m cells.MoveRef, src Source) (out cells.Returned, err error) {
	if err := validate(m); err != nil {
		return out, err
	}
	if out, err = v.bring(ctx, m, src); fatal(err) {
		err = fmt.Errorf("%w: %w", cells.ErrReturnLost, err)
	}
	return out, err
}

func (v *Mover) bring(ctx context.Context, m cells.MoveRef, src Source) (out cells.Returned, err error) {
	if err := v.sink.Stale(ctx, m); err != nil {
		return out, err
	}
	start, err := src.Kept(ctx, m)
	if err != nil {
		return out, err
	}
	if _, err := src.Check(ctx, m, limitsOf(ctx)); fatal(err) {
		return out, err
	}
	imp, err := v.sink.ImportBack(ctx, m, start)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, imp.Close()) }()
	if err := v.o.fault("back"); err != nil {
		return out, err
	}
	asked := time.Now()
	head, err := src.Head(ctx, m)
	if err != nil {
		return out, err
	}
	at := imp.State().Applied
	if at < head {
		if at, out.Changes, err = v.pull(ctx, m, src, imp, head); err != nil {
			return out, err
		}
	} else if at == start {
		err = src.Applied(ctx, m, at) // what came before the start is not needed
	}
	out.Lag = time.Since(asked)
	return out, err
}

// pull applies everything up to head and tells the source.
func (v *Mover) pull(ctx context.Context, m cells.MoveRef, src Source, imp Import, head Position) (at Position, changes int64, err error) {
	r := follow(ctx, m, src, imp)
	err = r.wait(ctx, head)
	if err == nil {
		err = v.o.fault("returned")
	}
	if err == nil {
		r.mu.Lock()
		at = r.applied
		r.mu.Unlock()
		// While it is being read: who reads tells the server.
		err = src.Applied(ctx, m, at)
	}
	serr := r.stop()
	<-r.ended
	changes, _ = r.counts()
	if err == nil && serr != nil {
		err = serr
	}
	return at, changes, err
}

// Free implements Agent.
func (v *Mover) Free(ctx context.Context, tenant cells.TenantID, move cells.MoveID) error {
	if err := errors.Join(tenant.Validate(), move.Validate()); err != nil {
		return err
	}
	return v.sink.Free(ctx, tenant, move)
}

// begin begins the capture at the source: a new one, or for an undo the way back,
// whose first position is where the rows here are from. If it has been lost, the undo
// goes on as any move does, with a copy.
func (p *preparing) begin(ctx context.Context) (Position, error) {
	if p.m.Undoes == "" {
		return p.src.Begin(ctx, p.m)
	}
	start, err := p.src.Adopt(ctx, p.m)
	if errors.Is(err, cells.ErrReturnLost) {
		p.v.o.log.Warn("transfer: the way back is lost; the undo copies all rows", "move", p.m.ID, "tenant", p.m.Tenant, "undoes", p.m.Undoes, "err", err)
		return p.src.Begin(ctx, p.m)
	}
	if st := p.imp.State(); err == nil && st.Start == "" && len(st.Tables) > 0 {
		// No round of the way back has ever run: the rows are as the cut left them.
		err = p.imp.Adopt(ctx, start)
	}
	return start, err
}

// compareAll compares all rows of an undo, if they are few enough, as after a copy.
func (p *preparing) compareAll(ctx context.Context) error {
	if p.m.Undoes == "" || p.total > p.v.o.undoRows {
		return nil
	}
	view, err := p.src.View(ctx, p.m)
	if err != nil {
		return err
	}
	defer view.Close()
	if err := align(ctx, p.imp, view); err != nil {
		return err
	}
	return p.verify(ctx, view, whole(p.tables))
}

// keep begins the way back in this store, before the cut: making it may have to
// wait for other transactions, which nobody may be made to wait for in the cut.
func (p *preparing) keep(ctx context.Context) error {
	if _, err := p.v.source.Begin(ContextWithoutView(ctx), p.m.Back()); err != nil {
		return fmt.Errorf("the way back of move %s cannot be begun at %s (move without an undo window, or mend this): %w", p.m.ID, p.m.Target, err)
	}
	return p.v.o.fault("kept")
}
