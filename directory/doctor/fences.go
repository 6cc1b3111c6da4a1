// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/guard"
)

// fenceRounds bounds how often fences are read again that change while they are read.
const fenceRounds = 4

// checkFences reads the routes, the fences and the routes again: a fence is judged by a
// route that was the same before and after. What was found is looked at once more.
func checkFences(ctx context.Context, x *exam) (out []Finding, _ error) {
	ids, err := x.storeCells(ctx)
	if err != nil && len(ids) == 0 {
		return nil, err
	}
	list, err := x.cells(ctx)
	if err != nil {
		return nil, err
	}
	var def cells.CellID
	for _, c := range list {
		if c.Default {
			def = c.ID
		}
	}
	registered := func(id cells.CellID) bool {
		return slices.ContainsFunc(list, func(c api.Cell) bool { return c.ID == id })
	}
	var errs []error
	for _, id := range ids {
		again := map[cells.TenantID]bool{}
		for round := range fenceRounds {
			before, err := x.routes(ctx)
			if err != nil {
				return nil, err
			}
			fences, err := x.fencesOf(ctx, id, true)
			if err != nil {
				errs = append(errs, err)
				break
			}
			wrong := map[cells.TenantID]Finding{}
			for _, f := range fences {
				if round > 0 && !again[f.Tenant] {
					continue
				}
				if msg := judgeFence(f, before, id, def); msg != "" {
					fd := Finding{Cell: id, Tenant: f.Tenant, Message: msg}
					if !registered(id) {
						fd.Message += " (the cell is not registered)"
					}
					wrong[f.Tenant] = fd
				}
			}
			if len(wrong) == 0 {
				break
			}
			after, err := x.routes(ctx)
			if err != nil {
				return nil, err
			}
			next := map[cells.TenantID]bool{}
			for t, f := range wrong {
				if before[t].Revision != after[t].Revision || round == 0 {
					next[t] = true // it changes now, or is looked at a second time
				} else {
					out = append(out, f)
				}
			}
			if again = next; len(again) == 0 {
				break
			}
			if err := pause(ctx, 200*time.Millisecond); err != nil {
				return out, err
			}
		}
	}
	return out, errors.Join(errs...)
}

// judgeFence says what is wrong with a cell's fence, given the routes of its moment, or "".
// A fence that is behind in the cell of the route is raised before the first admission,
// so it is nothing.
func judgeFence(f guard.Fence, routes map[cells.TenantID]cells.TenantRoute, cell, def cells.CellID) string {
	r, ok := routes[f.Tenant]
	switch {
	case !ok && !f.Open:
		return ""
	case !ok && f.Epoch == 0 && cell == def:
		return "" // served without a route
	case !ok:
		return fmt.Sprintf("its fence is open at epoch %d, and the directory has no route of the tenant", f.Epoch)
	case f.Open && f.Epoch > r.Epoch:
		return fmt.Sprintf("its fence is open at epoch %d, the directory is at %d (%s, %s): the directory has been set back", f.Epoch, r.Epoch, r.State, r.CellID)
	case f.Open && r.State == cells.StateDeleted:
		return fmt.Sprintf("its fence is open at epoch %d, and the tenant was deleted at %d", f.Epoch, r.Epoch)
	case f.Open && r.CellID != cell && r.State != cells.StateDeleting:
		return fmt.Sprintf("its fence is open at epoch %d, and the tenant is in %s at epoch %d: the cell's database has been set back", f.Epoch, r.CellID, r.Epoch)
	case !f.Open && f.Epoch > r.Epoch:
		return fmt.Sprintf("its fence is closed at epoch %d, the directory is at %d: the directory has been set back", f.Epoch, r.Epoch)
	case !f.Open && r.CellID == cell && r.State == cells.StateActive && f.Epoch >= r.Epoch:
		return fmt.Sprintf("its fence is closed at epoch %d, and the directory says that it is served here at %d: requests are refused", f.Epoch, r.Epoch)
	}
	return ""
}
