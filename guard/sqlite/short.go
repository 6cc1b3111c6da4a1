// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"sync"

	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/sqltx"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// Tx is a guarded transaction: a [sql.Tx] with the admission's Tenant, Epoch and
// Cell, with Emit and with a Commit that tells what became of it.
type Tx = sqltx.Tx

// Write is [Guard.InTx], with the admission and Emit at hand:
//
//	err := g.Write(r.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
//		if _, err := tx.ExecContext(ctx, `UPDATE accounts SET ... WHERE tenant = ?`, tx.Tenant); err != nil {
//			return err
//		}
//		return tx.Emit(ctx, "account.changed", change)
//	})
//
// fn may run more than once, as in InTx.
func (g *Guard) Write(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) error {
	return g.with(ctx, nil, fn)
}

// Read runs fn in a read-only transaction with one snapshot, in which the fence is
// looked at first: what fn reads is what the tenant's one writer has written.
// Errors as those of InTx.
func (g *Guard) Read(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) error {
	return g.with(ctx, &sql.TxOptions{ReadOnly: true}, fn)
}

func (g *Guard) with(ctx context.Context, opts *sql.TxOptions, fn func(ctx context.Context, tx *Tx) error) error {
	return g.InTx(ctx, opts, func(ctx context.Context, tx *sql.Tx) error {
		a, err := guard.AdmissionFrom(ctx, g.withoutCells)
		if err != nil {
			return err
		}
		return fn(ctx, sqltx.New(g, tx, a, nil))
	})
}

// Begin begins a transaction that is admitted for the context's admission, for
// callers that end it by themselves. It holds the file's write lock, and this
// guard's turn to write, until then; the end of ctx rolls it back, unless Commit
// was called before. It is not tried again. Errors as those of InTx.
func (g *Guard) Begin(ctx context.Context, opts *sql.TxOptions) (*Tx, error) {
	a, err := guard.AdmissionFrom(ctx, g.withoutCells)
	if err != nil {
		return nil, err
	}
	admit, leave := g.look, func() {}
	if opts == nil || !opts.ReadOnly {
		admit = g.admit
		if leave, err = g.enter(ctx); err != nil {
			return nil, err
		}
	}
	t, err := g.begin(ctx, opts, leave)
	if err != nil {
		return nil, err
	}
	if err := admit(ctx, t.Tx, a); err != nil {
		_ = t.Rollback()
		return nil, err
	}
	t.Admission = a
	return t, nil
}

// BeginUnadmitted begins a transaction that is to write to the tenants' tables only
// after its Admit or AdmitClosed. SQLite itself does not see to that.
func (g *Guard) BeginUnadmitted(ctx context.Context, opts *sql.TxOptions) (*Tx, error) {
	return g.begin(ctx, opts, func() {})
}

// begin begins a transaction; leave gives the turn back, at its end or at ctx's.
func (g *Guard) begin(ctx context.Context, opts *sql.TxOptions, leave func()) (*Tx, error) {
	once := sync.OnceFunc(leave)
	d, err := txrun.Begin(ctx, g.db, opts)
	if err != nil {
		once()
		return nil, ended(ctx, translate(err))
	}
	stop := context.AfterFunc(ctx, once)
	var t *Tx
	t = sqltx.New(g, d.Tx, guard.Admission{}, func(commit, emitted bool) error {
		defer once()
		defer stop()
		defer d.Rollback()
		defer g.forget(d.Tx)
		if !commit {
			return nil
		}
		err := g.commit(ctx, d)
		if emitted && (err == nil || errors.Is(err, guard.ErrCommitUnknown)) {
			g.hub.Wake(t.Tenant)
		}
		return err
	})
	return t, nil
}

// Translate adds to a driver's error the sentinel that a caller can act on
// ([guard.ErrContended], [cells.ErrUnavailable]), as InTx does; other errors pass
// unchanged. For callers that end their transactions by themselves.
func (g *Guard) Translate(err error) error { return translate(err) }
