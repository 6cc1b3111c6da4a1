// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Restored is what Restore found and wrote. Left is how many tenancy rows it removed of
// tenants that have moved away since.
type Restored struct {
	Tenants int          `json:"tenants"`
	Fences  int          `json:"fences"`
	Left    int          `json:"left,omitempty"`
	Before  tenancy.Rows `json:"before"`
	Rows    tenancy.Rows `json:"rows"`
	// Prepare says that cell prepare has to be run once the cell has started.
	Prepare bool `json:"prepare"`
}

// Restore writes back from the directory what a restore of the cell's stores may have
// taken. The cell is stopped. The order lets nothing write that should not: fences
// first, then what the cell holds, then its state, then the mode, which is only raised.
func (c *Cell) Restore(ctx context.Context) (out Restored, err error) {
	if err := c.check(); err != nil {
		return out, err
	}
	if err := c.Rows.Install(ctx); err != nil {
		return out, err
	}
	_, row, err := c.registered(ctx)
	if err != nil {
		return out, err
	}
	live, err := c.live(ctx)
	if err != nil {
		return out, err
	}
	if len(live) > 0 {
		var names []string
		for _, h := range live {
			names = append(names, h.Instance)
		}
		return out, refuse("processes of cell %s run (%s); stop them, and if they are stopped wait %s", c.Name, strings.Join(names, ", "), c.Alive)
	}
	if out.Before, err = c.Rows.Read(ctx); err != nil {
		return out, err
	}
	if f := out.Before.First; f != nil && (f.Cell != c.Name || f.First != row.First) {
		return out, refuse("the first row says (%t, %s), and the directory (%t, %s); the stores are another cell's", f.First, f.Cell, row.First, c.Name)
	}
	placed, err := c.placements(ctx)
	if err != nil {
		return out, err
	}
	if out.Fences, err = c.fences(ctx, placed); err != nil {
		return out, err
	}
	if err := c.done(ctx, StepFences, "%d fences raised", out.Fences); err != nil {
		return out, err
	}
	tenants := slices.Sorted(maps.Keys(placed))
	if len(tenants) > 0 {
		if err := c.Rows.Hold(ctx, tenants...); err != nil {
			return out, err
		}
	}
	out.Tenants = len(tenants)
	if out.Left, err = c.left(ctx, placed); err != nil {
		return out, err
	}
	if err := c.done(ctx, StepHeld, "%d tenancy rows, %d of tenants that have left", len(tenants), out.Left); err != nil {
		return out, err
	}
	p := tenancy.Preparation{First: tenancy.First{First: row.First, Cell: c.Name}, Mode: row.Mode}
	if row.Current != nil {
		p.Self, p.ReplaceSelf = &tenancy.Self{Current: row.Current, Next: row.Next}, true
	}
	if out.Rows, err = c.Rows.Prepare(ctx, p); err != nil {
		return out, err
	}
	if err := c.done(ctx, StepRows, "the state is %s", out.Rows.State()); err != nil {
		return out, err
	}
	if row.Mode == tenancy.Enforced && out.Rows.Mode == tenancy.Recording {
		mode, err := c.Rows.SetMode(ctx, tenancy.Enforced, tenancy.ModeWrite{Deadline: time.Now().Add(c.Wait)})
		if err != nil {
			return out, fmt.Errorf("raising the mode (it is %s): %w", mode, err)
		}
		if out.Rows, err = c.Rows.Read(ctx); err != nil {
			return out, err
		}
	}
	out.Prepare = out.Rows.Self == nil
	return out, c.done(ctx, StepMode, "the mode is %s", out.Rows.Mode)
}

// fences raises the fences of tenants that have moved, from the directory: those that
// are here at their epoch, and those that left below it. A directory whose placements
// never change has none.
func (c *Cell) fences(ctx context.Context, placed map[cells.TenantID]deploy.Placement) (n int, err error) {
	all := &Cell{Directory: c.Directory} // every cell's
	everywhere, err := all.placements(ctx)
	if err != nil {
		return 0, err
	}
	for _, t := range slices.Sorted(maps.Keys(everywhere)) {
		p := everywhere[t]
		if p.Epoch == 0 {
			continue
		}
		if c.Fences == nil {
			return n, refuse("tenant %s has moved, and this command has no fences of cell %s to raise; give it the service's stores", t, c.Name)
		}
		if _, here := placed[t]; here {
			err = c.Fences.OpenFence(ctx, cells.FenceOrder{Cell: c.Name, Tenant: t, Epoch: p.Epoch, Floor: p.Epoch, Move: p.Move})
		} else {
			// What this cell had of it is older than the move that ended at that epoch.
			err = c.Fences.CloseFence(ctx, cells.FenceOrder{Cell: c.Name, Tenant: t, Epoch: p.Epoch - 1, Move: p.Move})
		}
		if errors.Is(err, cells.ErrStaleOrder) {
			continue // the store's fence is newer than what the directory knows
		}
		if err != nil {
			return n, fmt.Errorf("the fence of tenant %s: %w", t, err)
		}
		n++
	}
	return n, nil
}

// left removes the tenancy rows of tenants that have moved away since what was restored.
// Their fences are closed by now. One that the directory places elsewhere and that never
// moved was never this cell's: it stays, for cell doctor to name.
func (c *Cell) left(ctx context.Context, placed map[cells.TenantID]deploy.Placement) (n int, err error) {
	held, err := c.Rows.Tenants(ctx)
	if err != nil {
		return 0, err
	}
	all := &Cell{Directory: c.Directory}
	everywhere, err := all.placements(ctx)
	if err != nil {
		return 0, err
	}
	for _, t := range held {
		_, here := placed[t]
		if p, ok := everywhere[t]; !ok || here || p.Epoch == 0 {
			continue
		}
		switch err := c.Rows.Unhold(ctx, t, 0); {
		case errors.Is(err, tenancy.ErrNotMoved): // the store's fence is newer, as above
		case err != nil:
			return n, err
		default:
			n++
		}
	}
	return n, nil
}

// Place places a tenant in the cell and writes its tenancy row, if the cell is where it
// is placed. The error is a refusal with WRONG_CELL when it is in another one.
func (c *Cell) Place(ctx context.Context, tenant cells.TenantID) (won wire.Winner, err error) {
	if err := deploy.CheckTenant(tenant); err != nil {
		return won, err
	}
	_, row, err := c.registered(ctx)
	if err != nil {
		return won, err
	}
	rows, err := c.Rows.Read(ctx)
	if err != nil {
		return won, err
	}
	if rows.First != nil && rows.First.Cell != c.Name {
		return won, refuse("the stores are cell %s's", rows.First.Cell)
	}
	f, err := c.Config.Fingerprint()
	if err != nil {
		return won, err
	}
	if won, err = c.Directory.Place(ctx, wire.Place{Tenant: tenant, Cell: c.Name, Fingerprint: &f, Actor: c.Actor}); err != nil {
		return won, err
	}
	if won.Cell != c.Name {
		return won, &cells.Answer{Code: cells.CodeWrongCell, Tenant: tenant, Detail: fmt.Sprintf("it is in %s already", won.Cell)}
	}
	if won.DeploymentID != row.DeploymentID {
		return won, refuse("cell %s is deployment %s with the directory, not %s", c.Name, won.DeploymentID, row.DeploymentID)
	}
	if err := c.done(ctx, StepPlaced, "%s is placed in %s", tenant, won.Cell); err != nil {
		return won, err
	}
	if err := c.Rows.HoldPlaced(ctx, tenant); err != nil {
		return won, err
	}
	return won, c.done(ctx, StepHeld, "the cell holds %s", tenant)
}
