// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
)

func fleetChecks() []Check {
	return []Check{
		{ID: "directory", Scope: ScopeFleet, Worst: Error, run: checkDirectory,
			Looks: "The directory's operator listener answers with its cells.",
			Fix:   "start it again; routers and cells go on with what they know, and nothing is placed or moved meanwhile"},
		{ID: "directory-lost", Scope: ScopeFleet, Worst: Error, run: checkLost,
			Looks: "The directory has routes while cells' databases hold tenants. A directory that knows none has lost its own database, or runs on another one.",
			Fix:   "stop the directory before it places anybody, give it its own database back (from its backup, to its last commit), and start it again"},
		{ID: "fences", Scope: ScopeFleet, Worst: Error, run: checkFences,
			Looks: "Each fence of each cell's database against the tenant's route: open nowhere but in the route's cell, at no epoch above the route's, and not closed where the route says that the tenant is served.",
			Fix:   "find out which of the two was restored from a backup; a cell's fences are raised from the directory by restarting its processes"},
		{ID: "orphan-claims", Scope: ScopeFleet, Worst: Warning, run: checkClaims,
			Looks: "The tenants that each cell's quota counts against the routes to it. A claim whose maker died before it made the route stays counted.",
			Fix:   "the directory finishes or releases such claims within a minute; if it does not, place the tenant again (cell place) or look into the directory's log"},
		{ID: "homeless-routes", Scope: ScopeFleet, Worst: Error, run: checkHomeless,
			Looks: "Routes name cells that the directory has registered and that are not retiring.",
			Fix:   "register the cell again (cell cells set), or move the tenant"},
		{ID: "processes", Scope: ScopeFleet, Worst: Error, run: checkProcesses,
			Looks: "Each cell that has tenants, or is the default one, has a process that is live and ready.",
			Fix:   "look at the reason that its processes give, and at their logs"},
		{ID: "provisioning", Scope: ScopeFleet, Worst: Warning, run: checkProvisioning,
			Looks: "No provisioned cell has failed to become what its spec says.",
			Fix:   "see cell cells status, remove the reason; the provisioner tries again by itself"},
		{ID: "stuck-moves", Scope: ScopeFleet, Worst: Error, run: checkStuck,
			Looks: "No tenant stands in a cut past its deadline, or longer than the grace in a step that only goes forward.",
			Fix:   "see cell moves show for what the step fails with; the directory goes on by itself once both cells answer"},
		{ID: "undo-windows", Scope: ScopeFleet, Worst: Warning, run: checkWindows,
			Looks: "No undo window is open past its end by more than the grace, and no rows of a move that is over wait longer for their removal.",
			Fix:   "close it with cell move close-window; rows are removed once the cell that has them answers"},
		{ID: "watch-lag", Scope: ScopeFleet, Worst: Error, run: checkLag,
			Looks: "Each router, and each process of a cell, sees the directory's present revision of the routes within the bound, and says itself that it watches and is not stale.",
			Fix:   "see whether it reaches the directory's channel listener, and its certificate; it serves by what it knew meanwhile"},
		{ID: "version-skew", Scope: ScopeFleet, Worst: Warning, run: checkSkew,
			Looks: "The processes of a cell run one version, and the one that the cell is pinned to, unless a rollout or an upgrade of it is under way.",
			Fix:   "finish it: cell cells upgrade, or restart the processes of the other version"},
		{ID: "default-share", Scope: ScopeFleet, Worst: Warning, run: checkDefaultShare,
			Looks: "How many tenants the default cell holds without a route, of all tenants. They cannot be moved or bounded, and everything unknown reaches that cell.",
			Fix:   "place them where they are: cell place TENANT --cell CELL"},
		{ID: "quota", Scope: ScopeFleet, Worst: Note, run: checkQuota,
			Looks: "Each cell that takes tenants has a bound on their number, and is not full unless it is closed.",
			Fix:   "bound it: cell cells set CELL --placements-max N; or close it"},
	}
}

func checkDirectory(ctx context.Context, x *exam) ([]Finding, error) {
	if _, err := x.cells(ctx); err != nil {
		if x.src.Fleet == nil || ctx.Err() != nil {
			return nil, err
		}
		return []Finding{{Message: "it cannot be asked: " + reason(err)}}, nil
	}
	return nil, nil
}

func checkLost(ctx context.Context, x *exam) (out []Finding, _ error) {
	routes, err := x.routes(ctx)
	if err != nil || len(routes) > 0 {
		return nil, err
	}
	ids, err := x.storeCells(ctx)
	errs := []error{err}
	for _, id := range ids {
		fences, err := x.fencesOf(ctx, id, false)
		errs = append(errs, err)
		n, first := 0, cells.TenantID("")
		for _, f := range fences {
			if f.Epoch > 0 {
				if n++; n == 1 {
					first = f.Tenant
				}
			}
		}
		if n > 0 {
			out = append(out, Finding{Cell: id, Message: fmt.Sprintf("the directory has no route of any tenant, and this cell's database has fences of %d that were placed by one, %s among them", n, first)})
		}
	}
	return out, errors.Join(errs...)
}

// checkClaims looks twice: a claim that is being made is counted before its route is there.
func checkClaims(ctx context.Context, x *exam) (out []Finding, _ error) {
	before, err := x.surplus(ctx)
	if err != nil || len(before) == 0 {
		return nil, err
	}
	if err := pause(ctx, time.Second); err != nil {
		return nil, err
	}
	after, err := x.surplus(ctx)
	if err != nil {
		return nil, err
	}
	for id, n := range after {
		if m, ok := before[id]; !ok || m != n {
			continue
		}
		f := Finding{Cell: id, Message: fmt.Sprintf("its quota counts %d tenants that have no route to it", n)}
		if n < 0 {
			f.Message = fmt.Sprintf("its quota leaves out %d tenants that have a route to it", -n)
		}
		out = append(out, f)
	}
	return out, nil
}

// surplus is by how much each cell's count differs from its routes.
func (x *exam) surplus(ctx context.Context) (map[cells.CellID]int64, error) {
	x.cellList = nil
	routes, err := x.routes(ctx)
	if err != nil {
		return nil, err
	}
	list, err := x.cells(ctx)
	if err != nil {
		return nil, err
	}
	// A tenant that moves, or is being removed, counts in either of its cells, or in both.
	moving := map[cells.TenantID][2]cells.CellID{}
	for _, state := range []api.MoveState{api.MovePreparing, api.MoveCutting, api.MoveCommitted} {
		q := client.MoveQuery{State: state, Limit: api.MaxPage}
		for {
			page, err := x.src.Fleet.Moves(ctx, q)
			if err != nil {
				return nil, fmt.Errorf("the directory: %w", err)
			}
			for _, m := range page.Moves {
				moving[m.Tenant] = [2]cells.CellID{m.From, m.To}
			}
			if page.Next == 0 {
				break
			}
			q.After = page.Next
		}
	}
	least, most := map[cells.CellID]int64{}, map[cells.CellID]int64{}
	for t, r := range routes {
		switch m, ok := moving[t]; {
		case ok:
			most[m[0]]++
			most[m[1]]++
		case r.MoveID != "":
			most[r.SourceCell]++
			most[r.TargetCell]++
		case r.State == cells.StateDeleting, r.State == cells.StateCommitting:
			most[r.CellID]++
		case r.Exists():
			least[r.CellID]++
			most[r.CellID]++
		}
	}
	n := map[cells.CellID]int64{}
	for _, c := range list {
		if k := c.Tenants - most[c.ID]; k > 0 {
			n[c.ID] = k
		} else if k := c.Tenants - least[c.ID]; k < 0 {
			n[c.ID] = k
		}
	}
	return n, nil
}

func checkHomeless(ctx context.Context, x *exam) (out []Finding, _ error) {
	routes, err := x.routes(ctx)
	if err != nil {
		return nil, err
	}
	list, err := x.cells(ctx)
	if err != nil {
		return nil, err
	}
	for t, r := range routes {
		if !r.Exists() {
			continue
		}
		i := slices.IndexFunc(list, func(c api.Cell) bool { return c.ID == r.CellID })
		switch {
		case i < 0:
			out = append(out, Finding{Cell: r.CellID, Tenant: t, Message: "its route names a cell that is not registered"})
		case list[i].State == api.CellRetiring:
			out = append(out, Finding{Cell: r.CellID, Tenant: t, Message: "its route names a cell that is being removed"})
		}
	}
	return out, nil
}

func checkProcesses(ctx context.Context, x *exam) (out []Finding, _ error) {
	list, err := x.cells(ctx)
	if err != nil {
		return nil, err
	}
	members, err := x.processes(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		ready, reasons := 0, []string{}
		for _, m := range members {
			switch {
			case m.Cell != c.ID:
			case m.Live && m.Ready:
				ready++
			case m.Live && !m.Replaced:
				reasons = append(reasons, fmt.Sprintf("%s: %s", m.Instance, m.Reason))
			}
		}
		why := "none is heard of"
		if len(reasons) > 0 {
			why = strings.Join(reasons, "; ")
		}
		switch {
		case ready == 0 && (c.Tenants > 0 || c.Default):
			out = append(out, Finding{Cell: c.ID, Message: fmt.Sprintf("it has %d tenants and no process that is ready: %s", c.Tenants, why)})
		case ready == 0 && c.Open():
			out = append(out, Finding{Severity: Warning, Cell: c.ID, Message: "it takes tenants and has no process that is ready: " + why})
		case len(reasons) > 0:
			out = append(out, Finding{Severity: Warning, Cell: c.ID, Message: "a process is not ready: " + why})
		}
	}
	return out, nil
}

func checkProvisioning(ctx context.Context, x *exam) (out []Finding, _ error) {
	cl, err := x.directory(ctx)
	if err != nil {
		return nil, err
	}
	list, err := cl.ProvisionedCells(ctx)
	if err != nil {
		if a := cells.AnswerOf(err); a != nil && a.Code == cells.CodeNotServed {
			return nil, nil
		}
		return nil, fmt.Errorf("the directory: %w", err)
	}
	for _, p := range list {
		if p.Status.Phase == provision.PhaseFailed {
			out = append(out, Finding{Cell: p.Spec.Cell, Message: "its provisioner has failed: " + p.Status.Message})
		}
	}
	return out, nil
}

func checkStuck(ctx context.Context, x *exam) (out []Finding, _ error) {
	routes, err := x.routes(ctx)
	if err != nil {
		return nil, err
	}
	now := x.o.Now()
	for t, r := range routes {
		cutting := r.State == cells.StateQuiescing || r.State == cells.StateDraining || r.State == cells.StateCopying
		forward := r.State == cells.StateCommitting || r.State == cells.StateDeleting
		switch {
		case cutting && !r.Deadline.IsZero() && now.After(r.Deadline.Add(x.o.Grace)):
			out = append(out, Finding{Cell: r.CellID, Tenant: t, Message: fmt.Sprintf("move %s is in its cut (%s), whose deadline has passed %s ago", r.MoveID, r.State, now.Sub(r.Deadline).Round(time.Second))})
		case forward && now.After(r.UpdatedAt.Add(x.o.Grace)):
			out = append(out, Finding{Cell: r.CellID, Tenant: t, Message: fmt.Sprintf("%s has stood in %s for %s", cmpOr(string(r.MoveID), "its removal"), r.State, now.Sub(r.UpdatedAt).Round(time.Second))})
		}
	}
	return out, nil
}

func cmpOr(move, other string) string {
	if move == "" {
		return other
	}
	return "move " + move
}

func checkWindows(ctx context.Context, x *exam) (out []Finding, _ error) {
	routes, err := x.routes(ctx)
	if err != nil {
		return nil, err
	}
	now := x.o.Now()
	for t, r := range routes {
		for _, e := range r.Residue {
			switch {
			case e.Move == r.MoveID:
			case e.Held() && now.After(e.Until.Add(x.o.Grace)):
				out = append(out, Finding{Cell: e.Cell, Tenant: t, Message: fmt.Sprintf("the undo window of move %s has ended %s ago and is open", e.Move, now.Sub(e.Until).Round(time.Second))})
			case !e.Held() && r.State == cells.StateActive && now.After(r.UpdatedAt.Add(x.o.Grace)):
				out = append(out, Finding{Cell: e.Cell, Tenant: t, Message: fmt.Sprintf("rows of move %s could be removed for %s and are not", e.Move, now.Sub(r.UpdatedAt).Round(time.Second))})
			}
		}
	}
	return out, nil
}

func checkSkew(ctx context.Context, x *exam) (out []Finding, _ error) {
	list, err := x.cells(ctx)
	if err != nil {
		return nil, err
	}
	members, err := x.processes(ctx)
	if err != nil {
		return nil, err
	}
	changing, err := x.changing(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		n := map[string]int{}
		for _, m := range members {
			if m.Cell == c.ID && m.Live && !m.Replaced {
				n[m.Version]++
			}
		}
		var have []string
		other := false
		for v, k := range n {
			have = append(have, fmt.Sprintf("%s (%d)", v, k))
			other = other || c.Version != "" && v != c.Version
		}
		slices.Sort(have)
		if len(n) < 2 && !other {
			continue
		}
		f := Finding{Cell: c.ID, Message: "its processes run " + strings.Join(have, " and ")}
		if other {
			f.Message += ", it is pinned to " + c.Version
		}
		if why := changing[c.ID]; why != "" {
			f.Severity, f.Message, f.Fix = Note, f.Message+"; "+why, "wait for its end"
		}
		out = append(out, f)
	}
	return out, nil
}

// changing says which cells' versions are being changed now.
func (x *exam) changing(ctx context.Context) (map[cells.CellID]string, error) {
	cl, err := x.directory(ctx)
	if err != nil {
		return nil, err
	}
	out := map[cells.CellID]string{}
	provisioned, err := cl.ProvisionedCells(ctx)
	if a := cells.AnswerOf(err); err != nil && (a == nil || a.Code != cells.CodeNotServed) {
		return nil, fmt.Errorf("the directory: %w", err)
	}
	for _, p := range provisioned {
		if p.Status.Phase == provision.PhaseUpgrading || p.Status.Phase == provision.PhaseProvisioning || p.Status.ObservedGeneration != p.Spec.Generation {
			out[p.Spec.Cell] = "an upgrade is under way"
		}
	}
	rollouts, err := cl.Rollouts(ctx, client.RolloutQuery{})
	if a := cells.AnswerOf(err); err != nil && (a == nil || a.Code != cells.CodeNotServed) {
		return nil, fmt.Errorf("the directory: %w", err)
	}
	for _, r := range rollouts.Rollouts {
		if !r.State.Final() {
			for _, id := range slices.Concat(r.Old, r.New) {
				out[id] = fmt.Sprintf("rollout %s is under way", r.ID)
			}
		}
	}
	return out, nil
}

func checkDefaultShare(ctx context.Context, x *exam) ([]Finding, error) {
	list, err := x.cells(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list, func(c api.Cell) bool { return c.Default })
	if i < 0 {
		return nil, nil
	}
	fences, err := x.fencesOf(ctx, list[i].ID, true)
	if err != nil {
		return nil, err
	}
	routes, err := x.routes(ctx)
	if err != nil {
		return nil, err
	}
	unplaced, placed := 0, 0
	for _, f := range fences {
		if _, ok := routes[f.Tenant]; !ok && f.Open {
			unplaced++
		}
	}
	for _, r := range routes {
		if r.Exists() {
			placed++
		}
	}
	if unplaced == 0 || float64(unplaced) < x.o.DefaultShare*float64(placed+unplaced) {
		return nil, nil
	}
	return []Finding{{Cell: list[i].ID, Message: fmt.Sprintf("it serves %d of %d tenants without a route (%.0f %%)", unplaced, placed+unplaced, 100*float64(unplaced)/float64(placed+unplaced))}}, nil
}

func checkQuota(ctx context.Context, x *exam) (out []Finding, _ error) {
	list, err := x.cells(ctx)
	for _, c := range list {
		switch {
		case !c.Open():
		case c.PlacementsMax == nil:
			out = append(out, Finding{Cell: c.ID, Message: fmt.Sprintf("it has %d tenants and no bound on their number", c.Tenants)})
		case c.Full():
			out = append(out, Finding{Severity: Warning, Cell: c.ID, Message: fmt.Sprintf("it is full: %d of %d tenants", c.Tenants, *c.PlacementsMax), Fix: "raise the bound, move tenants away, or close it"})
		}
	}
	return out, err
}

// pause waits, or returns why the context has ended.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
