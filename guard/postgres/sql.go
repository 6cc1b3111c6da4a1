// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// SQL is the guard of one cell's database for a service that uses database/sql,
// with pgx's driver or another one for Postgres. It is a [guard.Keeper],
// [guard.Outbox] and [guard.RelayStore], safe for concurrent use. With a driver
// other than pgx's, waiting streams poll.
type SQL struct {
	*core
	db *sql.DB
}

var (
	_ guard.Keeper     = (*SQL)(nil)
	_ guard.RelayStore = (*SQL)(nil)
)

// NewSQL returns the guard of db. It does not connect; call Install before the
// first use. Close it before db.
func NewSQL(db *sql.DB, opts ...Option) (*SQL, error) {
	c, err := newCore(sqlBackend{sqlQuerier{db}, db}, opts)
	if err != nil {
		return nil, err
	}
	return &SQL{core: c, db: db}, nil
}

// InTx is [Guard.InTx] for database/sql. opts may be nil.
func (g *SQL) InTx(ctx context.Context, opts *sql.TxOptions, fn func(ctx context.Context, tx *sql.Tx) error) error {
	return g.retry(ctx, func(a guard.Admission) (bool, error) { return g.inTx(ctx, a, opts, fn) })
}

func (g *SQL) inTx(ctx context.Context, a guard.Admission, opts *sql.TxOptions, fn func(ctx context.Context, tx *sql.Tx) error) (emitted bool, err error) {
	d, err := txrun.Begin(ctx, g.db, opts)
	if err != nil {
		return false, ended(ctx, unavailable(err))
	}
	defer d.Rollback()
	if err := g.admit(ctx, sqlQuerier{d.Tx}, a); err != nil {
		return false, err
	}
	ctx, emits := txrun.CountEmits(guard.ContextWith(ctx, a))
	if err := fn(ctx, d.Tx); err != nil {
		return false, translate(err)
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	return emits.Load(), g.commit(ctx, sqlTxn{sqlQuerier{d.Tx}, d})
}

// Admit is [Guard.Admit] for database/sql.
func (g *SQL) Admit(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch) error {
	return g.admit(ctx, sqlQuerier{tx}, guard.Admission{Tenant: tenant, Epoch: epoch, Cell: g.cell})
}

// AdmitClosed is [Guard.AdmitClosed] for database/sql.
func (g *SQL) AdmitClosed(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	return g.admitClosed(ctx, sqlQuerier{tx}, tenant, epoch, move)
}

// Emit is [Guard.Emit] for database/sql.
func (g *SQL) Emit(ctx context.Context, tx *sql.Tx, typ string, payload any) (cells.EventSeq, error) {
	return g.emit(ctx, sqlQuerier{tx}, typ, payload)
}
