// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/sqltx"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// Tx is the transaction of [Guard.Write] and [Guard.Read]: pgx's own, with the
// admission's Tenant, Epoch and Cell. One goroutine uses it; it must neither commit
// nor roll it back.
type Tx struct {
	pgx.Tx
	guard.Admission
	// Seq is the event_seq of the last event that was emitted, 0 before. It holds
	// once Write has returned nil.
	Seq cells.EventSeq

	g *Guard
}

// Emit writes an event into the outbox, in this transaction: [Guard.Emit].
func (t *Tx) Emit(ctx context.Context, typ string, payload any) error {
	seq, err := t.g.Emit(ctx, t.Tx, typ, payload)
	if err == nil {
		t.Seq = seq
	}
	return err
}

// Write is [Guard.InTx] at READ COMMITTED, with the admission and Emit at hand:
//
//	err := g.Write(r.Context(), func(ctx context.Context, tx *postgres.Tx) error {
//		if _, err := tx.Exec(ctx, `UPDATE accounts SET ... WHERE tenant = $1`, tx.Tenant); err != nil {
//			return err
//		}
//		return tx.Emit(ctx, "account.changed", change)
//	})
//
// fn may run more than once, as in InTx.
func (g *Guard) Write(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) error {
	return g.with(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, fn)
}

// Read runs fn in a read-only transaction with one snapshot, which is checked
// against the fence first: what fn reads is what the tenant's one writer has
// written. Errors as those of InTx.
func (g *Guard) Read(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) error {
	return g.with(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, fn)
}

func (g *Guard) with(ctx context.Context, opts pgx.TxOptions, fn func(ctx context.Context, tx *Tx) error) error {
	return g.InTx(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		a, err := guard.AdmissionFrom(ctx, g.withoutCells)
		if err != nil {
			return err
		}
		return fn(ctx, &Tx{Tx: tx, Admission: a, g: g})
	})
}

// SQLTx is a guarded transaction of database/sql: a [sql.Tx] with the admission's
// Tenant, Epoch and Cell, with Emit and with a Commit that tells what became of it.
type SQLTx = sqltx.Tx

// Write is [Guard.Write] for database/sql.
func (g *SQL) Write(ctx context.Context, fn func(ctx context.Context, tx *SQLTx) error) error {
	return g.with(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted}, fn)
}

// Read is [Guard.Read] for database/sql.
func (g *SQL) Read(ctx context.Context, fn func(ctx context.Context, tx *SQLTx) error) error {
	return g.with(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true}, fn)
}

func (g *SQL) with(ctx context.Context, opts *sql.TxOptions, fn func(ctx context.Context, tx *SQLTx) error) error {
	return g.InTx(ctx, opts, func(ctx context.Context, tx *sql.Tx) error {
		a, err := guard.AdmissionFrom(ctx, g.withoutCells)
		if err != nil {
			return err
		}
		return fn(ctx, sqltx.New(g, tx, a, nil))
	})
}

// Begin begins a transaction that is admitted for the context's admission, for
// callers that end it by themselves. The end of ctx rolls it back, unless Commit
// was called before. It is not tried again. Errors as those of InTx.
func (g *SQL) Begin(ctx context.Context, opts *sql.TxOptions) (*SQLTx, error) {
	a, err := guard.AdmissionFrom(ctx, g.withoutCells)
	if err != nil {
		return nil, err
	}
	t, err := g.BeginUnadmitted(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := g.admit(ctx, sqlQuerier{t.Tx}, a); err != nil {
		_ = t.Rollback()
		return nil, err
	}
	t.Admission = a
	return t, nil
}

// BeginUnadmitted begins a transaction that can only read the tenants' tables until
// its Admit or AdmitClosed was called.
func (g *SQL) BeginUnadmitted(ctx context.Context, opts *sql.TxOptions) (*SQLTx, error) {
	d, err := txrun.Begin(ctx, g.db, opts)
	if err != nil {
		return nil, ended(ctx, unavailable(err))
	}
	var t *SQLTx
	t = sqltx.New(g, d.Tx, guard.Admission{}, func(commit, emitted bool) error {
		defer d.Rollback()
		if !commit {
			return nil
		}
		err := g.commit(ctx, sqlTxn{sqlQuerier{d.Tx}, d})
		if emitted && (err == nil || errors.Is(err, guard.ErrCommitUnknown)) {
			g.announce(t.Tenant)
		}
		return err
	})
	return t, nil
}

// Translate adds to a driver's error the sentinel that a caller can act on
// ([cells.ErrFenced], [guard.ErrContended], [cells.ErrUnavailable]), as InTx does; other
// errors pass unchanged. For callers that end their transactions by themselves.
func (c *core) Translate(err error) error { return translate(err) }
