// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

// The transaction of a handler in four lines.
func ExampleGuard_Write() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "cell.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer db.Close()
	if _, err := db.Exec(`CREATE TABLE accounts (tenant TEXT PRIMARY KEY, name TEXT NOT NULL)`); err != nil {
		panic(err)
	}
	g, err := sqlite.New(db, sqlite.WithCell("cell-a"))
	if err != nil {
		panic(err)
	}
	defer g.Close()
	if err := g.Install(context.Background(), []guard.Table{{Name: "accounts", TenantColumn: "tenant"}}); err != nil {
		panic(err)
	}
	// In a service the gate has put the admission into the request's context.
	ctx := guard.ContextWith(context.Background(), guard.Admission{Tenant: "acme"})

	var seq cells.EventSeq
	err = g.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO accounts VALUES (?, ?)`, tx.Tenant, "Acme"); err != nil {
			return err
		}
		err := tx.Emit(ctx, "account.made", nil)
		seq = tx.Seq
		return err
	})
	fmt.Println("event", seq, err)
	// Output:
	// event 1 <nil>
}

// A transaction of Begin has the turn to write until it ends, however it ends.
func TestBegin(t *testing.T) {
	_, g := installed(t, "", sqlite.WithLockWait(5*time.Second))
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "a", Epoch: 3, Floor: 3}); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Begin(as(t.Context(), 2), nil); !errors.Is(err, cells.ErrFenced) {
		t.Errorf("begin at another epoch: %v", err)
	}
	for name, end := range map[string]func(tx *sqlite.Tx, cancel func()) error{
		"commit":   func(tx *sqlite.Tx, _ func()) error { return tx.Commit() },
		"rollback": func(tx *sqlite.Tx, _ func()) error { return tx.Rollback() },
		"cancel":   func(_ *sqlite.Tx, cancel func()) error { cancel(); return nil },
	} {
		ctx, cancel := context.WithCancel(as(t.Context(), 3))
		tx, err := g.Begin(ctx, nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := tx.Emit(ctx, "e", name); err != nil {
			t.Fatal(err)
		}
		if err := end(tx, cancel); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	events, err := g.Events(t.Context(), "a", 0, 10)
	if err != nil || len(events) != 1 || string(events[0].Payload) != `"commit"` {
		t.Errorf("events %+v, %v", events, err)
	}
}
