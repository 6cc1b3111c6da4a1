// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/transfer"
)

func storeChecks() []Check {
	return []Check{
		{ID: "leftover-slots", Scope: ScopeFleet, Worst: Error, run: checkSlots,
			Looks: "Each Postgres of a cell has no replication slot and no publication of a move that its own tables do not account for. A slot keeps the server's log for ever.",
			Fix:   "drop it: SELECT pg_drop_replication_slot(name), DROP PUBLICATION name"},
		{ID: "leftover-captures", Scope: ScopeFleet, Worst: Warning, run: checkCaptures,
			Looks: "Each capture and each import in a cell's database belongs to a move that is under way, to an undo window that is open, or to rows that are still to be removed.",
			Fix:   "the cell's processes free what moves have left within minutes; if not, look into their logs"},
	}
}

func checkSlots(ctx context.Context, x *exam) (out []Finding, _ error) {
	ids, err := x.storeCells(ctx)
	if len(x.src.Stores) > 0 {
		err = nil // what was given is what is looked at
	}
	errs := []error{err}
	for _, id := range ids {
		o, err := x.store(ctx, id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		first, err := o.leftovers(ctx)
		if err == nil && len(first.Slots)+len(first.Publications) > 0 {
			// A slot that is being made or dropped is seen without its row for a moment.
			if err = pause(ctx, 500*time.Millisecond); err == nil {
				var second transfer.Leftovers
				second, err = o.leftovers(ctx)
				first = both(first, second)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("cell %s: %w", id, err))
			continue
		}
		for _, s := range first.Slots {
			out = append(out, Finding{Cell: id, Message: fmt.Sprintf("the slot %s belongs to no move and keeps %d MiB of the server's log", s.Name, s.Retained>>20),
				Fix: fmt.Sprintf("in its database: SELECT pg_drop_replication_slot('%s')", s.Name)})
		}
		for _, p := range first.Publications {
			out = append(out, Finding{Severity: Warning, Cell: id, Message: fmt.Sprintf("the publication %s belongs to no move", p), Fix: fmt.Sprintf("in its database: DROP PUBLICATION %s", p)})
		}
	}
	return out, errors.Join(errs...)
}

// both keeps the slots and publications that were there both times.
func both(a, b transfer.Leftovers) (out transfer.Leftovers) {
	there := map[string]bool{}
	for _, s := range a.Slots {
		there[s.Name] = true
	}
	for _, p := range a.Publications {
		there["p "+p] = true
	}
	for _, s := range b.Slots {
		if there[s.Name] {
			out.Slots = append(out.Slots, s)
		}
	}
	for _, p := range b.Publications {
		if there["p "+p] {
			out.Publications = append(out.Publications, p)
		}
	}
	return out
}

func checkCaptures(ctx context.Context, x *exam) (out []Finding, _ error) {
	ids, err := x.storeCells(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, id := range ids {
		o, err := x.store(ctx, id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		left, err := o.leftovers(ctx)
		if err != nil {
			errs = append(errs, fmt.Errorf("cell %s: %w", id, err))
			continue
		}
		if len(left.Kept) == 0 {
			continue
		}
		routes, err := x.routes(ctx)
		if err != nil {
			return out, err
		}
		for _, k := range left.Kept {
			m, known, err := x.move(ctx, k.Move)
			if err != nil {
				return out, err
			}
			if why := x.judgeKept(k, m, known, routes[k.Tenant]); why != "" {
				kind := "capture"
				if k.Import {
					kind = "import"
				}
				out = append(out, Finding{Cell: id, Tenant: k.Tenant, Message: fmt.Sprintf("the %s of move %s is kept: %s", kind, k.Move, why)})
			}
		}
	}
	return out, errors.Join(errs...)
}

// judgeKept says why nobody needs what is kept for a move, or "".
func (x *exam) judgeKept(k transfer.Kept, m api.Move, known bool, r cells.TenantRoute) string {
	now := x.o.Now()
	for _, e := range r.Residue {
		if e.Move == k.Move || e.Undoes == k.Move {
			return "" // checked as an undo window, or as rows that are not removed
		}
	}
	switch {
	case r.MoveID == k.Move || r.Undoes != "" && r.Undoes == k.Move:
		return ""
	case !known && (k.At.IsZero() || now.After(k.At.Add(x.o.Grace))):
		return "the directory knows of no such move"
	case !known || !m.State.Final() || len(m.Residue) > 0:
		return ""
	case now.Before(m.UpdatedAt.Add(x.o.Grace)):
		return ""
	}
	return fmt.Sprintf("the move is over (%s) since %s", m.State, m.UpdatedAt.UTC().Format(time.RFC3339))
}
