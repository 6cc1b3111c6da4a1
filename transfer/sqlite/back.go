// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// What a row of cell_transfer_capture is for.
const (
	roleMove     = 0 // a move out of here
	roleBack     = 1 // the way back of a move to here; start is fixed
	roleAdopted  = 2 // a way back that an undo goes on with: a move out of here, too
	roleRemoving = 4 // the rows that the move left here are being removed
)

// wayBack reads a way back and checks that it has missed nothing.
func (s *Store) wayBack(ctx context.Context, tx *sql.Tx, move cells.MoveID, role int) (start uint64, err error) {
	var have int
	var released bool
	var shape, ended string
	err = tx.QueryRowContext(ctx, "SELECT start, role, released, shape, ended FROM cell_transfer_capture WHERE move = ?", move).Scan(&start, &have, &released, &shape, &ended)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return 0, lost(move, "nothing is captured")
	case err != nil:
		return 0, err
	case released || have != role:
		return 0, lost(move, "the capture was ended")
	case ended != "":
		return 0, lost(move, ended)
	}
	if err := s.unchanged(ctx, tx, shape, cells.MoveRef{ID: move}); errors.Is(err, transfer.ErrSchemaChanged) {
		return 0, lost(move, err.Error())
	} else if err != nil {
		return 0, err
	}
	return start, nil
}

func lost(move cells.MoveID, why string) error {
	return fmt.Errorf("%w: transfer/sqlite: move %s: %s", cells.ErrReturnLost, move, why)
}

// Kept implements transfer.Source.
func (s *Store) Kept(ctx context.Context, m cells.MoveRef) (pos transfer.Position, err error) {
	err = s.reading(ctx, func(tx *sql.Tx) error {
		start, err := s.wayBack(ctx, tx, m.ID, roleBack)
		pos = transfer.MakePosition(start)
		return err
	})
	return pos, err
}

// Adopt implements transfer.Source.
func (s *Store) Adopt(ctx context.Context, m cells.MoveRef) (pos transfer.Position, err error) {
	err = s.tx(ctx, func(tx *sql.Tx) error {
		start, err := s.wayBack(ctx, tx, m.ID, roleAdopted)
		if errors.Is(err, cells.ErrReturnLost) {
			var known bool
			if qerr := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE move = ?)", m.ID).Scan(&known); qerr != nil || known {
				return errors.Join(qerr, err)
			}
			if start, err = s.wayBack(ctx, tx, m.Undoes, roleBack); err == nil {
				_, err = tx.ExecContext(ctx, "UPDATE cell_transfer_capture SET move = ?, base = ?, role = ? WHERE move = ?", m.ID, int64(m.Base), roleAdopted, m.Undoes)
			}
		}
		pos = transfer.MakePosition(start)
		return err
	})
	return pos, err
}

// fix makes what is captured since now the way back of the move that is being
// finished: nothing of the tenant is written until the fence is opened.
func (s *Store) fix(ctx context.Context, tx *sql.Tx, move cells.MoveID) error {
	start, err := head(ctx, tx)
	if err != nil {
		return err
	}
	r, err := tx.ExecContext(ctx, "UPDATE cell_transfer_capture SET start = ?, role = ? WHERE move = ? AND released = 0", start, roleBack, move)
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err != nil || n != 1 {
		return errors.Join(err, fmt.Errorf("%w: transfer/sqlite: no way back of move %s was begun; prepare the move again", cells.ErrNotApplicable, move))
	}
	return nil
}

// ImportBack implements transfer.Sink.
func (s *Store) ImportBack(ctx context.Context, m cells.MoveRef, start transfer.Position) (transfer.Import, error) {
	i := &imp{s: s, m: m}
	var err error
	if i.lock, err = lockTenant(ctx, s.cfg.Path, m.Tenant); err != nil {
		return nil, err
	}
	err = s.admitted(ctx, m.Tenant, m.CloseEpoch(), m.ID, func(tx *sql.Tx) error {
		var released bool
		if i.tables, err = s.usables(ctx, tx); err != nil {
			return err
		}
		err := tx.QueryRowContext(ctx, "SELECT released FROM cell_transfer_capture WHERE move = ? AND tenant = ? AND role IN (?, ?)", m.ID, m.Tenant, roleMove, roleAdopted).Scan(&released)
		if errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("%w: transfer/sqlite: the rows of tenant %s here are not (any more) those that move %s left", cells.ErrStaleOrder, m.Tenant, m.ID)
		}
		if err == nil && !released {
			err = s.release(ctx, tx, m.ID)
		}
		if err != nil {
			return err
		}
		first, err := json.Marshal(i.base(start))
		if err != nil {
			return err
		}
		return i.enter(ctx, tx, string(first))
	})
	if err == nil && i.state.Start != start {
		err = lost(m.ID, fmt.Sprintf("it begins at %s now, and began at %s", start, i.state.Start))
	}
	if err != nil {
		i.lock.unlock()
		return nil, translate(err)
	}
	return i, nil
}

// base is the state of an import whose rows are here already, as the source had
// them at start. "" is a position that is not known yet.
func (i *imp) base(start transfer.Position) transfer.State {
	st := transfer.State{Start: start, Applied: start, Verified: start, Copied: true, Tables: map[string]transfer.TableState{}}
	for name := range i.tables {
		st.Tables[name] = transfer.TableState{Done: true}
	}
	return st
}

// enter makes the import this process's, in the state in which it is, or in the
// given one if there is none.
func (i *imp) enter(ctx context.Context, tx *sql.Tx, first string) error {
	if _, err := tx.ExecContext(ctx, `INSERT INTO cell_transfer_import (move, tenant, base, gen, state) VALUES (?, ?, ?, 1, ?)
		ON CONFLICT (move) DO UPDATE SET gen = gen + 1`, i.m.ID, i.m.Tenant, int64(i.m.Base), first); err != nil {
		return err
	}
	var state []byte
	if err := tx.QueryRowContext(ctx, "SELECT gen, state FROM cell_transfer_import WHERE move = ?", i.m.ID).Scan(&i.gen, &state); err != nil {
		return err
	}
	if err := json.Unmarshal(state, &i.state); err != nil {
		return err
	}
	return i.begin(ctx, tx)
}

// inherit makes what the way back of the move that is undone has brought the
// beginning of this import. It returns the state to begin with if there was none.
func (i *imp) inherit(ctx context.Context, tx *sql.Tx) (first string, err error) {
	none := "{}"
	if i.m.Undoes == "" {
		return none, nil
	}
	var known bool
	if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_import WHERE move = ?)", i.m.ID).Scan(&known); err != nil || known {
		return none, err
	}
	r, err := tx.ExecContext(ctx, "UPDATE cell_transfer_import SET move = ?, base = ? WHERE move = ? AND tenant = ?", i.m.ID, int64(i.m.Base), i.m.Undoes, i.m.Tenant)
	if err != nil {
		return none, err
	}
	if n, err := r.RowsAffected(); err != nil || n > 0 {
		if err == nil {
			_, err = tx.ExecContext(ctx, "UPDATE cell_transfer_touched SET move = ? WHERE move = ?", i.m.ID, i.m.Undoes)
		}
		return none, err
	}
	if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE move = ? AND tenant = ? AND role IN (?, ?))",
		i.m.Undoes, i.m.Tenant, roleMove, roleAdopted).Scan(&known); err != nil || !known {
		return none, err
	}
	b, err := json.Marshal(i.base(""))
	return string(b), err
}

func (i *imp) Adopt(ctx context.Context, start transfer.Position) error {
	return i.tx(ctx, func(_ *sql.Tx, st *transfer.State) error {
		if i.m.Undoes == "" || st.Start != "" || !st.Copied {
			return fmt.Errorf("%w: transfer/sqlite: the import of move %s has found no rows of its own", cells.ErrNotApplicable, i.m.ID)
		}
		shape := st.Shape
		*st = i.base(start)
		st.Shape = shape
		return nil
	})
}

// Free implements transfer.Sink.
func (s *Store) Free(ctx context.Context, tenant cells.TenantID, move cells.MoveID) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		var known bool
		if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE move = ? AND tenant = ? AND role IN (?, ?))",
			move, tenant, roleBack, roleAdopted).Scan(&known); err != nil || !known {
			return err
		}
		if err := s.release(ctx, tx, move); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "DELETE FROM cell_transfer_capture WHERE move = ?", move)
		return err
	})
}
