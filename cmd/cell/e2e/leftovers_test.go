// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // driver pgx
	_ "modernc.org/sqlite"             // driver sqlite

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
)

// nothingLeft checks in the databases of both cells what moves must have cleaned up:
// no cell has rows of a tenant that another owns, nothing is captured any more, and
// tables can be changed by people.
func (e *env) nothingLeft(owners map[string]cells.CellID) {
	e.t.Helper()
	for _, cell := range []string{"cell-a", "cell-b"} {
		driver, dsn := "sqlite", "file:"+filepath.Join(e.Layout.Cell(cell), "store.db")+"?_pragma=busy_timeout(10000)"
		captured := "SELECT (SELECT count(*) FROM sqlite_schema WHERE type = 'trigger') + (SELECT count(*) FROM cell_transfer_log)"
		tables := []string{"memory_items", "memory_history", "cell_outbox", "cell_outbox_published"}
		use := "BEGIN IMMEDIATE; ROLLBACK"
		if e.Info.Store == fleet.StorePostgres {
			driver, dsn = "pgx", e.Cluster(cell).URL("cell")
			captured = "SELECT (SELECT count(*) FROM pg_replication_slots) + (SELECT count(*) FROM pg_publication)"
			tables[2], tables[3] = "cell.outbox", "cell.outbox_published"
			use = "SET lock_timeout = '5s'; ALTER TABLE memory_items SET (fillfactor = 90)"
		}
		db, err := sql.Open(driver, dsn)
		if err != nil {
			e.t.Fatal(err)
		}
		defer db.Close()
		count := func(q string) (n int) {
			e.t.Helper()
			if err := db.QueryRowContext(e.t.Context(), q).Scan(&n); err != nil {
				e.t.Fatalf("%s: %v", q, err)
			}
			return n
		}
		// A capture is freed in the background.
		e.eventually(fmt.Sprintf("nothing is captured in %s", cell), 30*time.Second, func() bool { return count(captured) == 0 })
		var others []string
		for tenant, owner := range owners {
			if owner != cells.CellID(cell) {
				others = append(others, "'"+tenant+"'")
			}
		}
		for _, table := range tables {
			if len(others) == 0 {
				break
			}
			if n := count(fmt.Sprintf("SELECT count(*) FROM %s WHERE tenant IN (%s)", table, strings.Join(others, ","))); n > 0 {
				e.t.Errorf("%d rows of %s are left in %s of tenants that are elsewhere", n, table, cell)
			}
		}
		if _, err := db.ExecContext(e.t.Context(), use); err != nil {
			e.t.Errorf("the tables of %s cannot be used: %v", cell, err)
		}
	}
}
