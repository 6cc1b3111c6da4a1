// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
)

// movable returns the placement that a move is about.
func movable(ctx context.Context, tx *Tx, tenant cells.TenantID) (deploy.Placement, error) {
	v, _, err := viewIn(ctx, tx)
	if err != nil {
		return deploy.Placement{}, err
	}
	if v.Kind != deploy.Movable {
		return deploy.Placement{}, deploy.ErrPinned
	}
	return placementIn(ctx, tx, tenant)
}

// room refuses a move into a cell that does not serve, is closed or is full; an undo only
// into one that does not serve.
func (d deployments) room(ctx context.Context, tx *Tx, r deploy.Repoint) error {
	to, _, err := scanDeployment(tx.QueryRowContext(ctx, deploymentCells+` WHERE name = ?`+d.s.d.ForUpdate, r.To))
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("%w: %s", deploy.ErrNoCell, r.To)
	}
	if err != nil {
		return err
	}
	if to.State != deploy.Serving {
		return fmt.Errorf("%w: cell %s is %s", deploy.ErrClosed, r.To, to.State)
	}
	if r.Undo {
		return nil
	}
	return deploy.Room(&to, 1)
}

// Reserve implements [deploy.Store].
func (d deployments) Reserve(ctx context.Context, r deploy.Repoint, audit api.AuditEntry) error {
	return d.s.tx(ctx, "reserve", func(tx *Tx) error {
		p, err := movable(ctx, tx, r.Tenant)
		if err != nil {
			return err
		}
		switch {
		case p.Cell != r.From || r.From == r.To:
			return fmt.Errorf("%w: tenant %s is placed in cell %s", cells.ErrConflict, r.Tenant, p.Cell)
		case p.MovingBy == r.Move && p.MovingTo == r.To:
			return nil
		case p.MovingBy != "":
			return fmt.Errorf("%w: cell %s has a place for tenant %s, which move %s is bringing there", cells.ErrConflict, p.MovingTo, r.Tenant, p.MovingBy)
		}
		if err := d.room(ctx, tx, r); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE deployment_placements SET moving_to = ?, moving_by = ? WHERE tenant = ?`, r.To, r.Move, r.Tenant); err != nil {
			return err
		}
		audit.Tenant, audit.Cell, audit.Move = r.Tenant, r.To, r.Move
		return insertAudit(ctx, tx, audit)
	})
}

// Release implements [deploy.Store].
func (d deployments) Release(ctx context.Context, tenant cells.TenantID, move cells.MoveID, audit api.AuditEntry) error {
	return d.s.tx(ctx, "release", func(tx *Tx) error {
		p, err := placementIn(ctx, tx, tenant)
		if errors.Is(err, sql.ErrNoRows) || err == nil && (p.MovingBy == "" || p.MovingBy != move) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE deployment_placements SET moving_to = '', moving_by = '' WHERE tenant = ?`, tenant); err != nil {
			return err
		}
		audit.Tenant, audit.Cell, audit.Move = tenant, p.MovingTo, move
		return insertAudit(ctx, tx, audit)
	})
}

// Repoint implements [deploy.Store].
func (d deployments) Repoint(ctx context.Context, r deploy.Repoint, audit api.AuditEntry) (out deploy.Placement, err error) {
	err = d.s.tx(ctx, "repoint", func(tx *Tx) error {
		p, err := movable(ctx, tx, r.Tenant)
		if err != nil {
			return err
		}
		switch {
		case p.Cell == r.To && p.Epoch == r.Epoch && p.Move == r.Move:
			out = p
			return nil
		case p.Cell != r.From || p.Epoch >= r.Epoch:
			return fmt.Errorf("%w: tenant %s is placed in cell %s at epoch %d", cells.ErrConflict, r.Tenant, p.Cell, p.Epoch)
		case p.MovingBy != "" && (p.MovingBy != r.Move || p.MovingTo != r.To):
			return fmt.Errorf("%w: cell %s has a place for tenant %s, which move %s is bringing there", cells.ErrConflict, p.MovingTo, r.Tenant, p.MovingBy)
		case p.MovingBy == "":
			// The route has been decided, by who knew of no places: nothing may refuse it
			// any more, and one tenant too many in a cell is better than one in none.
			if err := d.room(ctx, tx, r); err != nil && !errors.Is(err, deploy.ErrClosed) {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `UPDATE deployment_placements SET cell = ?, epoch = ?, move = ?, moving_to = '', moving_by = '' WHERE tenant = ?`,
			r.To, int64(r.Epoch), r.Move, r.Tenant); err != nil {
			return err
		}
		audit.Tenant, audit.Cell, audit.Move = r.Tenant, r.To, r.Move
		if err := insertAudit(ctx, tx, audit); err != nil {
			return err
		}
		out, err = placementIn(ctx, tx, r.Tenant)
		return err
	})
	return out, err
}
