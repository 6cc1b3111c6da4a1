// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// Note is a tenant table as a model.
type Note struct {
	Tenant string `gorm:"primaryKey" cell:"tenant"`
	Key    string `gorm:"primaryKey"`
	Value  string
	Tags   []Tag `gorm:"foreignKey:Tenant,NoteKey;references:Tenant,Key"`
}

// Tag belongs to a note.
type Tag struct {
	Tenant  string `gorm:"primaryKey" cell:"tenant"`
	NoteKey string `gorm:"primaryKey"`
	Name    string `gorm:"primaryKey"`
}

// Setting is no tenant's.
type Setting struct {
	Name  string `gorm:"primaryKey"`
	Value string
}

type world struct {
	*testing.T
	db *gorm.DB
	p  *Plugin
	g  full
}

// engines runs a test on both, with tenants acme and globex open at epoch 3.
func engines(t *testing.T, cfg Config, f func(w *world)) {
	for _, engine := range []string{"sqlite", "postgres"} {
		t.Run(engine, func(t *testing.T) {
			d := &database{sqlite: engine == "sqlite", dir: t.TempDir(), schema: "cell", lockWait: 5 * time.Second}
			if !d.sqlite {
				d.url = pgtest.DB(t)
			}
			db, g, err := d.guardOf("immediate")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { g.Close(); db.Close() })
			w := &world{T: t, g: g}
			plain, _, err := open(db, d.sqlite, g, Config{})
			if err != nil {
				t.Fatal(err)
			}
			w.must(plain.AutoMigrate(&Note{}, &Tag{}, &Setting{}), "migrate")
			cfg := cfg
			cfg.Tables, err = TablesOf(plain, &Note{}, &Tag{})
			w.must(err, "tables")
			w.must(g.Install(t.Context(), cfg.Tables), "install")
			if w.db, w.p, err = open(db, d.sqlite, g, cfg); err != nil {
				t.Fatal(err)
			}
			for _, tenant := range []cells.TenantID{"acme", "globex"} {
				w.must(g.OpenFence(t.Context(), cells.FenceOrder{Tenant: tenant, Epoch: 3, Floor: 3}), "open")
			}
			w.must(w.as("globex", 3).Create(&Note{Key: "k", Value: "theirs"}).Error, "another tenant's row")
			f(w)
		})
	}
}

func (w *world) must(err error, what string) {
	w.Helper()
	if err != nil {
		w.Fatalf("%s: %v", what, err)
	}
}

func (w *world) want(err, want error, what string) {
	w.Helper()
	if !errors.Is(err, want) {
		w.Errorf("%s: %v, want %v", what, err, want)
	}
}

func (w *world) ctx(tenant cells.TenantID, epoch cells.Epoch) context.Context {
	return guard.ContextWith(w.Context(), guard.Admission{Tenant: tenant, Epoch: epoch, Cell: "here"})
}

func (w *world) as(tenant cells.TenantID, epoch cells.Epoch) *gorm.DB {
	return w.db.WithContext(w.ctx(tenant, epoch))
}

// notes returns what is there, read without an admission.
func (w *world) notes(tenant string) map[string]string {
	w.Helper()
	var rows []Note
	w.must(w.db.WithContext(w.Context()).Find(&rows, "tenant = ?", tenant).Error, "read")
	out := map[string]string{}
	for _, r := range rows {
		out[r.Key] = r.Value
	}
	return out
}

func TestSessions(t *testing.T) {
	engines(t, Config{}, func(w *world) {
		acme, bare := w.as("acme", 3), w.db.WithContext(w.Context())
		w.must(acme.Create(&Note{Key: "k", Value: "1", Tags: []Tag{{Name: "red"}}}).Error, "create, with an association, tenant filled in")
		w.must(acme.Create([]*Note{{Key: "l", Value: "1"}, {Tenant: "acme", Key: "m", Value: "1"}}).Error, "create two")
		w.must(acme.Save(&Note{Tenant: "acme", Key: "k", Value: "2"}).Error, "save")
		w.must(acme.Clauses(clause.OnConflict{UpdateAll: true}).Create(&Note{Key: "k", Value: "3"}).Error, "upsert")
		w.must(acme.Model(&Note{}).Where("tenant = ? AND key = ?", "acme", "l").Update("value", "2").Error, "update")
		w.must(acme.Model(&Note{}).Scopes(w.p.Mine).Where("key = ? OR key = ?", "m", "n").Updates(map[string]any{"value": "4"}).Error, "update of mine")
		w.must(acme.Exec("UPDATE notes SET value = ? WHERE tenant = ? AND key = ?", "5", "acme", "l").Error, "raw")
		skip := acme.Session(&gorm.Session{SkipDefaultTransaction: true})
		w.must(skip.Create(&Note{Key: "s", Value: "1"}).Error, "create without GORM's transaction")
		w.must(skip.Delete(&Note{Tenant: "acme", Key: "s"}).Error, "delete without GORM's transaction")
		var back []Note
		w.must(acme.Raw("UPDATE notes SET value = '6' WHERE tenant = 'acme' AND key = 'm' RETURNING *").Find(&back).Error, "raw write that is read")
		if got := w.notes("acme"); len(got) != 3 || got["k"] != "3" || got["l"] != "5" || got["m"] != "6" || len(back) != 1 {
			w.Errorf("there is %v, returned %v", got, back)
		}
		w.must(bare.Create(&Setting{"color", "red"}).Error, "a table that is no tenant's")

		for what, err := range map[string]error{
			"create":                     w.as("acme", 2).Create(&Note{Key: "stale"}).Error,
			"create, newer":              w.as("acme", 4).Create(&Note{Key: "stale"}).Error,
			"raw":                        w.as("acme", 2).Exec("DELETE FROM notes WHERE tenant = 'acme'").Error,
			"without GORM's transaction": w.as("acme", 2).Session(&gorm.Session{SkipDefaultTransaction: true}).Create(&Note{Key: "stale"}).Error,
			"save":                       w.as("acme", 2).Save(&Note{Tenant: "acme", Key: "k"}).Error,
			"another tenant's row":       acme.Create(&Note{Tenant: "globex", Key: "x"}).Error,
			"another tenant's, updated":  acme.Model(&Note{Tenant: "globex", Key: "k"}).Update("value", "x").Error,
			"another tenant's, deleted":  acme.Delete(&Note{Tenant: "globex", Key: "k"}).Error,
			"given away":                 acme.Model(&Note{}).Scopes(w.p.Mine).Update("tenant", "globex").Error,
			"copied for another":         acme.Exec("INSERT INTO notes (tenant, key, value) SELECT 'globex', key || '2', value FROM notes WHERE tenant = 'acme'").Error,
			"map for another":            acme.Model(&Note{}).Create(map[string]any{"tenant": "globex", "key": "x"}).Error,
		} {
			w.want(err, cells.ErrFenced, what)
			if !guard.NothingWritten(err) {
				w.Errorf("%s: something may have been written: %v", what, err)
			}
		}
		for what, err := range map[string]error{
			"create": bare.Create(&Note{Tenant: "acme", Key: "x"}).Error,
			"raw":    bare.Exec("UPDATE notes SET value = 'x' WHERE tenant = 'acme'").Error,
			"in a transaction": bare.Transaction(func(tx *gorm.DB) error {
				return tx.Delete(&Note{Tenant: "acme", Key: "k"}).Error
			}),
			"InTx": w.p.InTx(w.Context(), w.db, nil, func(*gorm.DB) error { return nil }),
			"mine": bare.Scopes(w.p.Mine).Where("key = 'k'").Delete(&Note{}).Error,
		} {
			w.want(err, guard.ErrNoAdmission, what)
		}
		for what, err := range map[string]error{
			"delete":      acme.Where("key = ?", "k").Delete(&Note{}).Error,
			"everything":  acme.Session(&gorm.Session{AllowGlobalUpdate: true}).Delete(&Note{}).Error,
			"update":      acme.Model(&Note{}).Where("tenant = ? OR key = ?", "acme", "k").Update("value", "x").Error,
			"raw":         acme.Exec("DELETE FROM notes").Error,
			"association": acme.Exec("DELETE FROM tags WHERE note_key = 'k'").Error,
		} {
			w.want(err, ErrNoTenantCondition, what)
		}
		if got := w.notes("acme"); len(got) != 3 || got["k"] != "3" {
			w.Errorf("refused writes left %v", got)
		}
		if got := w.notes("globex"); len(got) != 1 || got["k"] != "theirs" {
			w.Errorf("another tenant has %v", got)
		}
		var v string
		w.want(acme.Raw("UPDATE notes SET value = 'x' WHERE tenant = 'acme' RETURNING value").Scan(&v).Error, ErrNoTransaction, "rows of a write outside of a transaction")
		if err := acme.Raw("UPDATE notes SET value = 'x' WHERE tenant = 'acme' RETURNING value").Row().Scan(&v); err == nil {
			w.Errorf("a row of a write outside of a transaction")
		}
		w.must(acme.Transaction(func(tx *gorm.DB) error {
			return tx.Raw("UPDATE notes SET value = '7' WHERE tenant = 'acme' AND key = 'k' RETURNING value").Scan(&v).Error
		}), "rows of a write")
		if v != "7" || w.notes("acme")["k"] != "7" {
			w.Errorf("returned %q", v)
		}
	})
}

func TestTransactions(t *testing.T) {
	engines(t, Config{}, func(w *world) {
		inner := errors.New("inner")
		w.must(w.p.InTx(w.ctx("acme", 3), w.db, nil, func(tx *gorm.DB) error {
			if err := tx.Create(&Note{Key: "outer"}).Error; err != nil {
				return err
			}
			err := tx.Transaction(func(tx *gorm.DB) error {
				if err := tx.Create(&Note{Key: "inner"}).Error; err != nil {
					return err
				}
				return inner
			})
			w.want(err, inner, "the nested transaction")
			err = w.p.InTx(tx.Statement.Context, tx, nil, func(tx *gorm.DB) error { return tx.Create(&Note{Key: "again"}).Error })
			if err != nil {
				return err
			}
			seq, err := Emit(tx, "notes.made", map[string]int{"n": 2})
			if seq != 1 {
				w.Errorf("event %d", seq)
			}
			return err
		}), "nested")
		if got := w.notes("acme"); len(got) != 2 {
			w.Errorf("there is %v", got)
		}
		w.want(w.p.InTx(w.ctx("acme", 3), w.db, nil, func(tx *gorm.DB) error {
			if _, err := Emit(tx, "lost", nil); err != nil {
				return err
			}
			return inner
		}), inner, "a transaction that fails")
		if _, err := Emit(w.as("acme", 3), "none", nil); !errors.Is(err, cells.ErrFenced) {
			w.Errorf("emit outside of a transaction: %v", err)
		}
		events, err := w.g.Events(w.Context(), "acme", 0, 10)
		w.must(err, "events")
		if len(events) != 1 || events[0].Type != "notes.made" || events[0].Epoch != 3 || events[0].Cell != "here" {
			w.Errorf("events %+v", events)
		}

		// A job learns its tenant by reading.
		w.must(w.db.WithContext(w.Context()).Transaction(func(tx *gorm.DB) error {
			if err := Admit(tx, "acme", 3); err != nil {
				return err
			}
			return tx.Delete(&Note{Tenant: "acme", Key: "again"}).Error
		}), "admitted later")

		// Close waits for a transaction that is open, and nothing comes after it.
		tx := w.as("acme", 3).Begin()
		w.must(tx.Error, "begin")
		w.must(tx.Create(&Note{Key: "late"}).Error, "create")
		closed := make(chan error, 1)
		go func() {
			closed <- w.g.CloseFence(context.WithoutCancel(w.Context()), cells.FenceOrder{Tenant: "acme", Epoch: 4, Move: "m"})
		}()
		select {
		case err := <-closed:
			w.Fatalf("close did not wait: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		w.must(tx.Commit().Error, "commit")
		w.must(<-closed, "close")
		w.want(w.as("acme", 3).Create(&Note{Key: "too late"}).Error, cells.ErrFenced, "a write behind the close")
		if got := w.notes("acme"); len(got) != 2 {
			w.Errorf("in the end there is %v", got)
		}
	})
}

// Each of the two lines of defence holds where the other is away: statements are
// looked at, and the database looks at rows.
func TestBothChecks(t *testing.T) {
	const hidden = "INSERT INTO notes (tenant, key) SELECT 'globex', 'hidden'"
	const plain = "UPDATE notes SET value = 'x' WHERE tenant = 'globex'"
	for name, c := range map[string]struct {
		cfg                   Config
		hiddenPass, plainPass bool // on SQLite; Postgres has the guard's own triggers
	}{
		"both":     {Config{}, false, false},
		"rows":     {Config{noCheck: true}, false, false},
		"text":     {Config{noTriggers: true}, true, false},
		"no check": {Config{noTriggers: true, noCheck: true}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			engines(t, c.cfg, func(w *world) {
				for sql, pass := range map[string]bool{hidden: c.hiddenPass, plain: c.plainPass} {
					err := w.as("acme", 3).Exec(sql).Error
					if pass = pass && w.p.sqlite; pass != (err == nil) || !pass && !errors.Is(err, cells.ErrFenced) {
						w.Errorf("%s: %v, may pass: %t", sql, err, pass)
					}
				}
			})
		})
	}
}

// The guard's own transactions on the same connections are not held up by what
// GORM's have left there.
func TestSharedConnections(t *testing.T) {
	engines(t, Config{}, func(w *world) {
		sqlDB, err := w.db.DB()
		w.must(err, "the pool")
		sqlDB.SetMaxOpenConns(1)
		w.must(w.as("acme", 3).Create(&Note{Key: "k"}).Error, "create")
		begin := w.g.Begin
		tx, err := begin(w.ctx("globex", 3), &sql.TxOptions{})
		w.must(err, "begin")
		_, err = tx.ExecContext(w.Context(), "UPDATE notes SET value = 'mine' WHERE tenant = 'globex'")
		w.must(err, "update")
		w.must(tx.Commit(), "commit")
		if got := w.notes("globex"); got["k"] != "mine" {
			w.Errorf("there is %v", got)
		}
	})
}

func TestConfig(t *testing.T) {
	d := &database{sqlite: true, dir: t.TempDir(), lockWait: time.Second}
	db, g, err := d.guardOf("immediate")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	defer g.Close()
	if _, err := New(g, Config{Tables: []guard.Table{{Name: "x"}}}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a table without a column: %v", err)
	}
	gdb, p, err := open(db, true, g, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TablesOf(gdb, &Setting{}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a model without a tenant: %v", err)
	}
	prepared := gdb.Session(&gorm.Session{PrepareStmt: true})
	if err := prepared.Exec("INSERT INTO x VALUES (1)").Error; !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a prepared write: %v", err)
	}
	other, err := gorm.Open(gdb.Dialector, &gorm.Config{PrepareStmt: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Use(p); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a session of prepared statements: %v", err)
	}
	if err := gdb.Use(p); !errors.Is(err, gorm.ErrRegistered) {
		t.Errorf("twice: %v", err)
	}
}

// The controller moves a tenant between two cells by their guards.
func TestController(t *testing.T) {
	engines(t, Config{}, func(a *world) {
		dir := a.TempDir()
		d := &database{sqlite: true, dir: dir, lockWait: 5 * time.Second}
		db, gb, err := d.guardOf("immediate")
		a.must(err, "the other cell")
		defer db.Close()
		defer gb.Close()
		a.must(gb.Install(a.Context(), nil), "install")
		keeper := func(cell cells.CellID) (guard.Keeper, error) {
			switch cell {
			case "cell-a":
				return a.g, nil
			case "cell-b":
				return gb, nil
			}
			return nil, cells.ErrNotFound
		}
		ctrl := cells.NewMoveController(cells.NewMemTable(), cells.WithFencer(GormFencer{keeper}), cells.WithEventBarrier(OutboxEventBarrier{keeper}))
		a.must(ctrl.Assign(a.Context(), "wayne", "cell-a", "test"), "assign")
		a.must(a.p.InTx(a.ctx("wayne", 1), a.db, nil, func(tx *gorm.DB) error { _, err := Emit(tx, "e", nil); return err }), "emit")
		a.must(ctrl.Move(a.Context(), cells.MovePlan{TenantID: "wayne", FromCell: "cell-a", ToCell: "cell-b", Actor: "test"}), "move")
		a.want(a.as("wayne", 1).Create(&Note{Key: "late"}).Error, cells.ErrFenced, "a write at the cell that the tenant has left")
		f, err := gb.Fence(a.Context(), "wayne")
		a.must(err, "fence")
		if !f.Open || f.Epoch != 3 || f.Seq != 1 {
			a.Errorf("at the new cell: %+v", f)
		}
		a.want(GormFencer{keeper}.Open(a.Context(), cells.FenceOrder{Cell: "nowhere", Tenant: "wayne", Epoch: 9}), cells.ErrNotFound, "an order for a cell that is not there")
	})
}
