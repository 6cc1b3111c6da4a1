// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
)

// TestCancelAtEveryStep asks for a rollback at each step of a move. Before the
// decision it must work, keep every write that was acknowledged on the way, and
// leave nothing: no rows at the target, no slot and no publication at the source, and
// tables that people can alter. Behind the decision it must be refused, and the
// move must end at the target.
func TestCancelAtEveryStep(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		e := start(t, fleet.Config{Store: store})
		decided := false
		for i, step := range steps {
			decided = decided || step == cells.StepCommit
			if testing.Short() && i%5 != 0 {
				continue
			}
			t.Run(string(step), func(t *testing.T) {
				e := e.in(t)
				name := "t-" + string(step)
				c := e.tenant(name, "cell-a")
				if err := c.Fill(t.Context(), "bulk", 200, 200, func(int) {}); err != nil {
					t.Fatal(err)
				}
				stop := e.hammer(&load.Hammer{Client: c, Clients: 2, Keys: 5, Pause: 3 * time.Millisecond})
				e.haltAt(step)
				mv := e.startMove(name, "cell-b", name)
				e.waitHalted()
				_, err := e.cl.Rollback(t.Context(), mv.ID, api.RollbackRequest{Reason: "test"})
				if refused := cells.AnswerOf(err); decided && (refused == nil || refused.Code != cells.CodeConflict) || !decided && err != nil {
					t.Errorf("rollback at %s: %v", step, err)
				}
				e.release()
				want, owner, loser := api.MoveRolledBack, cells.CellID("cell-a"), "cell-b"
				if decided {
					want, owner, loser = api.MoveDone, "cell-b", "cell-a"
				}
				if rec := e.settle(mv.ID); rec.State != want || e.cellOf(name) != owner {
					t.Errorf("the move is %s, the tenant in %s; want %s in %s", rec.State, e.cellOf(name), want, owner)
				}
				mustBeClean(t, name, stop(), false)
				if store == fleet.StorePostgres {
					e.nothingLeft(name, loser)
				}
			})
		}
	})
}

// nothingLeft checks in Postgres what a move must have cleaned up.
func (e *env) nothingLeft(tenant, loser string) {
	e.t.Helper()
	for _, cell := range []string{"cell-a", "cell-b"} {
		conn, err := pgx.Connect(e.t.Context(), e.Cluster(cell).URL("cell"))
		if err != nil {
			e.t.Fatal(err)
		}
		defer conn.Close(e.t.Context())
		count := func(q string, args ...any) (n int) {
			if err := conn.QueryRow(e.t.Context(), q, args...).Scan(&n); err != nil {
				e.t.Fatalf("%s: %v", q, err)
			}
			return n
		}
		// A capture is freed in the background.
		e.eventually(fmt.Sprintf("no slots and publications are left in %s", cell), 30*time.Second, func() bool {
			return count("SELECT (SELECT count(*) FROM pg_replication_slots) + (SELECT count(*) FROM pg_publication)") == 0
		})
		if cell != loser {
			continue
		}
		for _, table := range []string{"memory_items", "memory_history", "cell.outbox", "cell.outbox_published"} {
			if n := count(fmt.Sprintf("SELECT count(*) FROM %s WHERE tenant = $1", table), tenant); n > 0 {
				e.t.Errorf("%d rows of %s are left in %s of %s", n, tenant, table, cell)
			}
		}
		if _, err := conn.Exec(e.t.Context(), "SET lock_timeout = '5s'; ALTER TABLE memory_items SET (fillfactor = 90)"); err != nil {
			e.t.Errorf("the table cannot be altered: %v", err)
		}
	}
}
