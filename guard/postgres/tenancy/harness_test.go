// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/guard/guardtest"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy/tenancytest"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

func harness(t *testing.T) tenancytest.Harness {
	return tenancytest.Harness{
		Isolations: []string{"READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"},
		Open:       func(ctx context.Context) (tenancytest.Database, error) { return open(ctx, pgtest.DB(t)) },
	}
}

func TestConformance(t *testing.T) {
	pgtest.Cluster(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	tenancytest.Run(guardtest.Wrap(t), harness(t))
}

func TestMutants(t *testing.T) {
	for _, m := range tenancytest.Mutants() {
		m.Check(t, harness(t))
	}
}

type database struct {
	dsn    string
	schema string
	stores []*tenancypg.Store
	raw    tenancytest.Session // of SetRows
}

// open installs the store in a database, in a schema of another name than the
// default, so that nothing depends on it.
func open(ctx context.Context, dsn string) (*database, error) {
	d := &database{dsn: dsn, schema: "held"}
	err := d.Store().Install(ctx)
	return d, err
}

func (d *database) Store() tenancy.Store { return d.store() }

func (d *database) store(opts ...tenancypg.Option) *tenancypg.Store {
	opts = append([]tenancypg.Option{tenancypg.WithSchema(d.schema), tenancypg.WithLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))}, opts...)
	s, err := tenancypg.Open(d.dsn, opts...)
	if err != nil {
		panic(err)
	}
	d.stores = append(d.stores, s)
	return s
}

func (d *database) Close() {
	if d.raw != nil {
		d.raw.Close()
	}
	for _, s := range d.stores {
		s.Close()
	}
}

func (d *database) Session(ctx context.Context, marked bool) (tenancytest.Session, error) {
	cfg, err := pgx.ParseConfig(d.dsn)
	if err != nil {
		return nil, err
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	if marked {
		tenancypg.Mark(cfg, d.schema)
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &session{conn, d.schema}, nil
}

type session struct {
	conn   *pgx.Conn
	schema string
}

func (s *session) Exec(ctx context.Context, query string, args ...any) error {
	_, err := s.conn.Exec(ctx, strings.ReplaceAll(query, "@s", s.schema), args...)
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == tenancy.SQLState {
		return fmt.Errorf("%w: %w", tenancy.ErrRefused, err)
	}
	return err
}

func (s *session) Close() { _ = s.conn.Close(context.Background()) }

func (d *database) SetRows(ctx context.Context, first *tenancy.First, mode tenancy.Mode, self *tenancy.Self, row bool) error {
	if d.raw == nil {
		var err error
		if d.raw, err = d.Session(ctx, true); err != nil {
			return err
		}
	}
	stmts := []string{`BEGIN`, `ALTER TABLE @s.own_first DISABLE TRIGGER USER`, `DELETE FROM @s.own_first`, `DELETE FROM @s.own_mode`, `DELETE FROM @s.own_self`, `DELETE FROM @s.tenancy`}
	if first != nil {
		stmts = append(stmts, fmt.Sprintf(`INSERT INTO @s.own_first (first, cell) VALUES (%t, '%s')`, first.First, first.Cell))
	}
	if mode != "" {
		stmts = append(stmts, fmt.Sprintf(`INSERT INTO @s.own_mode (mode) VALUES ('%s')`, mode))
	}
	if self != nil {
		stmts = append(stmts, fmt.Sprintf(`INSERT INTO @s.own_self (current) VALUES ('%s')`, self.Current.Encode()))
	}
	if row {
		stmts = append(stmts, `INSERT INTO @s.tenancy (tenant) VALUES ('held')`)
	}
	stmts = append(stmts, `ALTER TABLE @s.own_first ENABLE ALWAYS TRIGGER own_first_row`, `ALTER TABLE @s.own_first ENABLE ALWAYS TRIGGER own_first_truncate`, `COMMIT`)
	return d.raw.Exec(ctx, strings.Join(stmts, "; "))
}
