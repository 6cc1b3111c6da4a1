// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// What a row of transfer_capture is for.
const (
	roleMove     = 0 // a move out of here
	roleBack     = 1 // the way back of a move to here; start is fixed
	roleAdopted  = 2 // a way back that an undo goes on with: a move out of here, too
	roleRemoving = 4 // the rows that the move left here are being removed
)

// captured is a row of transfer_capture.
type captured struct {
	known, released bool
	start           pglogrepl.LSN // 0 until the slot is made
	role            int
	name            string // of the slot
	group           string // the row of transfer_group, or ""
	alone           bool   // it has a slot of its own all the same
	groupName       string // of the group's slot and publication
	shape           string
	lost            int
	ended           string // why the capture was ended here; "" if it was not
}

// together reports whether the capture is by the slot of its group.
func (c captured) together() bool { return c.group != "" && !c.alone }

// publication is the one that the slot is read with. That of a group lives as long as
// one of its members is captured.
func (c captured) publication() string {
	if c.group != "" {
		return c.groupName
	}
	return c.name
}

// capture reads the move's row.
func (s *Store) capture(ctx context.Context, q querier, move cells.MoveID) (c captured, err error) {
	var text string
	err = q.QueryRow(ctx, s.q("SELECT start::text, released, role, objects, shape, lost, ended, grp, alone FROM @s.transfer_capture WHERE move = $1"), string(move)).
		Scan(&text, &c.released, &c.role, &c.name, &c.shape, &c.lost, &c.ended, &c.group, &c.alone)
	if errors.Is(err, pgx.ErrNoRows) {
		return captured{name: s.objectName(move)}, nil
	}
	if err == nil {
		c.start, err = pglogrepl.ParseLSN(text)
	}
	if c.group != "" {
		c.groupName = s.groupName(c.group)
	}
	switch c.known = err == nil; {
	case c.together():
		c.name = c.groupName
	case c.name == "":
		c.name = s.objectName(move)
	}
	return c, err
}

// slotGood reports whether the slot is there, and whether it has everything.
func slotGood(ctx context.Context, q querier, name string) (there, good bool, err error) {
	err = q.QueryRow(ctx, "SELECT count(*) > 0, coalesce(bool_and(wal_status IS DISTINCT FROM 'lost'), false) FROM pg_replication_slots WHERE slot_name = $1", name).Scan(&there, &good)
	return there, there && good, err
}

// kept reads a way back and checks that it has missed nothing.
func (s *Store) kept(ctx context.Context, q querier, move cells.MoveID, role int) (captured, error) {
	c, err := s.capture(ctx, q, move)
	switch {
	case err != nil:
		return c, err
	case !c.known:
		return c, lostBack(move, "nothing is captured")
	case c.released || c.role != role:
		return c, lostBack(move, "the capture was ended")
	case c.ended != "":
		return c, lostBack(move, c.ended)
	}
	there, good, err := slotGood(ctx, q, c.name)
	switch {
	case err != nil:
		return c, err
	case !there:
		return c, lostBack(move, "its replication slot is gone")
	case !good:
		return c, lostBack(move, "its replication slot has lost log: it was further behind than max_slot_wal_keep_size allows")
	}
	var published int
	if err := q.QueryRow(ctx, "SELECT count(*) FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = $1", c.publication()).Scan(&published); err != nil {
		return c, err
	}
	if published != len(s.tables) {
		return c, lostBack(move, fmt.Sprintf("%d of %d tables are still published: a table was made anew", published, len(s.tables)))
	}
	now, err := s.shape(ctx, q)
	if err != nil {
		return c, err
	}
	if err := sameShape(c.shape, now, ""); err != nil {
		return c, lostBack(move, err.Error())
	}
	return c, nil
}

func lostBack(move cells.MoveID, why string) error {
	return fmt.Errorf("%w: transfer/postgres: move %s: %s", cells.ErrReturnLost, move, why)
}

// Kept implements transfer.Source.
func (s *Store) Kept(ctx context.Context, m cells.MoveRef) (transfer.Position, error) {
	c, err := s.kept(ctx, s.pool, m.ID, roleBack)
	return positionOf(c.start), translate(err)
}

// Adopt implements transfer.Source. The slot and the publication keep the names that
// they were made with.
func (s *Store) Adopt(ctx context.Context, m cells.MoveRef) (pos transfer.Position, err error) {
	err = s.locked(ctx, m.ID, func(conn *pgxpool.Conn) error {
		c, err := s.kept(ctx, conn, m.ID, roleAdopted)
		if errors.Is(err, cells.ErrReturnLost) && !c.known {
			if c, err = s.kept(ctx, conn, m.Undoes, roleBack); err == nil {
				objects := c.name
				if c.together() {
					objects = ""
				}
				_, err = conn.Exec(ctx, s.q("UPDATE @s.transfer_capture SET move = $1, base = $2, role = $3, objects = $4 WHERE move = $5"),
					string(m.ID), int64(m.Base), roleAdopted, objects, string(m.Undoes))
				if err == nil && c.together() {
					s.renamed(c.group, m.Undoes, m.ID)
				}
			}
		}
		pos = positionOf(c.start)
		return err
	})
	if err == nil {
		s.take(m.Undoes, nil)
	}
	return pos, err
}

// fix makes what commits from here on the way back of the move that is being
// finished: nothing of the tenant is written until the fence is opened.
func (s *Store) fix(ctx context.Context, tx pgx.Tx, move cells.MoveID) error {
	tag, err := tx.Exec(ctx, s.q("UPDATE @s.transfer_capture SET start = pg_logical_emit_message(true, $2, $1), role = $3 WHERE move = $1 AND NOT released"),
		string(move), messagePrefix, roleBack)
	if err == nil && tag.RowsAffected() != 1 {
		err = fmt.Errorf("%w: transfer/postgres: no way back of move %s was begun; prepare the move again", cells.ErrNotApplicable, move)
	}
	return err
}

// ImportBack implements transfer.Sink.
func (s *Store) ImportBack(ctx context.Context, m cells.MoveRef, start transfer.Position) (transfer.Import, error) {
	i, err := s.importer(ctx, m)
	if err != nil {
		return nil, err
	}
	var released bool
	err = pgx.BeginFunc(ctx, i.conn, func(tx pgx.Tx) error {
		if err := s.cfg.Admit(ctx, tx, m.Tenant, m.CloseEpoch(), m.ID); err != nil {
			return err
		}
		var err error
		if i.cat, err = s.usables(ctx, tx); err != nil {
			return err
		}
		// The row is locked, so that no removal begins meanwhile.
		err = tx.QueryRow(ctx, s.q("SELECT released FROM @s.transfer_capture WHERE move = $1 AND tenant = $2 AND role IN ($3, $4) FOR UPDATE"), string(m.ID), string(m.Tenant), roleMove, roleAdopted).Scan(&released)
		if errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("%w: transfer/postgres: the rows of tenant %s here are not (any more) those that move %s left", cells.ErrStaleOrder, m.Tenant, m.ID)
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
		err = lostBack(m.ID, fmt.Sprintf("it begins at %s now, and began at %s", start, i.state.Start))
	}
	if err == nil && !released {
		// No slot of the source outlives the cut.
		err = s.release(ctx, m.ID)
	}
	if err != nil {
		_ = i.Close()
		return nil, translate(err)
	}
	return i, nil
}

// base is the state of an import whose rows are here already, as the source had
// them at start. "" is a position that is not known yet.
func (i *imp) base(start transfer.Position) transfer.State {
	st := transfer.State{Start: start, Applied: start, Verified: start, Copied: true, Tables: map[string]transfer.TableState{}}
	for name := range i.cat.byName {
		st.Tables[name] = transfer.TableState{Done: true}
	}
	return st
}

// enter makes the import this process's, in the state in which it is, or in the
// given one if there is none.
func (i *imp) enter(ctx context.Context, tx pgx.Tx, first string) error {
	var state []byte
	err := tx.QueryRow(ctx, i.s.q(`INSERT INTO @s.transfer_import AS i (move, tenant, base, gen, state) VALUES ($1, $2, $3, 1, $4::jsonb)
		ON CONFLICT (move) DO UPDATE SET gen = i.gen + 1 RETURNING gen, state`), string(i.m.ID), string(i.m.Tenant), int64(i.m.Base), first).Scan(&i.gen, &state)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(state, &i.state); err != nil {
		return err
	}
	if i.state.Shape == nil {
		i.state.Shape = i.cat.shape
		if _, err := tx.Exec(ctx, i.s.q("UPDATE @s.transfer_import SET state = jsonb_set(state, '{shape}', $2::jsonb) WHERE move = $1"), string(i.m.ID), i.state.Shape); err != nil {
			return err
		}
	} else if err := i.state.Shape.Same(i.cat.shape, i.m.Target); err != nil {
		return err
	}
	for name, t := range i.state.Tables {
		i.upsert[name] = !t.Done
	}
	return nil
}

// inherit makes what the way back of the move that is undone has brought the
// beginning of this import. It returns the state to begin with if there was none.
func (i *imp) inherit(ctx context.Context, tx pgx.Tx) (first string, err error) {
	none := "{}"
	if i.m.Undoes == "" {
		return none, nil
	}
	s, id, undone := i.s, string(i.m.ID), string(i.m.Undoes)
	var known bool
	if err := tx.QueryRow(ctx, s.q("SELECT EXISTS (SELECT FROM @s.transfer_import WHERE move = $1)"), id).Scan(&known); err != nil || known {
		return none, err
	}
	tag, err := tx.Exec(ctx, s.q("UPDATE @s.transfer_import SET move = $1, base = $2 WHERE move = $3 AND tenant = $4"), id, int64(i.m.Base), undone, string(i.m.Tenant))
	if err != nil {
		return none, err
	}
	if tag.RowsAffected() > 0 {
		_, err = tx.Exec(ctx, s.q("UPDATE @s.transfer_key SET move = $1 WHERE move = $2"), id, undone)
		return none, err
	}
	if err := tx.QueryRow(ctx, s.q("SELECT EXISTS (SELECT FROM @s.transfer_capture WHERE move = $1 AND tenant = $2 AND role IN ($3, $4))"), undone, string(i.m.Tenant), roleMove, roleAdopted).Scan(&known); err != nil || !known {
		return none, err
	}
	b, err := json.Marshal(i.base(""))
	return string(b), err
}

func (i *imp) Adopt(ctx context.Context, start transfer.Position) error {
	return i.do(ctx, func(_ pgx.Tx, st *transfer.State) error {
		if i.m.Undoes == "" || st.Start != "" || !st.Copied {
			return fmt.Errorf("%w: transfer/postgres: the import of move %s has found no rows of its own", cells.ErrNotApplicable, i.m.ID)
		}
		shape := st.Shape
		*st = i.base(start)
		st.Shape = shape
		return nil
	})
}

// Free implements transfer.Sink.
func (s *Store) Free(ctx context.Context, tenant cells.TenantID, move cells.MoveID) error {
	var known bool
	if err := s.pool.QueryRow(ctx, s.q("SELECT EXISTS (SELECT FROM @s.transfer_capture WHERE move = $1 AND tenant = $2 AND role IN ($3, $4))"),
		string(move), string(tenant), roleBack, roleAdopted).Scan(&known); err != nil || !known {
		return translate(err)
	}
	if err := s.release(ctx, move); err != nil {
		return err
	}
	_, err := s.pool.Exec(ctx, s.q("DELETE FROM @s.transfer_capture WHERE move = $1 AND role IN ($2, $3)"), string(move), roleBack, roleAdopted)
	return translate(err)
}
