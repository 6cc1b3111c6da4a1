// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

const (
	drainRetryMin = 20 * time.Millisecond
	drainRetryMax = 500 * time.Millisecond
	// drainRefusals is how many refused connections in a row mean that a process is
	// dead; with the waits in between that takes 140 ms.
	drainRefusals = 4
)

// Drain implements [cells.Drainer]: it asks every live process of route.CellID, at
// once, and waits for all. A process that lapses or leaves meanwhile, or whose
// address refuses connections, counts as gone: whatever it still holds is stopped
// by the fence. Processes that appear
// meanwhile are asked, too. When ctx ends, the error wraps its cause and names the
// processes that hold the drain back, with what they have in flight.
func (c *AgentClient) Drain(ctx context.Context, route cells.TenantRoute) error {
	cell := route.CellID
	drained := make(map[string]bool)
	for {
		hbs, err := c.live(ctx, cell, string(route.TenantID))
		if err != nil {
			return err
		}
		hbs = slices.DeleteFunc(hbs, func(h Heartbeat) bool { return drained[h.Instance] })
		if len(hbs) == 0 {
			return nil
		}
		errs := make([]error, len(hbs))
		var wg sync.WaitGroup
		for i, h := range hbs {
			drained[h.Instance] = true
			wg.Go(func() { errs[i] = c.drainOne(ctx, h, route) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
}

// drainOne repeats the order until the process has answered or is gone.
func (c *AgentClient) drainOne(ctx context.Context, h Heartbeat, route cells.TenantRoute) error {
	refused := 0
	for wait := drainRetryMin; ; wait = min(2*wait, drainRetryMax) {
		err := c.whileLive(ctx, h, true, func(ctx context.Context, h Heartbeat) error {
			return c.call(ctx, h, PathDrain, route, &struct{}{})
		})
		if err == nil {
			return nil
		}
		err = fmt.Errorf("drain of cell %s, process %s: %w", h.Cell, h.Instance, err)
		switch {
		case errors.Is(err, errGone):
			c.log.Info("a process went away while it was drained", "cell", h.Cell, "instance", h.Instance, "err", err)
			return nil
		case !moveOn(ctx, err):
			return err
		}
		// Nothing listens there any more, again and again: the process has died.
		if refused++; !errors.Is(err, syscall.ECONNREFUSED) {
			refused = 0
		}
		if refused == drainRefusals {
			c.log.Info("a process is dead and has not lapsed yet", "cell", h.Cell, "instance", h.Instance, "err", err)
			return nil
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		now, lerr := c.live(ctx, h.Cell, "")
		if lerr == nil && !slices.ContainsFunc(now, func(o Heartbeat) bool { return o.Instance == h.Instance }) {
			return nil
		}
	}
}

// sides looks at the two cells of a move: whether there are rows to move at all.
// It fails when only one of them keeps state.
func (c *AgentClient) sides(ctx context.Context, m cells.MoveRef) (none bool, sources []string, err error) {
	src, err := c.live(ctx, m.Source, string(m.Source+">"+m.Target))
	if err != nil {
		return false, nil, err
	}
	dst, err := c.live(ctx, m.Target, string(m.ID))
	if err != nil {
		return false, nil, err
	}
	if len(src) == 0 {
		return false, nil, noProcess(m.Source)
	}
	if len(dst) == 0 {
		return false, nil, noProcess(m.Target)
	}
	switch a, b := stateless(src), stateless(dst); {
	case a && b:
		return true, nil, nil
	case a != b:
		return false, nil, fmt.Errorf("%w: cell %s keeps state: %v, cell %s: %v; both must, or neither", cells.ErrInvalid, m.Source, !a, m.Target, !b)
	}
	for _, h := range src {
		if h.Engine != "" {
			sources = append(sources, h.AgentURL)
		}
	}
	return false, sources, nil
}

// Preflight implements [cells.DataMover]: it surveys both cells and compares what
// they say. Nothing is changed.
func (c *AgentClient) Preflight(ctx context.Context, m cells.MoveRef) (cells.Preflight, error) {
	none, _, err := c.sides(ctx, m)
	if err != nil || none {
		return cells.Preflight{}, err
	}
	var src, dst transfer.Survey
	var serr, derr error
	var wg sync.WaitGroup
	wg.Go(func() { src, serr = c.survey(ctx, m.Source, m) })
	wg.Go(func() { dst, derr = c.survey(ctx, m.Target, m) })
	wg.Wait()
	if err := errors.Join(serr, derr); err != nil {
		return cells.Preflight{}, err
	}
	return transfer.Compare(m, src, dst), nil
}

func (c *AgentClient) survey(ctx context.Context, cell cells.CellID, m cells.MoveRef) (out transfer.Survey, err error) {
	_, err = c.any(ctx, cell, string(m.ID), func(ctx context.Context, h Heartbeat) error {
		out = transfer.Survey{}
		return c.call(ctx, h, PathSurvey, SurveyRequest{Tenant: m.Tenant, Group: transfer.GroupOf(ctx), Source: m.Source, Target: m.Target}, &out)
	})
	return out, err
}

// Prepare implements [cells.DataMover]: the target's agent does it, reading from
// the source's.
func (c *AgentClient) Prepare(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (out cells.Prediction, err error) {
	err = c.moveStep(ctx, PathPrepare, m, progress, func() any { out = cells.Prediction{}; return &out })
	if err == nil && (out.Pause < 0 || out.LagChanges < 0 || out.WriteRate < 0 || out.WriteRate != out.WriteRate) {
		err = fmt.Errorf("%w: cell %s predicts nonsense: %+v", cells.ErrInvalid, m.Target, out)
	}
	return out, err
}

// Finish implements [cells.DataMover].
func (c *AgentClient) Finish(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (mark string, err error) {
	mark, _, err = c.FinishProved(ctx, m, progress)
	return mark, err
}

// FinishProved implements [cells.Prover].
func (c *AgentClient) FinishProved(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (mark string, compared []cells.Comparison, err error) {
	var out FinishReply
	err = c.moveStep(ctx, PathFinish, m, progress, func() any { out = FinishReply{}; return &out })
	return out.Mark, out.Compared, err
}

func (c *AgentClient) moveStep(ctx context.Context, path string, m cells.MoveRef, progress func(cells.Progress), out func() any) error {
	none, sources, err := c.sides(ctx, m)
	if err != nil || none {
		return err
	}
	o := MoveOrder{Move: m, Sources: sources, RowsPerSecond: c.rateOf(ctx), Limits: c.limits, Group: transfer.GroupOf(ctx)}
	if l, ok := transfer.LimitsOf(ctx); ok {
		o.Limits = l
	}
	_, err = c.any(ctx, m.Target, string(m.ID), func(ctx context.Context, h Heartbeat) error {
		return c.step(ctx, h, path, o, out(), progress)
	})
	return err
}

// returnTimeout bounds one round of a way back.
const returnTimeout = time.Minute

// Return implements [cells.Returner]: the agent of the cell that keeps the rows does
// it, reading from the owner's. Stateless cells have nothing to bring.
func (c *AgentClient) Return(ctx context.Context, tenant cells.TenantID, r cells.Residue) (out cells.Returned, err error) {
	m, ok := r.Return(tenant)
	if !ok {
		return out, fmt.Errorf("%w: the entry of cell %s has no way back", cells.ErrInvalid, r.Cell)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, returnTimeout, fmt.Errorf("%w: a round of the way back took longer than %v", cells.ErrUnavailable, returnTimeout))
	defer cancel()
	none, sources, err := c.sides(ctx, m)
	if err != nil || none {
		return out, err
	}
	o := MoveOrder{Move: m, Sources: sources, RowsPerSecond: c.rateOf(ctx), Limits: c.limits}
	if l, ok := transfer.LimitsOf(ctx); ok {
		o.Limits = l
	}
	_, err = c.any(ctx, m.Target, string(m.ID), func(ctx context.Context, h Heartbeat) error {
		out = cells.Returned{}
		return c.call(ctx, h, PathReturn, o, &out)
	})
	return out, err
}

// free ends what the owner captures for a way back that is over.
func (c *AgentClient) free(ctx context.Context, tenant cells.TenantID, r cells.Residue) error {
	if r.Back == "" {
		return nil
	}
	var errs []error
	for _, id := range []cells.MoveID{r.Move, r.Undoes} {
		if id == "" {
			continue
		}
		_, err := c.any(ctx, r.Back, string(r.Move), func(ctx context.Context, h Heartbeat) error {
			return c.call(ctx, h, PathFree, FreeOrder{Cell: r.Back, Tenant: tenant, Move: id}, &struct{}{})
		})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// rateOf is the throttle that the context asks for, or the client's own.
func (c *AgentClient) rateOf(ctx context.Context) int {
	if n, ok := transfer.RateOf(ctx); ok {
		return max(0, n)
	}
	return c.rate
}

// Discard implements [cells.DataMover]: the loser's agent does it. What the owner
// captures for the loser is freed first; if that fails the rows are removed all the
// same, and the whole is to be tried again.
func (c *AgentClient) Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error {
	return errors.Join(c.free(ctx, tenant, r), c.discard(ctx, tenant, r, progress))
}

func (c *AgentClient) discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error {
	o := DiscardOrder{Tenant: tenant, Residue: r, RowsPerSecond: c.rateOf(ctx)}
	_, err := c.any(ctx, r.Cell, string(r.Move), func(ctx context.Context, h Heartbeat) error {
		return c.step(ctx, h, PathDiscard, o, &struct{}{}, progress)
	})
	return err
}

// Measure returns how many rows of the tenant the cell has and their bytes, as its
// database estimates them. A stateless cell has none.
func (c *AgentClient) Measure(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (rows, bytes int64, err error) {
	s, err := c.survey(ctx, cell, cells.MoveRef{Tenant: tenant})
	for _, t := range s.Tables {
		rows += max(t.Rows, 0)
		bytes += max(t.Bytes, 0)
	}
	return rows, bytes, err
}

// Holds reports whether the cell's database has rows of the tenant. A stateless
// cell has none.
func (c *AgentClient) Holds(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (bool, error) {
	s, err := c.survey(ctx, cell, cells.MoveRef{Tenant: tenant})
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(s.Tables, func(t transfer.TableInfo) bool { return t.Rows > 0 }), nil
}
