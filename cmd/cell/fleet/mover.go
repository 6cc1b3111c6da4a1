// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// Mover moves tenants through the operator API; it implements load.Mover.
type Mover struct {
	Client *client.Client
	// OnUpdate, if set, sees every state of the move's record.
	OnUpdate func(api.Move)
}

// Place implements load.Mover.
func (m Mover) Place(ctx context.Context, tenant, cell string) error {
	p, err := m.Client.Place(ctx, api.PlacementRequest{Tenant: cells.TenantID(tenant), Cell: cells.CellID(cell), Actor: "load"})
	if err == nil && string(p.Cell) != cell {
		err = fmt.Errorf("%s is in %s, not in %s", tenant, p.Cell, cell)
	}
	return err
}

// Move implements load.Mover.
func (m Mover) Move(ctx context.Context, tenant, to string) (load.Moved, error) {
	// It goes back and forth; nobody undoes it.
	none := time.Duration(0)
	mv, err := m.Client.Move(ctx, api.MoveRequest{Tenant: cells.TenantID(tenant), To: cells.CellID(to), Actor: "load", Force: true, UndoWindow: &none})
	if err != nil {
		return load.Moved{}, err
	}
	err = m.Client.WatchMove(ctx, mv.ID, func(now api.Move) error {
		mv = now
		if m.OnUpdate != nil {
			m.OnUpdate(now)
		}
		return nil
	})
	out := load.Moved{ID: string(mv.ID), From: string(mv.From), To: string(mv.To), Predicted: mv.Predicted, Pause: mv.Pause, Rows: mv.Rows, Bytes: mv.Bytes}
	for _, s := range mv.Steps {
		if !out.CutFrom.IsZero() && out.CutTo.IsZero() {
			out.Cut = append(out.Cut, load.CutStep{Step: s.Step, Took: s.Took})
		}
		switch cells.Step(s.Step) {
		case cells.StepPrepare:
			out.Copy = s.Took
		case cells.StepQuiesce:
			out.CutFrom = s.At
		case cells.StepActivate, cells.StepReopen:
			out.CutTo = s.At.Add(50 * time.Millisecond)
		}
	}
	if err == nil && mv.State != api.MoveDone {
		err = fmt.Errorf("move %s ended %s: %s", mv.ID, mv.State, mv.Reason)
	}
	return out, err
}
