// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"weak"

	"github.com/google/uuid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/hub"
	"github.com/cloister-dev/cloister/guard/internal/rules"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// Guard is the guard of one SQLite file. It is a [guard.Keeper], [guard.Outbox]
// and [guard.RelayStore], safe for concurrent use; several processes may each
// have one for the same file.
type Guard struct {
	config
	db    *sql.DB
	hub   *hub.Hub
	relay relayLock

	// turn is held by the one transaction of this guard that writes. Waiting here is
	// fair and short, waiting for SQLite's lock is neither.
	turn chan struct{}

	// admitted has the transactions that were admitted: *sql.Tx (weak) to admission.
	admitted sync.Map
}

var (
	_ guard.Keeper     = (*Guard)(nil)
	_ guard.RelayStore = (*Guard)(nil)
)

// admission is what a transaction was admitted for.
type admission struct {
	guard.Admission
	// closed: for an import or a removal; it cannot emit.
	closed bool
}

// New returns the guard of db. It does not open the file; call Install before
// the first use. Close it before db.
func New(db *sql.DB, opts ...Option) (*Guard, error) {
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, err
	}
	g := &Guard{config: cfg, db: db, turn: make(chan struct{}, 1)}
	g.hub = hub.New(g.pollLoop)
	return g, nil
}

// InTx runs fn in a transaction that is admitted for the tenant of the context's
// admission (see [guard.AdmissionFrom]) and commits it if fn returns nil. It holds
// the file's write lock from before fn to the end. fn uses its own ctx and
// tx, and runs again, in a new transaction, when the database was busy (see
// [WithRetries]): it must not change anything but the transaction and its own
// variables. It must not call InTx again. opts may be nil; a read-only
// transaction takes no lock, its fence is only looked at.
//
// After an error nothing was written, except after [guard.ErrCommitUnknown].
// The error wraps [cells.ErrFenced] when the tenant is not written here at the
// admission's epoch; [guard.ErrContended] when all tries found the database
// busy; [cells.ErrUnavailable] when the file cannot be written (a full disk). fn's
// own errors pass unchanged, with what they wrap.
func (g *Guard) InTx(ctx context.Context, opts *sql.TxOptions, fn func(ctx context.Context, tx *sql.Tx) error) error {
	a, err := guard.AdmissionFrom(ctx, g.withoutCells)
	if err != nil {
		return err
	}
	for try := 0; ; try++ {
		emitted, err := g.inTx(ctx, a, opts, fn)
		if emitted && (err == nil || errors.Is(err, guard.ErrCommitUnknown)) {
			g.hub.Wake(a.Tenant)
		}
		if !guard.RetryHere(err) || try >= g.retries || ctx.Err() != nil {
			return err
		}
		if err := txrun.Backoff(ctx, try); err != nil {
			return err
		}
	}
}

func (g *Guard) inTx(ctx context.Context, a guard.Admission, opts *sql.TxOptions, fn func(ctx context.Context, tx *sql.Tx) error) (emitted bool, err error) {
	admit := g.look
	if opts == nil || !opts.ReadOnly {
		admit = g.admit
		leave, err := g.enter(ctx)
		if err != nil {
			return false, err
		}
		defer leave()
	}
	d, err := txrun.Begin(ctx, g.db, opts)
	if err != nil {
		return false, ended(ctx, translate(err))
	}
	defer d.Rollback()
	defer g.forget(d.Tx)
	if err := admit(ctx, d.Tx, a); err != nil {
		return false, err
	}
	ctx, emits := txrun.CountEmits(guard.ContextWith(ctx, a))
	if err := fn(ctx, d.Tx); err != nil {
		return false, translate(err)
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	return emits.Load(), g.commit(ctx, d)
}

// enter waits for the turn to write, at most for the lock wait.
func (g *Guard) enter(ctx context.Context) (leave func(), err error) {
	t := time.NewTimer(g.lockWait)
	defer t.Stop()
	select {
	case g.turn <- struct{}{}:
		return func() { <-g.turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-t.C:
		return nil, fmt.Errorf("%w: a transaction of this process has been writing for %s", cells.ErrUnavailable, g.lockWait)
	}
}

// look checks the fence for a transaction that only reads.
func (g *Guard) look(ctx context.Context, tx *sql.Tx, a guard.Admission) error {
	if err := a.Tenant.Validate(); err != nil {
		return err
	}
	row, _, err := fenceRow(ctx, tx, a.Tenant)
	if err != nil {
		return ended(ctx, translate(err))
	}
	return rules.Admit(row, a.Epoch)
}

func (g *Guard) commit(ctx context.Context, d *txrun.Detached) error {
	cctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), g.commitWait, errors.New("guard/sqlite: the commit took too long"))
	defer cancel()
	return translateCommit(d.Commit(cctx))
}

// Admit admits a transaction that the caller began, for callers that cannot use
// InTx. It takes the file's write lock (also in a transaction begun as
// deferred) and must precede the first write. After an error the transaction
// must be rolled back. Errors: [cells.ErrFenced], [guard.ErrContended],
// [cells.ErrUnavailable].
//
// SQLite itself does not refuse the writes of a transaction that was not
// admitted, nor rows of other tenants.
func (g *Guard) Admit(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch) error {
	return g.admit(ctx, tx, guard.Admission{Tenant: tenant, Epoch: epoch, Cell: g.cell})
}

func (g *Guard) admit(ctx context.Context, tx *sql.Tx, a guard.Admission) error {
	if err := a.Tenant.Validate(); err != nil {
		return err
	}
	if a.Cell == "" {
		a.Cell = g.cell
	}
	row, found, err := g.lockedFence(ctx, tx, a.Tenant)
	if err != nil {
		return ended(ctx, translate(err))
	}
	if err := rules.Admit(row, a.Epoch); err != nil {
		return err
	}
	if !found {
		if err := putFence(ctx, tx, row); err != nil {
			return ended(ctx, translate(err))
		}
	}
	g.remember(tx, admission{Admission: a})
	return nil
}

// AdmitClosed lets the transaction import or remove the tenant's rows: while its
// fence is closed at exactly epoch by move; by any move when move is "".
// Otherwise the error wraps [cells.ErrStaleOrder]. Orders to the fence wait for
// the transaction's end. It cannot Emit.
func (g *Guard) AdmitClosed(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	if err := tenant.Validate(); err != nil {
		return err
	}
	row, _, err := g.lockedFence(ctx, tx, tenant)
	if err != nil {
		return ended(ctx, translate(err))
	}
	if err := rules.AdmitClosed(row, epoch, move, move == ""); err != nil {
		return err
	}
	g.remember(tx, admission{Admission: guard.Admission{Tenant: tenant, Epoch: epoch, Cell: g.cell}, closed: true})
	return nil
}

// remember keeps the admission for as long as somebody holds tx.
func (g *Guard) remember(tx *sql.Tx, a admission) {
	k := weak.Make(tx)
	if _, there := g.admitted.Swap(k, a); !there {
		runtime.AddCleanup(tx, func(k weak.Pointer[sql.Tx]) { g.admitted.Delete(k) }, k)
	}
}

func (g *Guard) forget(tx *sql.Tx) { g.admitted.Delete(weak.Make(tx)) }

// Emit writes an event into the outbox, in the admitted transaction, and returns
// its event_seq, which holds once the transaction has committed. payload is
// anything that encodes to JSON. Errors: [cells.ErrFenced] without an
// admission, [guard.ErrContended], [cells.ErrInvalid] for a type or payload
// that cannot be stored.
func (g *Guard) Emit(ctx context.Context, tx *sql.Tx, typ string, payload any) (cells.EventSeq, error) {
	if typ == "" || len(typ) > guard.MaxEventType {
		return 0, fmt.Errorf("%w: event type has %d bytes, want 1 to %d", cells.ErrInvalid, len(typ), guard.MaxEventType)
	}
	body, err := json.Marshal(payload)
	if err != nil {
		return 0, fmt.Errorf("%w: event payload: %w", cells.ErrInvalid, err)
	}
	v, ok := g.admitted.Load(weak.Make(tx))
	if !ok || v.(admission).closed {
		return 0, fmt.Errorf("%w: the transaction has no admission", cells.ErrFenced)
	}
	a := v.(admission)
	id, err := uuid.NewRandom()
	if err != nil {
		return 0, err
	}
	seq, err := nextSeq(ctx, tx, a.Tenant)
	if err == nil {
		_, err = tx.ExecContext(ctx, `INSERT INTO cell_outbox (tenant, event_seq, epoch, cell, id, type, payload, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
			string(a.Tenant), int64(seq), int64(a.Epoch), string(a.Cell), id.String(), typ, string(body), time.Now().UTC().Format(timeFormat))
	}
	if err != nil {
		return 0, ended(ctx, translate(err))
	}
	txrun.MarkEmit(ctx)
	return seq, nil
}

const timeFormat = "2006-01-02T15:04:05.000000Z"

func nextSeq(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) (cells.EventSeq, error) {
	var seq int64
	err := tx.QueryRowContext(ctx, `UPDATE cell_outbox_head SET seq = seq + 1 WHERE tenant = ? RETURNING seq`, string(tenant)).Scan(&seq)
	if errors.Is(err, sql.ErrNoRows) {
		err = tx.QueryRowContext(ctx, `INSERT INTO cell_outbox_head (tenant, seq) VALUES (?1, 1 + `+lastSeq+`) RETURNING seq`, string(tenant)).Scan(&seq)
	}
	return cells.EventSeq(seq), err
}

// lastSeq is the highest event_seq that the file knows of tenant ?1.
const lastSeq = `max(coalesce((SELECT seq FROM cell_outbox_head WHERE tenant = ?1), 0),
	coalesce((SELECT max(event_seq) FROM cell_outbox WHERE tenant = ?1), 0),
	coalesce((SELECT seq FROM cell_outbox_published WHERE tenant = ?1), 0))`

// Close ends the guard's background work, its publications' turns and every
// wait. The database stays open; it is the caller's.
func (g *Guard) Close() {
	g.hub.Close()
	g.relay.release()
}
