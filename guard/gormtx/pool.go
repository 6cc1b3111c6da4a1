// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"gorm.io/gorm"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/sqltx"
)

// check looks at what a statement writes. a is zero without an admission; importing
// is set under one of AdmitClosed, which may bring events as well.
func (p *Plugin) check(ws []write, a guard.Admission, importing bool, args []any) error {
	if p.cfg.noCheck {
		return nil
	}
	for i := range ws {
		w := &ws[i]
		if w.table == "" {
			return fmt.Errorf("%w: the table of a %s cannot be read", cells.ErrFenced, w.verb)
		}
		for _, t := range p.outbox {
			if !strings.EqualFold(t.Name, w.table) && !strings.EqualFold(t.Name, w.schema+"."+w.table) {
				continue
			}
			if importing {
				if err := w.check(t.TenantColumn, a, args); err != nil {
					return err
				}
			} else {
				return fmt.Errorf("%w: %s of %s: events are written by Emit", cells.ErrFenced, w.verb, t.Name)
			}
		}
		if column, ok := p.columns[base(w.table)]; ok {
			if err := w.check(column, a, args); err != nil {
				return err
			}
		}
	}
	return nil
}

// pool stands in the place of GORM's pool of connections.
type pool struct {
	p  *Plugin
	db *sql.DB
}

var (
	_ gorm.ConnPool         = (*pool)(nil)
	_ gorm.ConnPoolBeginner = (*pool)(nil)
	_ gorm.GetDBConnector   = (*pool)(nil)
	_ gorm.Tx               = (*tx)(nil)
	_ gorm.GetDBConnector   = (*tx)(nil)
)

// GetDBConn implements [gorm.GetDBConnector].
func (l *pool) GetDBConn() (*sql.DB, error) { return l.db, nil }

// BeginTx implements [gorm.ConnPoolBeginner]: the transaction has passed the fence
// if the context has an admission.
func (l *pool) BeginTx(ctx context.Context, opts *sql.TxOptions) (gorm.ConnPool, error) {
	t, err := l.p.g.Begin(ctx, opts)
	if errors.Is(err, guard.ErrNoAdmission) {
		t, err = l.p.g.BeginUnadmitted(ctx, opts)
	}
	if err != nil {
		return nil, err
	}
	own := &tx{p: l.p, t: t, db: l.db, readOnly: opts != nil && opts.ReadOnly}
	if t.Tenant != "" {
		if err := own.arm(ctx); err != nil {
			_ = t.Rollback()
			return nil, err
		}
	}
	return own, nil
}

// PrepareContext implements [gorm.ConnPool].
func (l *pool) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	if len(writes(query)) > 0 {
		return nil, fmt.Errorf("%w: gormtx does not prepare statements that write", cells.ErrInvalid)
	}
	return l.db.PrepareContext(ctx, query)
}

// ExecContext implements [gorm.ConnPool]. A statement that writes gets a
// transaction of its own.
func (l *pool) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if len(writes(query)) == 0 {
		return l.db.ExecContext(ctx, query, args...)
	}
	c, err := l.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	t := c.(*tx)
	defer func() { _ = t.Rollback() }()
	res, err := t.ExecContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return res, t.Commit()
}

// QueryContext implements [gorm.ConnPool].
func (l *pool) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if len(writes(query)) > 0 {
		return nil, ErrNoTransaction
	}
	return l.db.QueryContext(ctx, query, args...)
}

// QueryRowContext implements [gorm.ConnPool].
func (l *pool) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	if len(writes(query)) > 0 {
		ctx = over(ctx, ErrNoTransaction)
	}
	return l.db.QueryRowContext(ctx, query, args...)
}

// over is an ended context, the only way to make a [sql.Row] that fails.
func over(ctx context.Context, cause error) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	return ctx
}

// tx is a transaction of GORM's.
type tx struct {
	p        *Plugin
	t        *sqltx.Tx
	db       *sql.DB
	readOnly bool
	armed    bool
	closed   bool // admitted by AdmitClosed
}

func (t *tx) check(query string, args []any) error {
	return t.p.check(writes(query), t.t.Admission, t.closed, args)
}

// GetDBConn implements [gorm.GetDBConnector].
func (t *tx) GetDBConn() (*sql.DB, error) { return t.db, nil }

// arm makes SQLite's triggers expect the admitted tenant.
func (t *tx) arm(ctx context.Context) error {
	if !t.p.sqlite || t.readOnly || t.p.cfg.noTriggers {
		return nil
	}
	t.armed = true
	return t.p.translate(t.p.armSQLite(ctx, t.t.Tx, string(t.t.Tenant)))
}

// PrepareContext implements [gorm.ConnPool].
func (t *tx) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	if len(writes(query)) > 0 {
		return nil, fmt.Errorf("%w: gormtx does not prepare statements that write", cells.ErrInvalid)
	}
	return t.t.PrepareContext(ctx, query)
}

// StmtContext implements [gorm.Tx].
func (t *tx) StmtContext(ctx context.Context, stmt *sql.Stmt) *sql.Stmt {
	return t.t.StmtContext(ctx, stmt)
}

// ExecContext implements [gorm.ConnPool].
func (t *tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := t.check(query, args); err != nil {
		return nil, err
	}
	res, err := t.t.ExecContext(ctx, query, args...)
	return res, t.p.translate(err)
}

// QueryContext implements [gorm.ConnPool].
func (t *tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := t.check(query, args); err != nil {
		return nil, err
	}
	rows, err := t.t.QueryContext(ctx, query, args...)
	return rows, t.p.translate(err)
}

// QueryRowContext implements [gorm.ConnPool].
func (t *tx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	if err := t.check(query, args); err != nil {
		ctx = over(ctx, err)
	}
	return t.t.QueryRowContext(ctx, query, args...)
}

// Commit implements [gorm.TxCommitter].
func (t *tx) Commit() error {
	if t.armed {
		if _, err := t.t.ExecContext(context.Background(), disarmSQL); err != nil {
			_ = t.t.Rollback()
			return t.p.translate(err)
		}
	}
	return t.t.Commit()
}

// Rollback implements [gorm.TxCommitter].
func (t *tx) Rollback() error { return t.t.Rollback() }
