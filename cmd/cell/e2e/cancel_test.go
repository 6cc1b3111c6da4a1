// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"testing"
	"time"

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
				want, owner := api.MoveRolledBack, cells.CellID("cell-a")
				if decided {
					want, owner = api.MoveDone, "cell-b"
				}
				if rec := e.settle(mv.ID); rec.State != want || e.cellOf(name) != owner {
					t.Errorf("the move is %s, the tenant in %s; want %s in %s", rec.State, e.cellOf(name), want, owner)
				}
				mustBeClean(t, name, stop(), false)
				e.nothingLeft(map[string]cells.CellID{name: owner})
			})
		}
	})
}
