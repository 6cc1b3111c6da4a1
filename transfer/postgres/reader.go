// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// relation is how the server describes a table.
type relation struct {
	t      *table
	at     []int // where the table's columns are in the server's tuple
	key    []int // where the key is in it
	tenant int   // where the tenant column is in it; -1 if it is gone
	// changed: the table is not what the catalog says.
	changed error
}

// part is what a reader gathers of a transaction, for one move.
type part struct {
	buf   []byte
	count int64
	in    *table // of the last operation in buf
	owner *sharer
}

// take empties the part.
func (p *part) take() transfer.Batch {
	b := transfer.Batch{Data: p.buf, Count: p.count}
	p.buf, p.count, p.in = nil, 0, nil
	return b
}

// outlet is where a reader's changes go. Used by the reader's goroutine.
type outlet interface {
	// acked is what the server may forget.
	acked() pglogrepl.LSN
	// begin begins a transaction whose commit record is at final; errReached ends the reading.
	begin(final pglogrepl.LSN) error
	// pick returns where the changes of a tenant go; nil is nowhere.
	pick(t *table, tenant []byte) *part
	// note is told of the message of a move in the transaction.
	note(move string)
	// broken is told why changes of a part, nil: of all, cannot be had; an error ends
	// the reading.
	broken(p *part, err error) error
	// emit takes what the part has; the transaction goes on.
	emit(ctx context.Context, p *part) error
	// commit ends the transaction.
	commit(ctx context.Context, end pglogrepl.LSN) error
	// reached: outside of a transaction, everything that committed before at was told.
	reached(at pglogrepl.LSN) error
}

// reader turns the server's messages of one slot into changes.
type reader struct {
	s                 *Store
	slot, publication string
	source            cells.CellID
	cat               *catalog
	outlet            outlet

	conn     *pgconn.PgConn
	rels     map[uint32]*relation
	inTx     bool // inside a transaction
	told     time.Time
	received pglogrepl.LSN
}

var errReached = errors.New("transfer/postgres: position reached")

// foreignPatience is how long a slot that another process reads is waited for: one that
// was killed lets go at once.
const foreignPatience = time.Second

// open starts replication. With seize it takes the slot from any other process: whoever
// asks now has the import's lock. Otherwise it fails with [transfer.ErrElsewhere].
func (r *reader) open(ctx context.Context, start pglogrepl.LSN, seize bool) error {
	args := []string{"proto_version '1'", fmt.Sprintf("publication_names '%s'", r.publication), "messages 'true'"}
	r.rels, r.inTx, r.received = map[uint32]*relation{}, false, 0
	deadline := time.Now().Add(foreignPatience)
	return retryInUse(ctx, func() error {
		conn, err := r.s.replication(ctx)
		if err != nil {
			return err
		}
		err = pglogrepl.StartReplication(ctx, conn, r.slot, start, pglogrepl.StartReplicationOptions{Mode: pglogrepl.LogicalReplication, PluginArgs: args})
		if err == nil {
			r.conn, r.told = conn, time.Now()
			return nil
		}
		hangUp(conn)
		switch sqlState(err) {
		case stateInUse:
			if !seize {
				if time.Now().After(deadline) {
					return fmt.Errorf("%w: slot %s", transfer.ErrElsewhere, r.slot)
				}
				return err
			}
			if _, terr := r.s.pool.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL", r.slot); terr != nil {
				return translate(terr)
			}
			return err
		case stateUndefined, stateNotReady:
			return fmt.Errorf("%w: transfer/postgres: slot %s is not there (any more): %w", transfer.ErrCaptureLost, r.slot, err)
		}
		return translate(err)
	})
}

// read reads until ctx ends, or the outlet or the server ends it, and hangs up.
func (r *reader) read(ctx context.Context) error {
	defer hangUp(r.conn)
	defer r.farewell()
	// A context for each message would cost more than most messages do.
	wire := r.conn.Conn()
	defer context.AfterFunc(ctx, func() { _ = wire.SetReadDeadline(time.Unix(1, 0)) })()
	var until time.Time
	for {
		if err := r.status(ctx, false); err != nil {
			return err
		}
		if left := time.Until(until); left < receiveStep/2 {
			until = time.Now().Add(receiveStep)
			if err := wire.SetReadDeadline(until); err != nil {
				return translate(err)
			}
		}
		if ctx.Err() != nil { // it may have ended before the deadline was set
			return context.Cause(ctx)
		}
		msg, err := r.conn.ReceiveMessage(context.Background())
		switch {
		case err != nil && ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && timedOut(err):
			until = time.Time{}
			continue
		case err != nil:
			return translate(err)
		}
		switch msg := msg.(type) {
		case *pgproto3.CopyData:
			if err := r.data(ctx, msg.Data); err != nil {
				return err
			}
		case *pgproto3.ErrorResponse:
			return translate(pgconn.ErrorResponseToPgError(msg))
		}
	}
}

func timedOut(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// status tells the server what the targets have applied.
func (r *reader) status(ctx context.Context, asked bool) error {
	if !asked && time.Since(r.told) < statusEvery {
		return nil
	}
	r.told = time.Now()
	acked := r.outlet.acked()
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
		if !r.inTx {
			if err := r.outlet.reached(k.ServerWALEnd); err != nil {
				return err
			}
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
		r.inTx = true
		return r.outlet.begin(msg.FinalLSN)
	case *pglogrepl.CommitMessage:
		r.inTx = false
		return r.outlet.commit(ctx, msg.TransactionEndLSN)
	case *pglogrepl.LogicalDecodingMessage:
		if msg.Transactional && msg.Prefix == messagePrefix {
			r.outlet.note(string(msg.Content))
		}
	case *pglogrepl.RelationMessage:
		r.relation(msg)
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
				return r.outlet.broken(nil, transfer.SchemaChanged(r.source, rel.t.Name))
			}
		}
	}
	return nil
}

func (r *reader) relation(msg *pglogrepl.RelationMessage) {
	rel := &relation{}
	for _, t := range r.cat.tables {
		if t.schema == msg.Namespace && t.rel == msg.RelationName {
			rel.t = t
		}
	}
	if rel.t == nil {
		// The server describes partitions too; changes come as those of their root.
		return
	}
	r.rels[msg.RelationID] = rel
	rel.tenant = slices.IndexFunc(msg.Columns, func(d *pglogrepl.RelationMessageColumn) bool { return d.Name == rel.t.TenantColumn })
	// A description of before or after a change of the table: the shape of now is that of
	// the capture's beginning, so it has changed in between.
	changed := transfer.SchemaChanged(r.source, rel.t.Name)
	if len(msg.Columns) != len(rel.t.cols) || rel.tenant < 0 {
		rel.changed = changed
		return
	}
	for _, c := range rel.t.cols {
		at := slices.IndexFunc(msg.Columns, func(d *pglogrepl.RelationMessageColumn) bool {
			return d.Name == c.name && d.DataType == c.oid && d.TypeModifier == c.mod
		})
		if at < 0 {
			rel.changed = changed
			return
		}
		rel.at = append(rel.at, at)
	}
	for _, at := range rel.t.keyAt {
		rel.key = append(rel.key, rel.at[at])
	}
}

// tenantOf is the tenant of a tuple, as text; nil if it does not tell.
func (rel *relation) tenantOf(row *pglogrepl.TupleData) []byte {
	if row == nil || rel.tenant < 0 || rel.tenant >= len(row.Columns) || row.Columns[rel.tenant].DataType != pglogrepl.TupleDataTypeText {
		return nil
	}
	return row.Columns[rel.tenant].Data
}

func (r *reader) change(ctx context.Context, id uint32, kind byte, old, row *pglogrepl.TupleData) error {
	rel := r.rels[id]
	if rel == nil {
		return fmt.Errorf("%w: transfer/postgres: changes of relation %d, which is not listed", cells.ErrInvalid, id)
	}
	before, after := rel.tenantOf(old), rel.tenantOf(row)
	switch {
	case rel.tenant < 0 || before == nil && after == nil:
		return r.outlet.broken(nil, transfer.SchemaChanged(r.source, rel.t.Name))
	case before == nil:
		before = after
	case after == nil:
		after = before
	}
	to := r.outlet.pick(rel.t, after)
	if kind == opUpdate && string(before) != string(after) {
		// A row that goes from one tenant to another: each sees its end of it.
		if from := r.outlet.pick(rel.t, before); from != nil && from != to {
			if err := r.add(ctx, from, rel, opDelete, old, nil); err != nil {
				return err
			}
			kind = opInsert
		} else if from == nil {
			kind = opInsert
		}
	}
	if to == nil {
		return nil
	}
	return r.add(ctx, to, rel, kind, old, row)
}

// add adds a change to a part.
func (r *reader) add(ctx context.Context, p *part, rel *relation, kind byte, old, row *pglogrepl.TupleData) error {
	if rel.changed != nil {
		return r.outlet.broken(p, rel.changed)
	}
	at := len(p.buf)
	if p.in != rel.t {
		p.buf = appendText(append(p.buf, opTable), []byte(rel.t.Name))
		p.in = rel.t
	}
	if kind == opUpdate && old != nil && row != nil && !sameKey(rel, old, row) {
		kind = opRekey
	}
	p.buf = append(p.buf, kind)
	if kind == opRekey || kind == opDelete {
		if old == nil {
			return fmt.Errorf("%w: transfer/postgres: a change of table %s lacks the old key; its replica identity must cover the primary key", cells.ErrInvalid, rel.t.Name)
		}
		for _, k := range rel.key {
			if k >= len(old.Columns) || old.Columns[k].DataType != pglogrepl.TupleDataTypeText {
				return fmt.Errorf("%w: transfer/postgres: a change of table %s lacks a part of the old key", cells.ErrInvalid, rel.t.Name)
			}
			p.buf = appendText(p.buf, old.Columns[k].Data)
		}
	}
	if row != nil {
		for _, c := range rel.at {
			if c >= len(row.Columns) {
				return errShort
			}
			switch col := row.Columns[c]; col.DataType {
			case pglogrepl.TupleDataTypeNull:
				p.buf = append(p.buf, valNull)
			case pglogrepl.TupleDataTypeToast:
				// With a full replica identity the old row has the value.
				if old != nil && c < len(old.Columns) && old.Columns[c].DataType == pglogrepl.TupleDataTypeText {
					p.buf = appendText(append(p.buf, valText), old.Columns[c].Data)
				} else {
					p.buf = append(p.buf, valUnchanged)
				}
			case pglogrepl.TupleDataTypeText:
				p.buf = appendText(append(p.buf, valText), col.Data)
			default:
				return fmt.Errorf("%w: transfer/postgres: column in format %q", cells.ErrInvalid, col.DataType)
			}
		}
	}
	if len(p.buf)-at > transfer.MaxRowBytes {
		return fmt.Errorf("%w: a row of table %s has %d bytes", transfer.ErrTooLarge, rel.t.Name, len(p.buf)-at)
	}
	if p.count++; len(p.buf) >= transfer.BatchBytes {
		return r.outlet.emit(ctx, p)
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

// tenantKey is the tenant as the table's tenant column writes it.
func (t *table) tenantKey(tenant string) string {
	for _, c := range t.cols {
		if c.name == t.TenantColumn && c.base == "uuid" {
			return strings.ToLower(tenant)
		}
	}
	return tenant
}

// shareable reports whether a tenant's rows can be told from those of others by the
// text of the tenant column, in every table.
func (c *catalog) shareable(tenant cells.TenantID) bool {
	for _, t := range c.tables {
		ok := false
		for _, col := range t.cols {
			if col.name != t.TenantColumn || col.loose {
				continue
			}
			switch col.base {
			case "text", "varchar":
				ok = true
			case "uuid":
				ok = plainUUID(string(tenant))
			}
		}
		if !ok {
			return false
		}
	}
	return len(c.missing) == 0
}

// plainUUID reports whether s is a UUID in the form in which Postgres writes it, but for
// the case of letters.
func plainUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i, c := range []byte(s) {
		switch {
		case i == 8 || i == 13 || i == 18 || i == 23:
			if c != '-' {
				return false
			}
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f', c >= 'A' && c <= 'F':
		default:
			return false
		}
	}
	return true
}
