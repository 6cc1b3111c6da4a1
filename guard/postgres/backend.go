// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// querier is what the guard's own statements need of a driver. Errors are the
// driver's; a missing row is [sql.ErrNoRows] with both drivers.
type querier interface {
	exec(ctx context.Context, query string, args ...any) error
	row(ctx context.Context, query string, args []any, dest ...any) error
	rows(ctx context.Context, query string, args []any, each func(scan func(...any) error) error) error
}

// txn is a transaction at READ COMMITTED, whatever the database's default is.
type txn interface {
	querier
	// detach keeps it open when the context of begin ends.
	detach()
	commit(ctx context.Context) error
	rollback(ctx context.Context)
}

// backend is a pool of connections.
type backend interface {
	querier
	begin(ctx context.Context) (txn, error)
	// listen calls each for every notification on the channels until ctx ends or
	// the connection is lost; ready is called once it listens. errNoListen if the
	// driver cannot.
	listen(ctx context.Context, channels []string, ready func(), each func(channel, payload string)) error
}

var errNoListen = errors.New("guard/postgres: this driver cannot listen")

// --- pgx

type pgxQuery interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, query string, args ...any) pgx.Row
}

type pgxQuerier struct{ q pgxQuery }

func (p pgxQuerier) exec(ctx context.Context, query string, args ...any) error {
	_, err := p.q.Exec(ctx, query, args...)
	return err
}

func (p pgxQuerier) row(ctx context.Context, query string, args []any, dest ...any) error {
	return p.q.QueryRow(ctx, query, args...).Scan(dest...)
}

func (p pgxQuerier) rows(ctx context.Context, query string, args []any, each func(func(...any) error) error) error {
	rows, err := p.q.Query(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

type pgxBackend struct {
	pgxQuerier
	pool *pgxpool.Pool
}

func (b pgxBackend) begin(ctx context.Context) (txn, error) {
	tx, err := b.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, err
	}
	return pgxTxn{pgxQuerier{tx}, tx}, nil
}

func (b pgxBackend) listen(ctx context.Context, channels []string, ready func(), each func(string, string)) error {
	// Its own connection: one of the pool's would be missing there.
	conn, err := pgx.ConnectConfig(ctx, b.pool.Config().ConnConfig.Copy())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return listenOn(ctx, conn, channels, ready, each)
}

func listenOn(ctx context.Context, conn *pgx.Conn, channels []string, ready func(), each func(string, string)) error {
	for _, c := range channels {
		if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{c}.Sanitize()); err != nil {
			return err
		}
	}
	ready()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		each(n.Channel, n.Payload)
	}
}

type pgxTxn struct {
	pgxQuerier
	tx pgx.Tx
}

func (t pgxTxn) detach()                          {}
func (t pgxTxn) commit(ctx context.Context) error { return t.tx.Commit(ctx) }
func (t pgxTxn) rollback(ctx context.Context)     { _ = t.tx.Rollback(ctx) }

// --- database/sql

type sqlQuery interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

type sqlQuerier struct{ q sqlQuery }

func (s sqlQuerier) exec(ctx context.Context, query string, args ...any) error {
	_, err := s.q.ExecContext(ctx, query, args...)
	return err
}

func (s sqlQuerier) row(ctx context.Context, query string, args []any, dest ...any) error {
	return s.q.QueryRowContext(ctx, query, args...).Scan(dest...)
}

func (s sqlQuerier) rows(ctx context.Context, query string, args []any, each func(func(...any) error) error) error {
	rows, err := s.q.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

type sqlBackend struct {
	sqlQuerier
	db *sql.DB
}

func (b sqlBackend) begin(ctx context.Context) (txn, error) {
	tx, err := txrun.Begin(ctx, b.db, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return nil, err
	}
	return sqlTxn{sqlQuerier{tx.Tx}, tx}, nil
}

func (b sqlBackend) listen(ctx context.Context, channels []string, ready func(), each func(string, string)) error {
	conn, err := b.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.Raw(func(driverConn any) error {
		c, ok := driverConn.(*stdlib.Conn)
		if !ok {
			return errNoListen
		}
		// The connection does not go back to the pool: it listens.
		defer c.Conn().Close(context.WithoutCancel(ctx))
		return listenOn(ctx, c.Conn(), channels, ready, each)
	})
}

type sqlTxn struct {
	sqlQuerier
	tx *txrun.Detached
}

func (t sqlTxn) detach()                          { t.tx.Detach() }
func (t sqlTxn) commit(ctx context.Context) error { return t.tx.Commit(ctx) }
func (t sqlTxn) rollback(context.Context)         { t.tx.Rollback() }
