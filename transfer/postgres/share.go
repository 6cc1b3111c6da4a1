// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cloister-dev/cloister/cells"
)

// sharedLease is how long an exported snapshot waits for those that it was made for. It
// holds a temporary slot, and what the server cannot clean up meanwhile.
const sharedLease = 20 * time.Second

// exported is a snapshot that a replication connection has exported: it shows exactly
// what had committed before at. It can be imported as long as that connection lives.
type exported struct {
	repl     *pgconn.PgConn
	snapshot string
	at       pglogrepl.LSN

	mu    sync.Mutex // guards what follows
	users int        // who may still import it, or is about to
	timer *time.Timer
	over  bool
}

// viewName is the name of a temporary slot.
func viewName(object string) string {
	var tail [6]byte
	_, _ = rand.Read(tail[:])
	return object[:20] + "_view_" + hex.EncodeToString(tail[:])
}

// export makes a slot and exports the snapshot of its consistent point. The caller hangs up.
func (s *Store) export(ctx context.Context, name string, temporary bool) (*exported, error) {
	repl, err := s.replication(ctx)
	if err != nil {
		return nil, err
	}
	slot, err := pglogrepl.CreateReplicationSlot(ctx, repl, name, "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{Temporary: temporary, Mode: pglogrepl.LogicalReplication, SnapshotAction: "EXPORT_SNAPSHOT"})
	if err != nil {
		hangUp(repl)
		return nil, translate(err)
	}
	e := &exported{repl: repl, snapshot: slot.SnapshotName}
	if e.at, err = pglogrepl.ParseLSN(slot.ConsistentPoint); err != nil {
		hangUp(repl)
		return nil, err
	}
	return e, nil
}

// first is the first statement of a transaction that imports the snapshot.
func (e *exported) first() string { return "SET TRANSACTION SNAPSHOT " + literal(e.snapshot) }

// share keeps the snapshot for the first view of each of the moves.
func (s *Store) share(e *exported, moves []cells.MoveID) {
	if len(moves) == 0 {
		hangUp(e.repl)
		return
	}
	e.users = len(moves)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		s.wg.Go(func() { hangUp(e.repl) })
		return
	}
	for _, m := range moves {
		s.shared[m] = e
	}
	e.timer = time.AfterFunc(sharedLease, func() {
		s.mu.Lock()
		for _, m := range moves {
			if s.shared[m] == e {
				delete(s.shared, m)
			}
		}
		s.mu.Unlock()
		e.end()
	})
}

// done counts one user out and hangs up behind the last.
func (e *exported) done() {
	e.mu.Lock()
	e.users--
	last := e.users <= 0
	e.mu.Unlock()
	if last {
		e.end()
	}
}

func (e *exported) end() {
	e.mu.Lock()
	over := e.over
	e.over = true
	e.mu.Unlock()
	if !over {
		e.timer.Stop()
		hangUp(e.repl)
	}
}

// sharedView opens the view that was kept for the move; nil if there is none, or if what
// exported it is gone.
func (s *Store) sharedView(ctx context.Context, m cells.MoveRef) (*view, error) {
	s.mu.Lock()
	e := s.shared[m.ID]
	delete(s.shared, m.ID)
	s.mu.Unlock()
	if e == nil {
		return nil, nil
	}
	defer e.done()
	v, err := s.openView(ctx, m, e.at, e.first())
	switch {
	case err == nil:
		return v, nil
	case ctx.Err() != nil, sqlState(err) == "":
		return nil, err
	}
	return nil, nil // the snapshot is gone; a view of its own
}

// unshare gives up the view that was kept for a move.
func (s *Store) unshare(move cells.MoveID) {
	s.mu.Lock()
	e := s.shared[move]
	delete(s.shared, move)
	s.mu.Unlock()
	if e != nil {
		e.done()
	}
}
