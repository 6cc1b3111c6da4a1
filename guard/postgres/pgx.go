// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// Guard is the guard of one cell's database for a service that uses pgx. It is a
// [guard.Keeper], [guard.Outbox] and [guard.RelayStore], safe for concurrent use.
type Guard struct {
	*core
	pool *pgxpool.Pool
}

var (
	_ guard.Keeper     = (*Guard)(nil)
	_ guard.RelayStore = (*Guard)(nil)
)

// New returns the guard of the pool's database. It does not connect; call
// Install before the first use. Close it before the pool.
func New(pool *pgxpool.Pool, opts ...Option) (*Guard, error) {
	c, err := newCore(pgxBackend{pgxQuerier{pool}, pool}, opts)
	if err != nil {
		return nil, err
	}
	return &Guard{core: c, pool: pool}, nil
}

// InTx runs fn in a transaction that is admitted for the tenant of the context's
// admission (see [guard.AdmissionFrom]) and commits it if fn returns nil. fn
// uses its own ctx and tx, and runs again, in a new transaction, when the
// server gave this one up in favour of another (see [WithRetries]): it must not
// change anything but the transaction and its own variables.
//
// After an error nothing was written, except after [guard.ErrCommitUnknown].
// The error wraps [cells.ErrFenced] when the tenant is not written here at the
// admission's epoch; [guard.ErrContended] when all tries were given up;
// [cells.ErrUnavailable] when the server cannot be reached. fn's own errors pass
// unchanged, with what they wrap.
func (g *Guard) InTx(ctx context.Context, opts pgx.TxOptions, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return g.retry(ctx, func(a guard.Admission) (bool, error) { return g.inTx(ctx, a, opts, fn) })
}

func (g *Guard) inTx(ctx context.Context, a guard.Admission, opts pgx.TxOptions, fn func(ctx context.Context, tx pgx.Tx) error) (emitted bool, err error) {
	tx, err := g.pool.BeginTx(ctx, opts)
	if err != nil {
		return false, ended(ctx, unavailable(err))
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	if err := g.admit(ctx, pgxQuerier{tx}, a); err != nil {
		return false, err
	}
	ctx, emits := txrun.CountEmits(guard.ContextWith(ctx, a))
	if err := fn(ctx, tx); err != nil {
		return false, translate(err)
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	return emits.Load(), g.commit(ctx, pgxTxn{pgxQuerier{tx}, tx})
}

// Admit admits a transaction that the caller began, for callers that cannot use
// InTx. It must precede the transaction's first write; the transaction may be at
// any isolation level. A savepoint that is rolled back takes back what was
// admitted in it. After an error the transaction must be rolled back.
// Errors: [cells.ErrFenced], [guard.ErrContended], [cells.ErrUnavailable].
func (g *Guard) Admit(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, epoch cells.Epoch) error {
	return g.admit(ctx, pgxQuerier{tx}, guard.Admission{Tenant: tenant, Epoch: epoch, Cell: g.cell})
}

// AdmitClosed lets the transaction import or remove the tenant's rows: while its
// fence is closed at exactly epoch by move; by any move when move is "".
// Otherwise the error wraps [cells.ErrStaleOrder]. Orders to the fence wait for
// the transaction's end. It cannot Emit.
func (g *Guard) AdmitClosed(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	return g.admitClosed(ctx, pgxQuerier{tx}, tenant, epoch, move)
}

// Emit writes an event into the outbox, in the admitted transaction, and returns
// its event_seq, which holds once the transaction has committed. payload is
// anything that encodes to JSON. Until the transaction ends no other one can
// emit for the tenant, so emit last; at REPEATABLE READ and SERIALIZABLE
// transactions that emit for one tenant at the same time are run again.
// Errors: [cells.ErrFenced] without an admission, [guard.ErrContended],
// [cells.ErrInvalid] for a type or payload that cannot be stored.
func (g *Guard) Emit(ctx context.Context, tx pgx.Tx, typ string, payload any) (cells.EventSeq, error) {
	return g.emit(ctx, pgxQuerier{tx}, typ, payload)
}

// --- shared by both drivers

// retry runs a transaction until it is not given up for another.
func (c *core) retry(ctx context.Context, once func(guard.Admission) (emitted bool, err error)) error {
	a, err := guard.AdmissionFrom(ctx, c.withoutCells)
	if err != nil {
		return err
	}
	for try := 0; ; try++ {
		emitted, err := once(a)
		if emitted && (err == nil || errors.Is(err, guard.ErrCommitUnknown)) {
			c.announce(a.Tenant)
		}
		if !guard.RetryHere(err) || try >= c.retries || ctx.Err() != nil {
			return err
		}
		if err := txrun.Backoff(ctx, try); err != nil {
			return err
		}
	}
}

func (c *core) admit(ctx context.Context, q querier, a guard.Admission) error {
	if err := a.Tenant.Validate(); err != nil {
		return err
	}
	if a.Epoch > 1<<63-1 {
		return fmt.Errorf("%w: epoch %d", cells.ErrFenced, a.Epoch)
	}
	cell := a.Cell
	if cell == "" {
		cell = c.cell
	}
	return ended(ctx, translate(q.exec(ctx, c.q(`SELECT @s.admit($1, $2, $3)`), string(a.Tenant), int64(a.Epoch), string(cell))))
}

func (c *core) admitClosed(ctx context.Context, q querier, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	if err := tenant.Validate(); err != nil {
		return err
	}
	if epoch > 1<<63-1 {
		return fmt.Errorf("%w: epoch %d", cells.ErrStaleOrder, epoch)
	}
	var m any
	if move != "" {
		m = string(move)
	}
	return ended(ctx, translate(q.exec(ctx, c.q(`SELECT @s.admit_closed($1, $2, $3)`), string(tenant), int64(epoch), m)))
}

// EmitCall returns the call of emit as an SQL expression, for a statement of the
// caller's that takes the number and writes rows with it in one round trip, which
// matters because other transactions of the tenant that emit wait until this one
// ends:
//
//	call, args, err := g.EmitCall(ctx, "account.changed", change, 1)
//	tx.Query(ctx, `WITH event AS MATERIALIZED (SELECT `+call+` AS seq)
//		UPDATE accounts SET balance = $3, event_seq = (SELECT seq FROM event) WHERE tenant = $4 RETURNING event_seq`,
//		append(args, balance, tenant)...)
//
// first is the number of the first of its two parameters, 1 to 65534; ctx is that of
// the function of InTx or Write: streams hear of an event of another transaction by
// polling. The statement's errors pass through [Guard.Translate]
// where InTx does not do it. [cells.ErrInvalid] for a type or payload that cannot be
// stored.
func (c *core) EmitCall(ctx context.Context, typ string, payload any, first int) (call string, args []any, err error) {
	if typ == "" || len(typ) > guard.MaxEventType {
		return "", nil, fmt.Errorf("%w: event type has %d bytes, want 1 to %d", cells.ErrInvalid, len(typ), guard.MaxEventType)
	}
	body, err := json.Marshal(payload)
	if err != nil {
		return "", nil, fmt.Errorf("%w: event payload: %w", cells.ErrInvalid, err)
	}
	txrun.MarkEmit(ctx)
	return fmt.Sprintf("%s($%d, $%d::text::json)", c.q("@s.emit"), first, first+1), []any{typ, string(body)}, nil
}

func (c *core) emit(ctx context.Context, q querier, typ string, payload any) (cells.EventSeq, error) {
	call, args, err := c.EmitCall(ctx, typ, payload, 1)
	if err != nil {
		return 0, err
	}
	var seq int64
	if err := q.row(ctx, "SELECT "+call, args, &seq); err != nil {
		return 0, ended(ctx, translate(err))
	}
	return cells.EventSeq(seq), nil
}
