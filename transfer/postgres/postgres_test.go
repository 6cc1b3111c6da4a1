// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardpostgres "github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/postgres"
	"github.com/cloister-dev/cloister/transfer/transfertest"
)

var harness = transfertest.Harness{Engine: "postgres", New: newCell, Reopen: reopen}

func TestMain(m *testing.M) {
	code, child := transfertest.Child(harness)
	if child {
		os.Exit(code)
	}
	code = pgtest.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func TestSuite(t *testing.T)   { transfertest.Run(t, harness) }
func TestMutants(t *testing.T) { transfertest.Mutants(t, harness) }

func BenchmarkCopy(b *testing.B) { transfertest.BenchmarkCopy(b, harness) }
func BenchmarkCut(b *testing.B)  { transfertest.BenchmarkCut(b, harness) }

// cell is one database with the suite's tables.
type cell struct {
	id    cells.CellID
	url   string
	pool  *pgxpool.Pool
	guard *guardpostgres.Guard
	store *postgres.Store
}

// spare are databases that a test has left clean: making one is most of the time
// of a short test.
var spare = make(chan string, 16)

func newCell(tb transfertest.TB, id cells.CellID, o transfertest.Options) transfertest.Cell {
	tb.Helper()
	var url string
	fresh := false
	select {
	case url = <-spare:
	default:
		url, fresh = pgtest.DB(realTB(tb)), true
	}
	c, err := open(tb.Context(), id, url, fresh, o)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() {
		err := c.reset(context.Background())
		c.close()
		if err == nil {
			spare <- url
		} else {
			tb.Logf("the database is not used again: %v", err)
		}
	})
	return c
}

// reset empties the database.
func (c *cell) reset(ctx context.Context) error {
	var spoiled bool
	if err := c.pool.QueryRow(ctx, "SELECT to_regclass('spoiled') IS NOT NULL").Scan(&spoiled); err != nil || spoiled {
		return errors.Join(err, errors.New("its schema was changed"))
	}
	for _, q := range []string{
		"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database() AND active_pid IS NOT NULL",
		"DO $$ DECLARE p text; BEGIN FOR p IN SELECT pubname FROM pg_publication LOOP EXECUTE format('DROP PUBLICATION %I', p); END LOOP; END $$",
		`DO $$ DECLARE t text; BEGIN FOR t IN SELECT tenant FROM cell.fence LOOP PERFORM set_config('cell.admitted', pg_current_xact_id()::text || ' ' || t, true);
			DELETE FROM part WHERE org = t; DELETE FROM item WHERE tenant = t; DELETE FROM cell.outbox WHERE tenant = t; DELETE FROM cell.outbox_published WHERE tenant = t; END LOOP; END $$`,
		"TRUNCATE cell.fence, cell.outbox_head, cell.outbox_barrier, cell.transfer_capture, cell.transfer_import, cell.transfer_key, cell.transfer_group",
		"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database() AND NOT temporary",
	} {
		if _, err := c.pool.Exec(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

// realTB finds the test below the suite's own kind of one.
func realTB(tb transfertest.TB) testing.TB {
	if r, ok := tb.(interface{ Unwrap() transfertest.TB }); ok {
		return realTB(r.Unwrap())
	}
	return tb.(testing.TB)
}

func reopen(ctx context.Context, id cells.CellID, spec string) (transfertest.Cell, error) {
	return open(ctx, id, spec, false, transfertest.Options{})
}

func open(ctx context.Context, id cells.CellID, url string, fresh bool, o transfertest.Options) (*cell, error) {
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	// As a service has it; the server of the tests is set otherwise.
	pc.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, err
	}
	c := &cell{id: id, url: url, pool: pool}
	if fresh {
		for _, q := range transfertest.Schema("postgres") {
			if _, err := pool.Exec(ctx, q); err != nil {
				return nil, err
			}
		}
	}
	if c.guard, err = guardpostgres.New(pool, guardpostgres.WithCell(id)); err != nil {
		return nil, err
	}
	if err := c.guard.Install(ctx, transfertest.Tables); err != nil {
		return nil, err
	}
	admit := c.guard.AdmitClosed
	if o.IgnoreFence {
		admit = func(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, _ cells.Epoch, _ cells.MoveID) error {
			_, err := tx.Exec(ctx, marker, string(tenant))
			return err
		}
	}
	c.store, err = postgres.Open(ctx, postgres.Config{Pool: pool, Keeper: c.guard, Admit: admit, Tables: transfertest.Tables})
	return c, err
}

// marker is what the guard's triggers look for.
const marker = "SELECT set_config('cell.admitted', pg_current_xact_id()::text || ' ' || $1, true)"

func (c *cell) close() {
	_ = c.store.Close()
	c.guard.Close()
	c.pool.Close()
}

// LoseCapture drops the move's slot, as an operator does who needs the disk.
func (c *cell) LoseCapture(ctx context.Context, _ cells.MoveID) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		tag, err := c.pool.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database() AND NOT temporary")
		var pe *pgconn.PgError
		switch {
		case errors.As(err, &pe) && pe.Code == "55006": // whoever has read last is still leaving
			select {
			case <-tick.C:
				continue
			case <-ctx.Done():
				return err
			}
		case err == nil && tag.RowsAffected() != 1:
			return fmt.Errorf("%d slots were there", tag.RowsAffected())
		}
		return err
	}
}

func (c *cell) ID() cells.CellID        { return c.id }
func (c *cell) Source() transfer.Source { return c.store }
func (c *cell) Sink() transfer.Sink     { return c.store }
func (c *cell) Keeper() guard.Keeper    { return c.guard }
func (c *cell) Spec() string            { return c.url }

func (c *cell) Write(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, event string, f func(transfertest.Exec) error) error {
	ctx = guard.ContextWith(ctx, guard.Admission{Tenant: tenant, Epoch: epoch, Cell: c.id})
	return c.guard.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		if err := f(exec(ctx, tx)); err != nil {
			return err
		}
		if event == "" {
			return nil
		}
		_, err := c.guard.Emit(ctx, tx, event, map[string]int{"n": 1})
		return err
	})
}

func (c *cell) Raw(ctx context.Context, tenant cells.TenantID, f func(transfertest.Exec) error) error {
	return pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, marker, string(tenant)); err != nil {
			return err
		}
		return f(exec(ctx, tx))
	})
}

var param = regexp.MustCompile(`\?(\d+)`)

func exec(ctx context.Context, tx pgx.Tx) transfertest.Exec {
	return func(q string, args ...any) error {
		_, err := tx.Exec(ctx, param.ReplaceAllString(q, `$$$1`), args...)
		return err
	}
}

func (c *cell) Dump(ctx context.Context, tenant cells.TenantID) (map[string]string, error) {
	out := map[string]string{}
	err := pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		for _, q := range []string{
			`SELECT 'item/' || id, '|n=' || coalesce(n::text, '') || '|' || ROW(id, n, body, slot, data, doc, amount, at, ratio, big, twice)::text FROM item WHERE tenant = $1`,
			`SELECT 'part/' || item || '/' || no, ROW(note)::text FROM part WHERE org = $1`,
			`SELECT 'outbox/' || event_seq, ROW(o.*)::text FROM cell.outbox o WHERE tenant = $1`,
			`SELECT 'published', seq::text FROM cell.outbox_published WHERE tenant = $1`,
		} {
			rows, err := tx.Query(ctx, q, string(tenant))
			if err != nil {
				return err
			}
			var k, v string
			if _, err := pgx.ForEachRow(rows, []any{&k, &v}, func() error { out[k] = v; return nil }); err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

// Slots implements transfertest.Sharer.
func (c *cell) Slots(ctx context.Context) (n int, err error) {
	err = c.pool.QueryRow(ctx, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND NOT temporary").Scan(&n)
	return n, err
}

// Temporary implements transfertest.Sharer.
func (c *cell) Temporary(ctx context.Context) (n int, err error) {
	err = c.pool.QueryRow(ctx, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND temporary").Scan(&n)
	return n, err
}

func (c *cell) Leftovers(ctx context.Context) ([]string, error) {
	var out []string
	for what, q := range map[string]string{
		"slots":        "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()",
		"publications": "SELECT count(*) FROM pg_publication",
		"captures":     "SELECT count(*) FROM cell.transfer_capture WHERE NOT released OR NOT EXISTS (SELECT FROM item)",
		"groups":       "SELECT count(*) FROM cell.transfer_group",
		"keys":         "SELECT count(*) FROM cell.transfer_key",
		"imports":      "SELECT count(*) FROM cell.transfer_import",
		"locks":        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
	} {
		var n int
		if err := c.pool.QueryRow(ctx, q).Scan(&n); err != nil {
			return nil, err
		}
		if n > 0 {
			out = append(out, fmt.Sprintf("%d %s", n, what))
		}
	}
	return out, nil
}
