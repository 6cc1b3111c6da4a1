// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

// A service writes through the guard; a move closes the fence.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "cell.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer db.Close()
	if _, err := db.Exec(`CREATE TABLE notes (tenant TEXT, key TEXT, value TEXT, PRIMARY KEY (tenant, key))`); err != nil {
		panic(err)
	}
	g, err := sqlite.New(db, sqlite.WithCell("cell-a"))
	if err != nil {
		panic(err)
	}
	defer g.Close()
	if err := g.Install(ctx, []guard.Table{{Name: "notes", TenantColumn: "tenant"}}); err != nil {
		panic(err)
	}

	// The member opens the fence as the route says.
	if err := g.OpenFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 1, Floor: 1}); err != nil {
		panic(err)
	}
	// In a service the gate has put the admission into the request's context.
	request := guard.ContextWith(ctx, guard.Admission{Tenant: "acme", Epoch: 1})
	set := func(key, value string) (seq cells.EventSeq, err error) {
		err = g.InTx(request, nil, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO notes VALUES ('acme', ?, ?)`, key, value); err != nil {
				return err
			}
			seq, err = g.Emit(ctx, tx, "note.set", map[string]string{"key": key})
			return err
		})
		return seq, err
	}
	seq, err := set("greeting", "hello")
	fmt.Println("event", seq, err)

	// The tenant moves away.
	if err := g.CloseFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 2, Move: "m1"}); err != nil {
		panic(err)
	}
	_, err = set("greeting", "too late")
	fmt.Println("fenced:", errors.Is(err, cells.ErrFenced), "ask elsewhere:", guard.RetryElsewhere(err))
	// Output:
	// event 1 <nil>
	// fenced: true ask elsewhere: true
}
