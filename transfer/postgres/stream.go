// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

const (
	// statusEvery is how often the server hears of this reader. It gives up on one that
	// is silent for wal_sender_timeout (a minute by default).
	statusEvery = 5 * time.Second
	// receiveStep bounds how long an acknowledgement waits for the server to speak.
	receiveStep = time.Second
)

// stream is the one reader of a move's slot in this process.
type stream struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
	acked  atomic.Uint64
}

func (st *stream) ack(l pglogrepl.LSN) {
	for {
		old := st.acked.Load()
		if uint64(l) <= old || st.acked.CompareAndSwap(old, uint64(l)) {
			return
		}
	}
}

var errTaken = fmt.Errorf("%w: transfer/postgres: another reader of the changes has begun", cells.ErrUnavailable)

// take ends the move's reader in this process, and puts st in its place.
func (s *Store) take(move cells.MoveID, st *stream) {
	for {
		s.mu.Lock()
		old := s.streams[move]
		if old == nil {
			if st != nil {
				s.streams[move] = st
			}
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		old.cancel(errTaken)
		<-old.done
	}
}

func (s *Store) leave(move cells.MoveID, st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[move] == st {
		delete(s.streams, move)
	}
}

// Changes implements transfer.Source.
func (s *Store) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	return s.changes(ctx, m, from, 0, yield)
}

// changes yields changes from the move's slot: until ctx ends, or, if upto is set,
// until all transactions that committed before upto were yielded.
func (s *Store) changes(ctx context.Context, m cells.MoveRef, from transfer.Position, upto pglogrepl.LSN, yield func(transfer.Batch) error) error {
	start, err := lsnOf(from)
	if err != nil {
		return err
	}
	cat, err := s.capturedTables(ctx, s.pool, m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	st := &stream{cancel: cancel, done: make(chan struct{})}
	st.ack(start)
	s.take(m.ID, st)
	r := &reader{s: s, st: st, m: m, cat: cat, upto: upto, out: make(chan transfer.Batch, 256), rels: map[uint32]*relation{}}
	var readErr error
	go func() {
		defer close(st.done)
		defer s.leave(m.ID, st)
		defer close(r.out)
		readErr = r.read(ctx, start)
	}()
	err = deliver(r.out, yield)
	cancel(err)
	<-st.done
	if err == nil {
		err = readErr
	}
	if cause := context.Cause(ctx); err != nil && cause != nil && errors.Is(err, context.Canceled) {
		err = cause
	}
	return err
}

// deliver yields what comes, several transactions in one batch when they are waiting.
func deliver(in <-chan transfer.Batch, yield func(transfer.Batch) error) error {
	var next *transfer.Batch
	for {
		var b transfer.Batch
		if next != nil {
			b, next = *next, nil
		} else {
			var ok bool
			if b, ok = <-in; !ok {
				return nil
			}
		}
	merge:
		for b.End && len(b.Data) < transfer.BatchBytes {
			select {
			case n, ok := <-in:
				if !ok {
					break merge
				}
				if !n.End || len(b.Data)+len(n.Data) > 2*transfer.BatchBytes {
					next = &n
					break merge
				}
				b.Data, b.Count, b.Upto = append(b.Data, n.Data...), b.Count+n.Count, n.Upto
			default:
				break merge
			}
		}
		if err := yield(b); err != nil {
			return err
		}
	}
}

// relation is how the server describes a table.
type relation struct {
	t   *table
	at  []int // where the table's columns are in the server's tuple
	key []int // where the key is in it
}

// reader turns the server's messages into batches.
type reader struct {
	s    *Store
	st   *stream
	m    cells.MoveRef
	cat  *catalog
	upto pglogrepl.LSN
	out  chan transfer.Batch
	conn *pgconn.PgConn
	rels map[uint32]*relation

	buf      []byte
	count    int64
	in       *table // of the last operation in buf
	inTx     bool   // inside a transaction
	message  bool   // the transaction carries this move's message
	told     time.Time
	received pglogrepl.LSN
}

var errReached = errors.New("transfer/postgres: position reached")

func (r *reader) read(ctx context.Context, start pglogrepl.LSN) error {
	if err := r.open(ctx, start); err != nil {
		return err
	}
	defer hangUp(r.conn)
	defer r.farewell()
	r.told = time.Now()
	for {
		if err := r.status(ctx, false); err != nil {
			return err
		}
		rctx, cancel := context.WithTimeout(ctx, receiveStep)
		msg, err := r.conn.ReceiveMessage(rctx)
		cancel()
		switch {
		case err != nil && ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && pgconn.Timeout(err):
			continue
		case err != nil:
			return translate(err)
		}
		switch msg := msg.(type) {
		case *pgproto3.CopyData:
			if err := r.data(ctx, msg.Data); err != nil {
				if errors.Is(err, errReached) {
					return r.put(ctx, transfer.Batch{Upto: positionOf(r.upto), End: true})
				}
				return err
			}
		case *pgproto3.ErrorResponse:
			return translate(pgconn.ErrorResponseToPgError(msg))
		}
	}
}

// open starts replication, and takes the slot from any other process: whoever asks
// now has the import's lock.
func (r *reader) open(ctx context.Context, start pglogrepl.LSN) error {
	row, err := r.s.capture(ctx, r.s.pool, r.m.ID)
	if err != nil {
		return translate(err)
	}
	name := row.name
	args := []string{"proto_version '1'", fmt.Sprintf("publication_names '%s'", name), "messages 'true'"}
	return retryInUse(ctx, func() error {
		conn, err := r.s.replication(ctx)
		if err != nil {
			return err
		}
		err = pglogrepl.StartReplication(ctx, conn, name, start, pglogrepl.StartReplicationOptions{Mode: pglogrepl.LogicalReplication, PluginArgs: args})
		if err == nil {
			r.conn = conn
			return nil
		}
		hangUp(conn)
		switch sqlState(err) {
		case stateInUse:
			if _, terr := r.s.pool.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL", name); terr != nil {
				return translate(terr)
			}
			return err
		case stateUndefined, stateNotReady:
			return fmt.Errorf("%w: transfer/postgres: changes of move %s are not captured here (any more): %w", transfer.ErrCaptureLost, r.m.ID, err)
		}
		return translate(err)
	})
}

// status tells the server what the target has applied.
func (r *reader) status(ctx context.Context, asked bool) error {
	if !asked && time.Since(r.told) < statusEvery {
		return nil
	}
	r.told = time.Now()
	acked := pglogrepl.LSN(r.st.acked.Load())
	return translate(pglogrepl.SendStandbyStatusUpdate(ctx, r.conn, pglogrepl.StandbyStatusUpdate{
		WALWritePosition: max(acked, r.received), WALFlushPosition: acked, WALApplyPosition: acked}))
}

// farewell tells the server once more what is applied: a reader that is short never
// gets to its first status otherwise, and its slot would keep the log for ever.
func (r *reader) farewell() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if !r.conn.IsClosed() {
		_ = r.status(ctx, true)
	}
}

// put hands a batch over, and goes on telling the server while it waits.
func (r *reader) put(ctx context.Context, b transfer.Batch) error {
	select {
	case r.out <- b:
		return nil
	default:
	}
	t := time.NewTicker(statusEvery)
	defer t.Stop()
	for {
		select {
		case r.out <- b:
			return nil
		case <-t.C:
			if err := r.status(ctx, true); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (r *reader) data(ctx context.Context, data []byte) error {
	if len(data) == 0 {
		return errShort
	}
	switch data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		if err != nil {
			return err
		}
		r.received = max(r.received, k.ServerWALEnd)
		// The server has sent everything that committed before ServerWALEnd.
		if r.upto != 0 && k.ServerWALEnd >= r.upto && !r.inTx {
			return errReached
		}
		return r.status(ctx, k.ReplyRequested)
	case pglogrepl.XLogDataByteID:
		x, err := pglogrepl.ParseXLogData(data[1:])
		if err != nil {
			return err
		}
		r.received = max(r.received, x.WALStart)
		msg, err := pglogrepl.Parse(x.WALData)
		if err != nil {
			return fmt.Errorf("transfer/postgres: replication message: %w", err)
		}
		return r.handle(ctx, msg)
	}
	return nil
}

func (r *reader) handle(ctx context.Context, msg pglogrepl.Message) error {
	switch msg := msg.(type) {
	case *pglogrepl.BeginMessage:
		if r.upto != 0 && msg.FinalLSN >= r.upto {
			return errReached
		}
		r.message, r.inTx = false, true
	case *pglogrepl.CommitMessage:
		r.inTx = false
		if r.count == 0 && !r.message {
			return nil
		}
		return r.emit(ctx, positionOf(msg.TransactionEndLSN))
	case *pglogrepl.LogicalDecodingMessage:
		r.message = r.message || msg.Transactional && msg.Prefix == messagePrefix && string(msg.Content) == string(r.m.ID)
	case *pglogrepl.RelationMessage:
		return r.relation(msg)
	case *pglogrepl.InsertMessage:
		return r.change(ctx, msg.RelationID, opInsert, nil, msg.Tuple)
	case *pglogrepl.UpdateMessage:
		return r.change(ctx, msg.RelationID, opUpdate, msg.OldTuple, msg.NewTuple)
	case *pglogrepl.DeleteMessage:
		return r.change(ctx, msg.RelationID, opDelete, msg.OldTuple, nil)
	case *pglogrepl.TruncateMessage:
		// It takes the rows of all tenants, and has asked no fence: not to be repeated at
		// the other cell.
		for _, id := range msg.RelationIDs {
			if rel := r.rels[id]; rel != nil {
				return transfer.SchemaChanged(r.m.Source, rel.t.Name)
			}
		}
	}
	return nil
}

func (r *reader) emit(ctx context.Context, upto transfer.Position) error {
	b := transfer.Batch{Data: r.buf, Count: r.count, Upto: upto, End: upto != ""}
	r.buf, r.count, r.in = nil, 0, nil
	return r.put(ctx, b)
}

func (r *reader) relation(msg *pglogrepl.RelationMessage) error {
	rel := &relation{}
	for _, t := range r.cat.tables {
		if t.schema == msg.Namespace && t.rel == msg.RelationName {
			rel.t = t
		}
	}
	if rel.t == nil {
		// The server describes partitions too; changes come as those of their root.
		return nil
	}
	// A description of before or after a change of the table: the shape of now is that of
	// the capture's beginning, so it has changed in between.
	changed := transfer.SchemaChanged(r.m.Source, rel.t.Name)
	if len(msg.Columns) != len(rel.t.cols) {
		return changed
	}
	for _, c := range rel.t.cols {
		at := slices.IndexFunc(msg.Columns, func(d *pglogrepl.RelationMessageColumn) bool {
			return d.Name == c.name && d.DataType == c.oid && d.TypeModifier == c.mod
		})
		if at < 0 {
			return changed
		}
		rel.at = append(rel.at, at)
	}
	for _, at := range rel.t.keyAt {
		rel.key = append(rel.key, rel.at[at])
	}
	r.rels[msg.RelationID] = rel
	return nil
}

func (r *reader) change(ctx context.Context, id uint32, kind byte, old, row *pglogrepl.TupleData) error {
	rel := r.rels[id]
	if rel == nil {
		return fmt.Errorf("%w: transfer/postgres: changes of relation %d, which is not listed", cells.ErrInvalid, id)
	}
	at := len(r.buf)
	if r.in != rel.t {
		r.buf = appendText(append(r.buf, opTable), []byte(rel.t.Name))
		r.in = rel.t
	}
	if kind == opUpdate && old != nil && row != nil && !sameKey(rel, old, row) {
		kind = opRekey
	}
	r.buf = append(r.buf, kind)
	if kind == opRekey || kind == opDelete {
		if old == nil {
			return fmt.Errorf("%w: transfer/postgres: a change of table %s lacks the old key; its replica identity must cover the primary key", cells.ErrInvalid, rel.t.Name)
		}
		for _, k := range rel.key {
			if k >= len(old.Columns) || old.Columns[k].DataType != pglogrepl.TupleDataTypeText {
				return fmt.Errorf("%w: transfer/postgres: a change of table %s lacks a part of the old key", cells.ErrInvalid, rel.t.Name)
			}
			r.buf = appendText(r.buf, old.Columns[k].Data)
		}
	}
	if row != nil {
		for _, c := range rel.at {
			if c >= len(row.Columns) {
				return errShort
			}
			switch col := row.Columns[c]; col.DataType {
			case pglogrepl.TupleDataTypeNull:
				r.buf = append(r.buf, valNull)
			case pglogrepl.TupleDataTypeToast:
				// With a full replica identity the old row has the value.
				if old != nil && c < len(old.Columns) && old.Columns[c].DataType == pglogrepl.TupleDataTypeText {
					r.buf = appendText(append(r.buf, valText), old.Columns[c].Data)
				} else {
					r.buf = append(r.buf, valUnchanged)
				}
			case pglogrepl.TupleDataTypeText:
				r.buf = appendText(append(r.buf, valText), col.Data)
			default:
				return fmt.Errorf("%w: transfer/postgres: column in format %q", cells.ErrInvalid, col.DataType)
			}
		}
	}
	if len(r.buf)-at > transfer.MaxRowBytes {
		return fmt.Errorf("%w: a row of table %s has %d bytes", transfer.ErrTooLarge, rel.t.Name, len(r.buf)-at)
	}
	if r.count++; len(r.buf) >= transfer.BatchBytes {
		return r.emit(ctx, "")
	}
	return nil
}

func sameKey(rel *relation, old, row *pglogrepl.TupleData) bool {
	for _, k := range rel.key {
		if k >= len(old.Columns) || k >= len(row.Columns) || string(old.Columns[k].Data) != string(row.Columns[k].Data) {
			return false
		}
	}
	return true
}
