// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// objectName is the name of the move's slot and publication. Slots of all
// databases of a server share their names.
func (s *Store) objectName(move cells.MoveID) string {
	return moveObject(s.pool.Config().ConnConfig.Database, move)
}

// messagePrefix marks the messages that positions are found by.
const messagePrefix = "cell.transfer"

func lsnOf(pos transfer.Position) (pglogrepl.LSN, error) {
	n, err := pos.Number()
	return pglogrepl.LSN(n), err
}

func positionOf(l pglogrepl.LSN) transfer.Position { return transfer.MakePosition(uint64(l)) }

// locked runs f on one connection while no other process of the cell does the same
// for the move.
func (s *Store) locked(ctx context.Context, move cells.MoveID, f func(conn *pgxpool.Conn) error) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return translate(err)
	}
	defer conn.Release()
	return holding(ctx, conn, "cell transfer capture "+string(move), func() error { return f(conn) })
}

// holding runs f while the connection holds a lock between processes.
func holding(ctx context.Context, conn *pgxpool.Conn, key string, f func() error) error {
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended($1, 0))", key); err != nil {
		if ctx.Err() != nil { // it may have been given all the same
			_ = conn.Conn().Close(context.WithoutCancel(ctx))
		}
		return translate(err)
	}
	err := f()
	if _, uerr := conn.Exec(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock(hashtextextended($1, 0))", key); uerr != nil {
		// The lock goes with the connection.
		_ = conn.Conn().Close(context.WithoutCancel(ctx))
	}
	return translate(err)
}

// Begin implements transfer.Source. The row comes first: whatever a crash leaves
// behind is found by it.
func (s *Store) Begin(ctx context.Context, m cells.MoveRef) (pos transfer.Position, err error) {
	err = s.locked(ctx, m.ID, func(conn *pgxpool.Conn) error {
		c, err := s.capture(ctx, conn, m.ID)
		if err != nil {
			return err
		}
		if c.released {
			return fmt.Errorf("%w: transfer/postgres: the capture of move %s was released", cells.ErrNotApplicable, m.ID)
		}
		if c.ended != "" {
			return fmt.Errorf("%w: %s", transfer.ErrRetention, c.ended)
		}
		cat, err := s.load(ctx, conn)
		if err != nil {
			return err
		}
		if err := sameShape(c.shape, cat.shape, m.Source); err != nil {
			return err
		}
		there, good, err := slotGood(ctx, conn, c.name)
		if err != nil {
			return err
		}
		if c.start != 0 && good {
			pos = positionOf(c.start)
			return nil
		}
		if c.role == roleBack {
			return lostBack(m.ID, "its replication slot is gone, or has lost log")
		}
		if c.start != 0 && c.lost >= maxLost {
			return fmt.Errorf("%w: the server has dropped the log of move %s %d times, by its max_slot_wal_keep_size; raise it, or move at a quieter time", transfer.ErrRetention, m.ID, c.lost+1)
		}
		shape, err := json.Marshal(cat.shape)
		if err != nil {
			return err
		}
		if g := transfer.GroupOf(ctx); g != "" && c.start == 0 && c.lost == 0 && (!c.known || c.group != "") && cat.shareable(m.Tenant) {
			if pos, err = s.join(ctx, conn, g, m, cat, string(shape)); !errors.Is(err, errApart) {
				return err
			}
		}
		// A slot without a position was left by a crash; a position whose slot is gone has
		// missed changes.
		if _, err := conn.Exec(ctx, s.q("INSERT INTO @s.transfer_capture AS c (move, tenant, base, start, shape) VALUES ($1, $2, $3, '0/0', $4) "+
			"ON CONFLICT (move) DO UPDATE SET start = '0/0', role = 0, objects = '', grp = '', alone = false, shape = EXCLUDED.shape, lost = c.lost + (c.start <> '0/0')::int"),
			string(m.ID), string(m.Tenant), int64(m.Base), string(shape)); err != nil {
			return err
		}
		if err := s.fault("row"); err != nil {
			return err
		}
		if c.group != "" {
			if err := s.parted(ctx, conn, c.group, m.ID); err != nil {
				return err
			}
		}
		if there && !c.together() {
			if err := s.dropSlot(ctx, conn, c.name); err != nil {
				return err
			}
		}
		name := s.objectName(m.ID)
		if c.name != name && c.group == "" {
			if _, err := conn.Exec(ctx, "DROP PUBLICATION IF EXISTS "+ident(c.name)); err != nil {
				return err
			}
		}
		if err := s.publish(ctx, conn, cat, m); err != nil {
			return err
		}
		if err := s.fault("publication"); err != nil {
			return err
		}
		var text string
		if err := conn.QueryRow(ctx, "SELECT lsn::text FROM pg_create_logical_replication_slot($1, 'pgoutput')", name).Scan(&text); err != nil {
			return err
		}
		if err := s.fault("slot"); err != nil {
			return err
		}
		lsn, err := pglogrepl.ParseLSN(text)
		if err != nil {
			return err
		}
		pos = positionOf(lsn)
		_, err = conn.Exec(ctx, s.q("UPDATE @s.transfer_capture SET start = $2::pg_lsn WHERE move = $1"), string(m.ID), text)
		return err
	})
	return pos, err
}

// publish makes the publication, with the tables of now.
func (s *Store) publish(ctx context.Context, conn *pgxpool.Conn, c *catalog, m cells.MoveRef) error {
	for _, t := range c.missing {
		return fmt.Errorf("%w: transfer/postgres: there is no table %s", cells.ErrInvalid, t.Name)
	}
	tables := make([]string, len(c.tables))
	for i, t := range c.tables {
		tables[i] = fmt.Sprintf("TABLE %s WHERE (%s)", t.sql(), t.where(m.Tenant))
	}
	name := ident(s.objectName(m.ID))
	_, err := conn.Exec(ctx, "DROP PUBLICATION IF EXISTS "+name)
	if err == nil {
		_, err = conn.Exec(ctx, fmt.Sprintf("CREATE PUBLICATION %s FOR %s WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = true)", name, strings.Join(tables, ", ")))
	}
	return err
}

// Release implements transfer.Source.
func (s *Store) Release(ctx context.Context, m cells.MoveRef) error { return s.release(ctx, m.ID) }

// release keeps the row, which says that the rows here are the move's to remove.
func (s *Store) release(ctx context.Context, move cells.MoveID) error {
	s.take(move, nil)
	return s.locked(ctx, move, func(conn *pgxpool.Conn) error {
		if _, err := conn.Exec(ctx, s.q("UPDATE @s.transfer_capture SET released = true WHERE move = $1 AND NOT released"), string(move)); err != nil {
			return err
		}
		if err := s.fault("released"); err != nil {
			return err
		}
		c, err := s.capture(ctx, conn, move)
		if err != nil {
			return err
		}
		if c.group != "" {
			if err := s.dropOwn(ctx, conn, c, move); err != nil {
				return err
			}
			if err := s.fault("dropped"); err != nil {
				return err
			}
			return s.parted(ctx, conn, c.group, move)
		}
		if err := s.dropSlot(ctx, conn, c.name); err != nil {
			return err
		}
		if err := s.fault("dropped"); err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "DROP PUBLICATION IF EXISTS "+ident(c.name))
		return err
	})
}

// dropOwn drops the slot that a member of a group has for itself, also one that a crash
// has left while it was made.
func (s *Store) dropOwn(ctx context.Context, conn *pgxpool.Conn, c captured, move cells.MoveID) error {
	name := s.objectName(move)
	if c.alone {
		name = c.name
	}
	return s.dropSlot(ctx, conn, name)
}

// dropSlot drops a slot, taking it from whoever reads it.
func (s *Store) dropSlot(ctx context.Context, conn *pgxpool.Conn, name string) error {
	return retryInUse(ctx, func() error {
		if _, err := conn.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL", name); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", name)
		if sqlState(err) == stateUndefined {
			return nil
		}
		return err
	})
}

// retryInUse repeats f while a slot is in use by a process that is being ended.
func retryInUse(ctx context.Context, f func() error) error {
	t := time.NewTicker(3 * time.Millisecond)
	defer t.Stop()
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := f()
		if sqlState(err) != stateInUse || time.Now().After(deadline) {
			return err
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// message writes a message into the log that Changes finds, behind everything that
// is committed, and returns its position.
func (s *Store) message(ctx context.Context, move cells.MoveID) (pglogrepl.LSN, error) {
	var text string
	// Transactional, so that its commit writes the log out at once.
	if err := s.pool.QueryRow(ctx, "SELECT pg_logical_emit_message(true, $1, $2)::text", messagePrefix, string(move)).Scan(&text); err != nil {
		return 0, translate(err)
	}
	return pglogrepl.ParseLSN(text)
}

// Head implements transfer.Source.
func (s *Store) Head(ctx context.Context, m cells.MoveRef) (transfer.Position, error) {
	lsn, err := s.message(ctx, m.ID)
	return positionOf(lsn), err
}

// Applied implements transfer.Source: the reader of this process tells the server.
// If another process has the reader, the position is told when that one begins again.
func (s *Store) Applied(ctx context.Context, m cells.MoveRef, pos transfer.Position) error {
	lsn, err := lsnOf(pos)
	if err != nil {
		return err
	}
	s.mu.Lock()
	st := s.streams[m.ID]
	s.mu.Unlock()
	if st != nil {
		st.ack(lsn)
		return nil
	}
	if h := s.hubOf(m.ID); h != nil {
		h.ack(m.ID, lsn)
		return nil
	}
	// Nobody reads here: whoever reads for the group next finds it there.
	_, err = s.pool.Exec(ctx, s.q("UPDATE @s.transfer_capture SET applied = $2::pg_lsn WHERE move = $1 AND grp <> '' AND applied < $2::pg_lsn"), string(m.ID), lsn.String())
	return translate(err)
}

// replication opens a connection in replication mode.
func (s *Store) replication(ctx context.Context) (*pgconn.PgConn, error) {
	cfg := s.pool.Config()
	cc := cfg.ConnConfig.Copy()
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cc); err != nil {
			return nil, err
		}
	}
	cc.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, &cc.Config)
	return conn, translate(err)
}

func hangUp(conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}
