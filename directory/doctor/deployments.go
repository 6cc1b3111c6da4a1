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
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

func deploymentChecks() []Check {
	return []Check{
		{ID: "deployments", Scope: ScopeDeployments, Worst: Error, run: checkView,
			Looks: "The directory of deployments can be read, and no cell has been attaching for longer than the grace.",
			Fix:   "run cell attach again: it goes on where it stopped"},
		{ID: "deployment-routers", Scope: ScopeDeployments, Worst: Error, run: checkRouterTables,
			Looks: "Each router goes by the directory's present table of cells, finds no problem in it, and keeps it on shared storage.",
			Fix:   "see why it cannot read the directory, or write its snapshot"},
		{ID: "overlap", Scope: ScopeDeployments, Worst: Error, run: checkOverlap,
			Looks: "No two cells share a host, issuer, OIDC client, configured tenant, tenant pattern, deployment id, bucket prefix, root secret or router credential.",
			Fix:   "change one of the cells: cell update --config"},
		{ID: "scim", Scope: ScopeDeployments, Worst: Warning, run: checkSCIM,
			Looks: "SCIM is on in each cell or in none: where it is off, people who were removed stay.",
			Fix:   "turn it on in the cells that lack it, by cell update --config"},
		{ID: "placements", Scope: ScopeDeployments, Worst: Warning, run: checkPlacements,
			Looks: "Each cell that takes tenants has a bound on their number and has not reached it.",
			Fix:   "cell limit --cell CELL --placements-max N"},
		{ID: "configured-tenants", Scope: ScopeDeployments, Worst: Error, run: checkConfigured,
			Looks: "The tenants that a cell's configuration names are placed in it.",
			Fix:   "place them, or take them out of the configuration: cell place, cell update --config"},
		{ID: "pending-changes", Scope: ScopeDeployments, Worst: Note, run: checkPending,
			Looks: "No cell has a second configuration or a second credential that nobody has finished or dropped.",
			Fix:   "finish or drop it: cell update or cell credential, --finish or --revert"},
	}
}

// table reads the directory of deployments once.
func (x *exam) table(ctx context.Context) (deploy.View, error) {
	if x.view != nil {
		return *x.view, nil
	}
	if x.src.Deployments == nil {
		return deploy.View{}, fmt.Errorf("the directory of deployments is %w", errNotGiven)
	}
	v, err := x.src.Deployments.Read(ctx)
	if err != nil {
		return v, fmt.Errorf("the directory of deployments: %w", err)
	}
	x.view = &v
	return v, nil
}

// placed reads where all tenants are placed.
func (x *exam) placed(ctx context.Context) (map[cells.TenantID]cells.CellID, error) {
	all, err := x.placements(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[cells.TenantID]cells.CellID, len(all))
	for t, p := range all {
		out[t] = p.Cell
	}
	return out, nil
}

func (x *exam) placements(ctx context.Context) (map[cells.TenantID]deploy.Placement, error) {
	if x.src.Deployments == nil {
		return nil, fmt.Errorf("the directory of deployments is %w", errNotGiven)
	}
	out := map[cells.TenantID]deploy.Placement{}
	f := deploy.PlacementFilter{Limit: api.MaxPage}
	for {
		page, err := x.src.Deployments.Placements(ctx, f)
		if err != nil {
			return nil, fmt.Errorf("the directory of deployments: %w", err)
		}
		for _, p := range page {
			out[p.Tenant] = p
		}
		if len(page) < f.Limit {
			return out, nil
		}
		f.After = page[len(page)-1].Tenant
	}
}

func checkView(ctx context.Context, x *exam) (out []Finding, _ error) {
	v, err := x.table(ctx)
	for _, c := range v.Cells {
		if c.State == deploy.Attaching && !c.AttachStartedAt.IsZero() && x.o.Now().After(c.AttachStartedAt.Add(x.o.Grace)) {
			out = append(out, Finding{Severity: Warning, Cell: c.Name, Message: "its attach began at " + c.AttachStartedAt.UTC().Format(time.RFC3339) + " and is not over"})
		}
	}
	return out, err
}

func checkRouterTables(ctx context.Context, x *exam) (out []Finding, _ error) {
	for _, r := range x.src.Routers {
		s, err := askRouter(ctx, r)
		say := func(s Severity, format string, args ...any) {
			out = append(out, Finding{Severity: s, Message: "router " + r.Name + " " + fmt.Sprintf(format, args...)})
		}
		switch {
		case err != nil:
			say(Error, "cannot be asked: %s", reason(err))
			continue
		case s.Cells == nil:
			continue
		case !s.Cells.Known:
			say(Error, "knows no table of cells (%s)", s.Cells.LastError)
		case s.Cells.Stale || s.Cells.Age > max(x.o.Grace, time.Minute):
			say(Error, "goes by a table of %s ago, from the %s (%s)", s.Cells.Age.Round(time.Millisecond), s.Cells.Source, s.Cells.LastError)
		}
		for _, p := range s.Cells.Problems {
			say(Error, "finds in the table: %s", p)
		}
		if s.Cells.Snapshot != "" {
			say(Warning, "keeps no snapshot: %s", s.Cells.Snapshot)
		}
	}
	return out, nil
}

func checkOverlap(ctx context.Context, x *exam) (out []Finding, _ error) {
	v, err := x.table(ctx)
	for i := range v.Cells {
		for j := range v.Cells[:i] {
			if err := deploy.Overlap(&v.Cells[i], &v.Cells[j]); err != nil {
				out = append(out, Finding{Cell: v.Cells[i].Name, Message: strings.TrimPrefix(err.Error(), cells.ErrConflict.Error()+": ")})
			}
		}
	}
	return out, err
}

func checkSCIM(ctx context.Context, x *exam) (out []Finding, _ error) {
	v, err := x.table(ctx)
	on := func(c deploy.Cell) bool { return len(c.Get(tenancy.FieldSCIM)) > 0 }
	i := slices.IndexFunc(v.Cells, on)
	if i < 0 {
		return nil, err
	}
	for _, c := range v.Cells {
		if c.Current != nil && !on(c) {
			out = append(out, Finding{Cell: c.Name, Message: fmt.Sprintf("SCIM is off, and on in %s", v.Cells[i].Name)})
		}
	}
	return out, err
}

func checkPlacements(ctx context.Context, x *exam) (out []Finding, _ error) {
	v, err := x.table(ctx)
	for _, c := range v.Cells {
		switch {
		case c.Closed:
		case c.PlacementsMax == nil:
			out = append(out, Finding{Cell: c.Name, Message: fmt.Sprintf("it has %d tenants and no bound on their number", c.Placements)})
		case c.Placements >= *c.PlacementsMax:
			out = append(out, Finding{Cell: c.Name, Message: fmt.Sprintf("it is full: %d of %d tenants", c.Placements, *c.PlacementsMax), Fix: "raise the bound, or close it: cell limit"})
		}
	}
	return out, err
}

func checkConfigured(ctx context.Context, x *exam) (out []Finding, _ error) {
	v, err := x.table(ctx)
	if err != nil {
		return nil, err
	}
	placed, err := x.placed(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range v.Cells {
		if c.State != deploy.Serving {
			continue
		}
		for _, t := range c.Get(tenancy.FieldTenants) {
			if at := placed[cells.TenantID(t)]; at != c.Name {
				where := "nowhere"
				if at != "" {
					where = "in " + string(at)
				}
				out = append(out, Finding{Cell: c.Name, Tenant: cells.TenantID(t), Message: "its configuration names the tenant, which is placed " + where})
			}
		}
	}
	return out, nil
}

func checkPending(ctx context.Context, x *exam) (out []Finding, _ error) {
	v, err := x.table(ctx)
	for _, c := range v.Cells {
		if c.Next != nil {
			out = append(out, Finding{Cell: c.Name, Message: "a change of its configuration is not finished"})
		}
		if c.NextHash != "" {
			out = append(out, Finding{Cell: c.Name, Message: "a rotation of its credential is not finished"})
		}
	}
	return out, err
}

// eachCell runs f for the tenancy rows of each registered cell.
func (x *exam) eachCell(ctx context.Context, f func(c deploy.Cell, s tenancy.Store) ([]Finding, error)) (out []Finding, _ error) {
	v, err := x.table(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, c := range v.Cells {
		o, err := x.store(ctx, c.Name)
		switch {
		case err != nil:
			errs = append(errs, err)
			continue
		case o.rows == nil:
			errs = append(errs, fmt.Errorf("cell %s: its database is no Postgres", c.Name))
			continue
		}
		found, err := f(c, o.rows)
		if err != nil {
			errs = append(errs, fmt.Errorf("cell %s: %w", c.Name, err))
		}
		for i := range found {
			found[i].Cell = c.Name
		}
		out = append(out, found...)
	}
	return out, errors.Join(errs...)
}
