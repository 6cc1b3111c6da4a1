// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	storespg "github.com/cloister-dev/cloister/member/stores/postgres"
)

func cellChecks() []Check {
	return []Check{
		{ID: "cell-state", Scope: ScopeDeployments, Worst: Error, run: checkState,
			Looks: "Each registered cell's own rows (first, mode, own) are complete and name it: open is a database from before its prepare, partial a row that was removed.",
			Fix:   "after a restore: cell restore; otherwise run cell prepare again, which writes missing rows back"},
		{ID: "cell-stores", Scope: ScopeDeployments, Worst: Error, run: checkStores,
			Looks: "Each cell's Postgres carries the deployment id that the directory records for the cell.",
			Fix:   "give the cell its own database back; it is another cell's, or one of another deployment"},
		{ID: "cell-mode", Scope: ScopeDeployments, Worst: Error, run: checkMode,
			Looks: "Each cell's mode is the one that the directory records: a lower one is a restore to before its attach.",
			Fix:   "cell restore; or run cell attach again, if it has stopped"},
		{ID: "cell-fingerprint", Scope: ScopeDeployments, Worst: Error, run: checkOwnRow,
			Looks: "Each cell's own row holds the configurations that the directory records for it.",
			Fix:   "run cell update --finish or --revert, or cell prepare, again: they write the row from the directory"},
		{ID: "cell-processes", Scope: ScopeDeployments, Worst: Error, run: checkBeats,
			Looks: "Each live process of a cell runs with its name, has a configuration that the cell accepts, has read its mode, and is not gated; all run one build.",
			Fix:   "set CELL and the configuration as in the cell's other processes, and start it again"},
		{ID: "cell-settings", Scope: ScopeDeployments, Worst: Warning, run: checkSettings,
			Looks: "The run-time settings that live processes report are the same in all cells, and in all processes of a cell.",
			Fix:   "give the processes the same settings, unless the difference is meant; a build that does not report them is left out"},
		{ID: "cell-tenants", Scope: ScopeDeployments, Worst: Error, run: checkHeld,
			Looks: "Each cell holds exactly the tenants that the directory places in it.",
			Fix:   "a row without a placement was written by a script, or comes with a copied database; a placement without a row comes back by cell restore, or with the tenant's next request"},
		{ID: "cell-unheld", Scope: ScopeDeployments, Worst: Error, run: checkUnheld,
			Looks: "No table of a cell has rows of a tenant that the cell does not hold. While a first cell records, attach will place them.",
			Fix:   "find out which script or build wrote them; move them to the tenant's cell, or delete them"},
		{ID: "cell-recorded", Scope: ScopeDeployments, Worst: Note, run: checkRecorded,
			Looks: "While a first cell records: which tenants it has recorded that have no data. Attach will place them.",
			Fix:   "remove what nobody needs before cell attach"},
		{ID: "cell-triggers", Scope: ScopeDeployments, Worst: Error, run: checkTriggers,
			Looks: "The triggers of the first row and of each table with a tenant column are there, enabled and unaltered.",
			Fix:   "restart a process of the cell: a start puts them in order; a partitioned table gets none itself, its partitions do"},
	}
}

func checkState(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) (out []Finding, _ error) {
		r, err := s.Read(ctx)
		if err != nil {
			return nil, err
		}
		say := func(format string, args ...any) { out = append(out, Finding{Message: fmt.Sprintf(format, args...)}) }
		switch r.State() {
		case tenancy.StateOpen:
			say("it has no rows of its own: its processes without CELL serve every tenant")
		case tenancy.StatePartial:
			say("its own rows are incomplete, every process is gated; missing: %s", strings.Join(r.Missing(), ", "))
		}
		if r.First != nil && (r.First.Cell != c.Name || r.First.First != c.First) {
			say("its first row says cell %s, first %t; the directory says cell %s, first %t", r.First.Cell, r.First.First, c.Name, c.First)
		}
		if odd := r.Odd(); odd != "" {
			say("%s", odd)
		}
		return out, nil
	})
}

func checkStores(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, _ tenancy.Store) ([]Finding, error) {
		o, err := x.store(ctx, c.Name)
		if err != nil {
			return nil, err
		}
		// Opening the store would make the table.
		var there bool
		if err := o.db.QueryRowContext(ctx, "SELECT to_regclass('cell_stores.reserved') IS NOT NULL").Scan(&there); err != nil {
			return nil, err
		}
		if !there {
			return []Finding{{Message: "its database carries no deployment id"}}, nil
		}
		s, err := storespg.Open(ctx, storespg.Config{URL: o.address})
		if err != nil {
			return nil, err
		}
		defer s.Close()
		id, err := s.Identity(ctx)
		if err != nil || string(id.Deployment) == c.DeploymentID {
			return nil, err
		}
		return []Finding{{Message: fmt.Sprintf("its database carries the deployment id %q, the directory records %s", id.Deployment, c.DeploymentID)}}, nil
	})
}

func checkMode(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) ([]Finding, error) {
		r, err := s.Read(ctx)
		if err != nil || r.Mode == "" || r.Mode == c.Mode {
			return nil, err
		}
		if r.Mode == tenancy.Recording && c.State == deploy.Attaching {
			return []Finding{{Severity: Warning, Message: "its mode is recording and the directory has recorded enforced: its attach is under way, or has stopped"}}, nil
		}
		return []Finding{{Message: fmt.Sprintf("its mode is %s, the directory records %s", r.Mode, c.Mode)}}, nil
	})
}

func same(a, b *tenancy.Fingerprint) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Equal(*b)
}

func checkOwnRow(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) ([]Finding, error) {
		r, err := s.Read(ctx)
		if err != nil || r.Self == nil || c.Current == nil {
			return nil, err
		}
		if same(r.Self.Current, c.Current) && same(r.Self.Next, c.Next) {
			return nil, nil
		}
		var fields []string
		if r.Self.Current != nil {
			fields = append(fields, r.Self.Current.Differs(*c.Current)...)
		}
		msg := "its own row is not what the directory records"
		if len(fields) > 0 {
			msg += ", in " + strings.Join(fields, ", ")
		}
		return []Finding{{Message: msg}}, nil
	})
}

// beatAge is how old a heartbeat of a live process may be.
const beatAge = time.Minute

func checkBeats(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) (out []Finding, _ error) {
		beats, err := s.Heartbeats(ctx, beatAge)
		if err != nil {
			return nil, err
		}
		r, err := s.Read(ctx)
		if err != nil {
			return nil, err
		}
		builds := map[string]bool{}
		for _, h := range beats {
			say := func(sev Severity, format string, args ...any) {
				out = append(out, Finding{Severity: sev, Message: "process " + h.Instance + " " + fmt.Sprintf(format, args...)})
			}
			builds[h.Build] = true
			switch {
			case h.Cell == "" && r.EffectiveMode() == tenancy.Recording:
				say(Warning, "runs without CELL; attach waits for it")
			case h.Cell == "":
				say(Error, "runs without CELL")
			case h.Cell != c.Name:
				say(Error, "runs as cell %s", h.Cell)
			case h.Fingerprint != nil && c.Current != nil && !c.Accepts(*h.Fingerprint):
				say(Error, "has a configuration that is neither of the cell's, in %s", strings.Join(h.Fingerprint.Differs(*c.Current), ", "))
			case h.Gated != "":
				say(Error, "serves nothing: %s", h.Gated)
			}
		}
		if len(beats) == 0 {
			out = append(out, Finding{Severity: Warning, Message: "no process of it lives", Fix: "start one"})
		}
		if len(builds) > 1 {
			out = append(out, Finding{Severity: Warning, Message: fmt.Sprintf("its processes run %d builds", len(builds)), Fix: "finish the rollout"})
		}
		return out, nil
	})
}

func checkHeld(ctx context.Context, x *exam) ([]Finding, error) {
	placed, err := x.placed(ctx)
	if err != nil {
		return nil, err
	}
	found, err := x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) (out []Finding, _ error) {
		r, err := s.Read(ctx)
		if err != nil || r.EffectiveMode() == tenancy.Recording && c.Mode == tenancy.Recording {
			return nil, err // what it records is placed by its attach
		}
		held, err := s.Tenants(ctx)
		if err != nil {
			return nil, err
		}
		has := map[cells.TenantID]bool{}
		for _, t := range held {
			has[t] = true
			if at := placed[t]; at == "" {
				out = append(out, Finding{Tenant: t, Message: "it holds a tenant that the directory places nowhere"})
			} else if at != c.Name {
				out = append(out, Finding{Tenant: t, Message: fmt.Sprintf("it holds a tenant that the directory places in %s", at)})
			}
		}
		for t, at := range placed {
			if at == c.Name && !has[t] {
				out = append(out, Finding{Severity: Warning, Tenant: t, Message: "it does not hold a tenant that the directory places in it"})
			}
		}
		return out, nil
	})
	if len(found) == 0 {
		return nil, err
	}
	// What was placed or held between the two reads is no finding.
	again, perr := x.placed(ctx)
	if perr != nil {
		return nil, perr
	}
	kept := found[:0]
	for _, f := range found {
		if again[f.Tenant] == placed[f.Tenant] {
			kept = append(kept, f)
		}
	}
	return kept, err
}

func checkUnheld(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) (out []Finding, _ error) {
		r, err := s.Read(ctx)
		if err != nil {
			return nil, err
		}
		list, err := s.Unheld(ctx)
		var placed map[cells.TenantID]deploy.Placement
		if x.view != nil && x.view.Kind == deploy.Movable && len(list) > 0 && err == nil {
			placed, err = x.placements(ctx)
		}
		for _, u := range list {
			f := Finding{Tenant: cells.TenantID(u.Tenant), Message: "it has rows of a tenant that it does not hold, in " + strings.Join(u.Tables, ", ")}
			if r.EffectiveMode() == tenancy.Recording && c.Mode == tenancy.Recording {
				f.Severity, f.Fix = Note, "none: attach places it"
			}
			switch p := placed[f.Tenant]; {
			case p.MovingTo == c.Name:
				f.Severity, f.Fix = Note, "none: move "+string(p.MovingBy)+" is bringing it here"
			case p.Epoch > 0 && p.Cell != c.Name:
				f.Severity, f.Fix = Note, "none: it has moved to "+string(p.Cell)+", and its rows are removed when that cannot be undone any more"
			}
			out = append(out, f)
		}
		return out, err
	})
}

func checkRecorded(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(_ deploy.Cell, s tenancy.Store) (out []Finding, _ error) {
		r, err := s.Read(ctx)
		if err != nil || r.EffectiveMode() != tenancy.Recording {
			return nil, err
		}
		list, err := s.Empty(ctx)
		for _, t := range list {
			out = append(out, Finding{Tenant: t, Message: "it was recorded and has no data"})
		}
		return out, err
	})
}

func checkTriggers(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(_ deploy.Cell, s tenancy.Store) (out []Finding, _ error) {
		list, err := s.TriggerDefects(ctx)
		for _, d := range list {
			f := Finding{Message: fmt.Sprintf("table %s: trigger %s: %s", d.Table, d.Trigger, d.What)}
			if d.What == tenancy.DefectUnsupported {
				f.Severity, f.Message = Warning, fmt.Sprintf("table %s is partitioned or foreign: it gets no trigger", d.Table)
			}
			out = append(out, f)
		}
		return out, err
	})
}
