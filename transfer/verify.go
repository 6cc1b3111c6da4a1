// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
)

// align brings the import to the view's position exactly, and fetches what the
// changes could not carry.
func align(ctx context.Context, imp Import, view View) error {
	st := imp.State()
	if len(st.Tables) == 0 {
		if err := imp.Skip(ctx, view.Position()); err != nil {
			return err
		}
	} else {
		var n int64
		err := view.Changes(ctx, st.Applied, func(b Batch) error {
			if err := imp.Apply(ctx, b); err != nil {
				return err
			}
			if n += b.Count; !b.End || n < applyRows && b.Upto != view.Position() {
				return nil
			}
			n = 0
			return imp.Commit(ctx)
		})
		if err == nil {
			err = imp.Commit(ctx)
		}
		if err != nil {
			imp.Abort()
			return err
		}
		if got := imp.State().Applied; got != view.Position() {
			return fmt.Errorf("transfer: changes ended at %s, the view is at %s", got, view.Position())
		}
	}
	return fill(ctx, imp, view)
}

// fill fetches the rows that are missing, at the view's position.
func fill(ctx context.Context, imp Import, view View) error {
	sets, err := imp.Missing(ctx)
	if err != nil {
		return err
	}
	for _, s := range sets {
		var rows []Batch
		if err := view.Fetch(ctx, s, func(b Batch) error { rows = append(rows, b); return nil }); err != nil {
			return err
		}
		if err := imp.Fill(ctx, s, rows); err != nil {
			return err
		}
	}
	return nil
}

// compare digests the sets on both sides at once, and returns what was compared. The
// import is at the view's position.
func compare(ctx context.Context, m cells.MoveRef, imp Import, view View, sets []KeySet) ([]cells.Comparison, error) {
	if len(sets) == 0 {
		return nil, nil
	}
	ours, theirs, err := digestBoth(ctx, imp, view, sets)
	if err != nil {
		return nil, err
	}
	for i, s := range sets {
		if theirs[i] == ours[i] {
			continue
		}
		what := "the whole table"
		if !s.All {
			what = fmt.Sprintf("%d changed keys", s.Count)
		}
		return nil, fmt.Errorf("%w: table %s of tenant %s, %s at position %s: %d rows with digest %s at %s, %d rows with digest %s at %s; "+
			"nothing was committed: roll the move back, look for writers at %s that bypass the guard and for triggers there, then move again",
			ErrMismatch, s.Table, m.Tenant, what, view.Position(), theirs[i].Rows, theirs[i].Sum, m.Source, ours[i].Rows, ours[i].Sum, m.Target, m.Target)
	}
	return fold(string(view.Position()), sets, ours), nil
}

// whole names all rows of the tables.
func whole(tables []TableInfo) []KeySet {
	sets := make([]KeySet, len(tables))
	for i, t := range tables {
		sets[i] = KeySet{Table: t.Name, All: true}
	}
	return sets
}

func keyCount(sets []KeySet) (n int64) {
	for _, s := range sets {
		n += s.Count
	}
	return n
}
