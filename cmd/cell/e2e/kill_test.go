// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// steps are all that a move persists or reports, in order.
var steps = []cells.Step{
	cells.StepBegin, cells.StepPrepare, cells.StepQuiesce, cells.StepGates, cells.StepDrain, cells.StepCopy, cells.StepFence,
	cells.StepEvents, cells.StepFinish, cells.StepCommit, cells.StepStart, cells.StepOpen, cells.StepActivate, cells.StepDiscard, cells.StepRemoved,
}

// The driver, a process of the source and one of the target are killed with
// SIGKILL at every step of a move, while the tenant and others are used. Each
// time the move ends with one owner and every acknowledged write, and tenants of
// cells that nobody killed see nothing.
func TestKillAtEveryStep(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		e := start(t, fleet.Config{Store: store})
		bystanders := map[cells.CellID]*load.Client{"cell-a": e.tenant("other-a", "cell-a"), "cell-b": e.tenant("other-b", "cell-b")}
		victims := []string{"driver", "source", "target"}
		these := steps
		if testing.Short() {
			these, victims = []cells.Step{cells.StepPrepare, cells.StepFence, cells.StepCommit}, []string{"driver"}
		}
		for _, step := range these {
			// One for each step: a tenant takes all its old events along.
			moving := "moving-" + string(step)
			tenant := e.tenant(moving, "cell-a")
			if err := tenant.Fill(t.Context(), "bulk", 300, 200, func(int) {}); err != nil {
				t.Fatal(err)
			}
			for _, victim := range victims {
				t.Run(fmt.Sprintf("%s/%s", step, victim), func(t *testing.T) {
					e := e.in(t)
					from := e.cellOf(moving)
					to := cells.CellID("cell-b")
					if from == to {
						to = "cell-a"
					}
					ns := fmt.Sprintf("h-%s-%s", step, victim)
					stop := e.hammer(&load.Hammer{Client: tenant, Clients: 3, Keys: 5, Namespace: ns, Pause: 3 * time.Millisecond})
					others := map[cells.CellID]func() load.Tally{}
					for cell, c := range bystanders {
						others[cell] = e.hammer(&load.Hammer{Client: c, Clients: 1, Keys: 3, Namespace: ns, Pause: 5 * time.Millisecond})
					}
					e.haltAt(step)
					mv := e.startMove(moving, string(to), ns)
					e.waitHalted()
					killed := map[string]string{"driver": "directory", "source": string(from) + "-1", "target": string(to) + "-1"}[victim]
					e.kill(killed) // first: a driver that is let go is at another step
					e.release()
					end := e.settle(mv.ID)
					owner := e.cellOf(moving)
					mustBeClean(t, moving, stop(), true)
					for cell, tally := range others {
						mustBeClean(t, "other tenant in "+string(cell), tally(), killed == string(cell)+"-1")
					}
					e.nothingLeft(map[string]cells.CellID{moving: owner})
					t.Logf("%s in %s", end.State, owner)
				})
			}
		}
	})
}
