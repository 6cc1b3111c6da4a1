// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

func installed(t *testing.T, pragmas string, opts ...sqlite.Option) (*sql.DB, *sqlite.Guard) {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "x.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate"+pragmas)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	g, err := sqlite.New(db, append([]sqlite.Option{sqlite.WithLogger(quiet)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	if _, err := db.Exec(guardtest.TableSQL); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := g.Install(t.Context(), []guard.Table{guardtest.Table}); err != nil {
			t.Fatal(err)
		}
	}
	return db, g
}

func put(key, value string) func(context.Context, *sql.Tx) error {
	return func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO guardtest_rows VALUES ('a', ?, ?)`, key, value)
		return err
	}
}

func as(ctx context.Context, epoch cells.Epoch) context.Context {
	return guard.ContextWith(ctx, guard.Admission{Tenant: "a", Epoch: epoch})
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]sqlite.Option{
		"cell": sqlite.WithCell("No Cell"), "lock wait": sqlite.WithLockWait(0), "retries": sqlite.WithRetries(-1), "poll": sqlite.WithPoll(-1), "commit wait": sqlite.WithCommitWait(0),
	} {
		if _, err := sqlite.New(nil, o); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFullDisk(t *testing.T) {
	_, g := installed(t, "&_pragma=max_page_count(60)")
	if err := g.InTx(as(t.Context(), 0), nil, put("small", "v")); err != nil {
		t.Fatal(err)
	}
	err := g.InTx(as(t.Context(), 0), nil, put("large", strings.Repeat("x", 1<<20)))
	if !errors.Is(err, cells.ErrUnavailable) || !guard.NothingWritten(err) {
		t.Errorf("a full disk: %v", err)
	}
	if err := g.InTx(as(t.Context(), 0), nil, put("small again", "v")); err != nil {
		t.Errorf("after it: %v", err)
	}
}

func TestReadOnly(t *testing.T) {
	_, g := installed(t, "")
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 1, Floor: 1}); err != nil {
		t.Fatal(err)
	}
	read := func(epoch cells.Epoch, inside func(context.Context, *sql.Tx) error) error {
		return g.InTx(as(t.Context(), epoch), &sql.TxOptions{ReadOnly: true}, inside)
	}
	nothing := func(context.Context, *sql.Tx) error { return nil }
	// It takes no lock: not while somebody writes, not while it lasts.
	err := g.InTx(as(t.Context(), 1), nil, func(ctx context.Context, tx *sql.Tx) error {
		if err := put("k", "v")(ctx, tx); err != nil {
			return err
		}
		return read(1, nothing)
	})
	if err != nil {
		t.Error(err)
	}
	err = read(1, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := g.Emit(ctx, tx, "put", "k"); !errors.Is(err, cells.ErrFenced) {
			t.Errorf("emit while reading: %v", err)
		}
		return g.InTx(as(t.Context(), 1), nil, put("k2", "v"))
	})
	if err != nil {
		t.Error(err)
	}
	if err := read(2, nothing); !errors.Is(err, cells.ErrFenced) {
		t.Errorf("at another epoch: %v", err)
	}
}

// An order does not wait for a writer for ever, and one writer of a process does
// not keep the others waiting for ever.
func TestBounds(t *testing.T) {
	_, g := installed(t, "", sqlite.WithLockWait(50*time.Millisecond))
	err := g.InTx(as(t.Context(), 0), nil, func(ctx context.Context, tx *sql.Tx) error {
		if err := g.CloseFence(ctx, cells.FenceOrder{Tenant: "a", Epoch: 1, Move: "m"}); !errors.Is(err, cells.ErrUnavailable) {
			t.Errorf("close: %v", err)
		}
		if err := g.InTx(as(ctx, 0), nil, put("k", "v")); !errors.Is(err, cells.ErrUnavailable) {
			t.Errorf("another write: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if err := g.CloseFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 1, Move: "m"}); err != nil {
		t.Error(err)
	}
}

// The guard forgets the transactions of callers that begin their own.
func TestAdmittedTransactionsAreForgotten(t *testing.T) {
	db, g := installed(t, "")
	for range 50 {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Admit(t.Context(), tx, "a", 0); err != nil {
			t.Fatal(err)
		}
		if _, err := g.Emit(t.Context(), tx, "put", 1); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(time.Minute)
	for g.Admitted() > 5 && time.Now().Before(deadline) {
		runtime.GC()
		runtime.Gosched()
	}
	if n := g.Admitted(); n > 5 {
		t.Errorf("%d transactions are remembered", n)
	}
}
