// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	gormpg "gorm.io/driver/postgres"
	gormsqlite "gorm.io/driver/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	_ "modernc.org/sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// full is what both guards are.
type full interface {
	Guard
	guard.RelayStore
	Prune(ctx context.Context, tenant cells.TenantID, upto cells.EventSeq) (int64, error)
	Close()
}

// open opens GORM with the plugin over a guard of db.
func open(db *sql.DB, useSQLite bool, g Guard, cfg Config) (*gorm.DB, *Plugin, error) {
	var d gorm.Dialector = gormpg.New(gormpg.Config{Conn: db})
	if useSQLite {
		d = gormsqlite.Dialector{Conn: db}
	}
	gdb, err := gorm.Open(d, &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return nil, nil, err
	}
	p, err := New(g, cfg)
	if err != nil {
		return nil, nil, err
	}
	return gdb, p, gdb.Use(p)
}

var sqlIsolations = map[string]sql.IsolationLevel{
	"read-committed": sql.LevelReadCommitted, "repeatable-read": sql.LevelRepeatableRead, "serializable": sql.LevelSerializable,
	"immediate": sql.LevelDefault, "deferred": sql.LevelDefault,
}

type database struct {
	sqlite      bool
	url, schema string
	dir         string
	cfg         Config
	lockWait    time.Duration
}

func (d *database) dsn(kind string) string {
	return "file:" + filepath.Join(d.dir, "cell.db") + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_pragma=synchronous(NORMAL)&_txlock=" + kind
}

func (d *database) Close() {
	if d.sqlite {
		_ = os.RemoveAll(d.dir)
	}
}

// guardOf opens a pool and its guard.
func (d *database) guardOf(kind string) (*sql.DB, full, error) {
	if d.sqlite {
		db, err := sql.Open("sqlite", d.dsn(kind))
		if err != nil {
			return nil, nil, err
		}
		g, err := sqlite.New(db, sqlite.WithPoll(50*time.Millisecond), sqlite.WithLogger(quiet), sqlite.WithLockWait(d.lockWait))
		return db, g, err
	}
	db, err := sql.Open("pgx", d.url)
	if err != nil {
		return nil, nil, err
	}
	db.SetMaxOpenConns(40)
	g, err := postgres.NewSQL(db, postgres.WithSchema(d.schema), postgres.WithPoll(100*time.Millisecond), postgres.WithLogger(quiet), postgres.WithLockWait(d.lockWait))
	return db, g, err
}

// process is a process of the cell whose transactions are GORM's.
type process struct {
	full
	plugins map[string]*Plugin
	gorms   map[string]*gorm.DB
	closers []func()
}

func (d *database) Process(context.Context) (guardtest.Process, error) {
	kinds := []string{""}
	if d.sqlite {
		kinds = []string{"immediate", "deferred"}
	}
	p := &process{plugins: map[string]*Plugin{}, gorms: map[string]*gorm.DB{}}
	for _, kind := range kinds {
		db, g, err := d.guardOf(kind)
		if err != nil {
			return nil, err
		}
		p.closers = append(p.closers, g.Close, func() { _ = db.Close() })
		if p.gorms[kind], p.plugins[kind], err = open(db, d.sqlite, g, d.cfg); err != nil {
			return nil, err
		}
		if p.full == nil {
			p.full = g
		}
	}
	return p, nil
}

func (p *process) Close() {
	for _, f := range p.closers {
		f()
	}
}

func (p *process) of(iso string) (*gorm.DB, *Plugin) {
	if g := p.gorms[iso]; g != nil {
		return g, p.plugins[iso]
	}
	return p.gorms[""], p.plugins[""]
}

func (p *process) Begin(ctx context.Context, iso string) (guardtest.Tx, error) {
	g, pl := p.of(iso)
	tx := g.WithContext(ctx).Begin(&sql.TxOptions{Isolation: sqlIsolations[iso]})
	return &gtx{db: tx, p: pl}, pl.translate(tx.Error)
}

func (p *process) InTx(ctx context.Context, iso string, fn func(context.Context, guardtest.Tx) error) error {
	g, pl := p.of(iso)
	return pl.InTx(ctx, g, &sql.TxOptions{Isolation: sqlIsolations[iso]}, func(tx *gorm.DB) error {
		return fn(tx.Statement.Context, &gtx{db: tx, p: pl})
	})
}

func (p *process) Rows(ctx context.Context, tenant cells.TenantID) (map[string]string, error) {
	var rows []guardtestRow
	for _, g := range p.gorms {
		if err := g.WithContext(ctx).Where("tenant = ?", tenant).Find(&rows).Error; err != nil {
			return nil, err
		}
		break
	}
	out := map[string]string{}
	for _, r := range rows {
		out[r.Key] = r.Value
	}
	return out, nil
}

// guardtestRow is the suite's table as a model.
type guardtestRow struct {
	Tenant string `gorm:"primaryKey" cell:"tenant"`
	Key    string `gorm:"primaryKey"`
	Value  string
}

func (guardtestRow) TableName() string { return guardtest.Table.Name }

type gtx struct {
	db *gorm.DB
	p  *Plugin
}

func (t *gtx) Read(ctx context.Context) error {
	var n int64
	return t.p.translate(t.db.WithContext(ctx).Model(&guardtestRow{}).Count(&n).Error)
}
func (t *gtx) Admit(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch) error {
	return Admit(t.db.WithContext(ctx), tenant, epoch)
}
func (t *gtx) AdmitClosed(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	return AdmitClosed(t.db.WithContext(ctx), tenant, epoch, move)
}

// Exec sends the suite's plain upsert through a model, and everything else raw.
func (t *gtx) Exec(ctx context.Context, query string, args ...any) error {
	db := t.db.WithContext(ctx)
	if strings.HasPrefix(query, "INSERT INTO guardtest_rows (tenant, key, value)") && len(args) == 3 {
		return db.Save(&guardtestRow{args[0].(string), args[1].(string), args[2].(string)}).Error
	}
	// GORM's own placeholder is ?.
	for i := range args {
		query = strings.ReplaceAll(query, fmt.Sprint("$", i+1), fmt.Sprint("@p", i+1))
	}
	named := map[string]any{}
	for i, a := range args {
		named[fmt.Sprint("p", i+1)] = a
	}
	if len(args) == 0 {
		return db.Exec(query).Error
	}
	return db.Exec(query, named).Error
}
func (t *gtx) Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error) {
	return Emit(t.db.WithContext(ctx), typ, payload)
}
func (t *gtx) Commit(context.Context) error {
	err := t.db.Session(&gorm.Session{}).Commit().Error
	return t.p.translate(err)
}
func (t *gtx) Rollback() { t.db.Session(&gorm.Session{}).Rollback() }

func sqliteHarness(cfg Config) guardtest.Harness {
	cfg.Tables = []guard.Table{guardtest.Table}
	return guardtest.Harness{
		Isolations: []string{"immediate", "deferred"}, Interleavings: 60,
		// The one writer of a file cannot have four transactions open at once.
		Only: slices.DeleteFunc(guardtest.Sections(), func(s string) bool { return s == "pooled" }),
		Open: func(ctx context.Context) (guardtest.Database, error) {
			dir, err := os.MkdirTemp("", "gormtx-")
			if err != nil {
				return nil, err
			}
			d := &database{sqlite: true, dir: dir, cfg: cfg, lockWait: 15 * time.Second}
			return d, d.install(ctx, "immediate")
		},
	}
}

var schemas atomic.Int64

func postgresHarness(t testing.TB, cfg Config) guardtest.Harness {
	shared := pgtest.DB(t)
	cfg.Tables = []guard.Table{guardtest.Table}
	return guardtest.Harness{
		Isolations: []string{"read-committed", "serializable"}, Interleavings: 60,
		Open: func(ctx context.Context) (guardtest.Database, error) {
			n := schemas.Add(1)
			d := &database{url: fmt.Sprint(shared, "&search_path=s", n), schema: fmt.Sprint("g", n), cfg: cfg, lockWait: 15 * time.Second}
			db, err := sql.Open("pgx", shared)
			if err != nil {
				return nil, err
			}
			defer db.Close()
			if _, err := db.ExecContext(ctx, fmt.Sprint("CREATE SCHEMA s", n)); err != nil {
				return nil, err
			}
			return d, d.install(ctx, "")
		},
	}
}

func (d *database) install(ctx context.Context, kind string) error {
	db, g, err := d.guardOf(kind)
	if err != nil {
		return err
	}
	defer db.Close()
	defer g.Close()
	_, err = db.ExecContext(ctx, guardtest.TableSQL)
	return errors.Join(err, g.Install(ctx, []guard.Table{guardtest.Table}))
}
