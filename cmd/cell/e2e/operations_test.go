// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// operation is something that the fault matrix lets go wrong at each of its persisted
// steps. It brings tenants to cell-b, its target, from cell-a, its source.
type operation struct {
	name, title string
	// steps are those at which the directory can be made to stand still.
	steps []cells.Step
	// tenants is how many take part, home the cell in which they are placed first; homes,
	// unless nil, those of each.
	tenants int
	home    cells.CellID
	homes   []cells.CellID
	// stays: tenants are to end in cell-a.
	stays bool
	// upgrades: cells get another version, and no tenant moves. rare: only the whole
	// matrix visits it.
	upgrades, rare bool
	// reached says whether a tenant of the cell has what it was to get; nil is that the
	// cell is cell-b.
	reached func(r *run, cell cells.CellID) bool
	// cells, unless nil, are those of a fleet of its own, and others the cells in which
	// other tenants are in use; nil is cell-a and cell-b.
	cells  []fleet.Cell
	others []cells.CellID
	// actions are those that its runs leave in the trace, whatever goes wrong; those of
	// campaigns after "campaign ", those of rollouts after "rollout ".
	actions []string
	// rows and size are what each tenant has; 0 is a hundred rows in all, of 200 bytes.
	rows, size int
	// standing waits until the operation is at the step, unless that is a step at which the
	// directory stands still; lasts is how long a full disk lasts, 0 is as other faults.
	standing func(r *run)
	lasts    time.Duration
	// ready does what comes before; nothing goes wrong yet. Nil is nothing.
	ready func(r *run)
	// ask starts the operation, and returns once it was accepted. The directory will
	// stand still at r.step.
	ask func(r *run)
	// settle waits until it is over and nothing is left to remove, and says of tenants
	// whether the directory's records have them moved to cell-b.
	settle func(r *run) map[string]bool
	// again, unless nil, does it again for a tenant that has not arrived, when nothing is
	// wrong any more: it must arrive.
	again func(r *run, tenant string)
	// after makes room for the next run, and may bring tenants elsewhere. Nil is nothing.
	after func(r *run, owners map[string]cells.CellID)
}

func (op *operation) homeOf(tenant int) cells.CellID {
	if op.homes != nil {
		return op.homes[tenant]
	}
	return op.home
}

// run is one operation, once.
type run struct {
	*env
	op    *operation
	step  cells.Step
	id    string
	names []string // of the tenants

	first, move api.Move
	campaign    api.CampaignID
	rollout     api.RolloutID
	// from and to are the versions of one by upgrade.
	from, to string
}

var runs struct {
	sync.Mutex
	n int // guarded by Mutex
}

func newRun(e *env, op *operation, step cells.Step) *run {
	runs.Lock()
	defer runs.Unlock()
	runs.n++
	r := &run{env: e, op: op, step: step, id: fmt.Sprintf("r%d", runs.n)}
	for i := range op.tenants {
		r.names = append(r.names, fmt.Sprintf("%s-%d", r.id, i))
	}
	return r
}

// operations of the matrix. Each has rows of its own in the report.
var operations = []*operation{
	{
		name: "move", title: "A move", steps: steps, tenants: 1, home: "cell-a",
		actions: []string{cells.ActionBegin, cells.ActionOpened},
		ask:     func(r *run) { r.move = r.startMove(r.names[0], "cell-b", r.id) },
		settle:  settleMove,
		again:   moveAgain,
	},
	{
		name: "copy", title: "A move in the middle of its copy", steps: []cells.Step{"copying"}, tenants: 1, home: "cell-a", rare: true,
		rows: 2000, size: 1500, lasts: 15 * time.Second,
		actions: []string{cells.ActionBegin, cells.ActionOpened},
		ask: func(r *run) {
			none := time.Duration(0)
			r.move = r.askMove(api.MoveRequest{Tenant: cells.TenantID(r.names[0]), To: "cell-b", OperationID: r.id, Actor: "test", Force: true, UndoWindow: &none,
				Throttle: &api.Throttle{RowsPerSecond: 1000}})
		},
		standing: func(r *run) {
			r.settled("rows are being copied", r.move.ID, func(m *api.Move) bool {
				if m.State != api.MovePreparing {
					r.t.Fatalf("the move is %s: %s", m.State, m.Reason)
				}
				return m.Progress != nil && m.Progress.Phase == "snapshot" && m.Progress.Done > 100
			})
		},
		settle: settleMove,
		again:  moveAgain,
	},
	{
		name: "rollback", title: "A move that is rolled back in its cut", tenants: 1, home: "cell-a", stays: true,
		actions: []string{cells.ActionRollback, cells.ActionOpened, cells.ActionDiscard},
		steps:   []cells.Step{cells.StepRollback, cells.StepStart, cells.StepOpen, cells.StepReopen, cells.StepDiscard, cells.StepRemoved},
		ask:     askRollback,
		settle:  settleMove,
	},
	{
		name: "undo", title: "The undo of a move", steps: steps, tenants: 1, home: "cell-b",
		actions: []string{cells.ActionCommit, "undo"},
		ready:   func(r *run) { r.first = r.moveKept(r.names[0], "cell-a", r.id) },
		ask:     func(r *run) { r.move = r.undo(r.names[0], r.id+"-undo") },
		settle: func(r *run) map[string]bool {
			moved := settleMove(r)
			if r.move.State == api.MoveRefused { // it was not begun, and can be asked for again
				closeWindow(r)
			}
			r.settled("the record of the first move", r.first.ID, func(m *api.Move) bool {
				return len(m.Residue) == 0 && (m.UndoneBy == r.move.ID) == (r.move.State == api.MoveDone)
			})
			return moved
		},
	},
	{
		name: "window", title: "The end of an undo window", tenants: 1, home: "cell-a",
		actions: []string{cells.ActionWindowClosed, cells.ActionDiscard, cells.ActionRemoved},
		steps:   []cells.Step{cells.StepWindow, cells.StepDiscard, cells.StepRemoved},
		ready:   func(r *run) { r.first = r.moveKept(r.names[0], "cell-b", r.id) },
		ask: func(r *run) {
			// The answer waits for the directory, which stands still or is killed.
			ctx, cancel := context.WithCancel(r.t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				_, _ = r.cl.CloseWindow(ctx, cells.TenantID(r.names[0]), api.CloseWindowRequest{Actor: "test"})
			})
			r.t.Cleanup(func() { cancel(); wg.Wait() })
		},
		settle: func(r *run) map[string]bool {
			r.settled("the rows are removed", r.first.ID, func(m *api.Move) bool { return len(m.Residue) == 0 })
			return map[string]bool{r.names[0]: true}
		},
	},
	{
		name: "campaign", title: "A campaign of three moves", tenants: 3, home: "cell-a",
		actions: []string{"campaign " + directory.ActionRun, "campaign " + directory.ActionTake, "campaign " + directory.ActionBegin, "campaign " + directory.ActionRecord,
			"campaign " + directory.ActionResult, "campaign " + directory.ActionFinish},
		steps: []cells.Step{"campaign-taken", "campaign-begin", "campaign-created", "campaign-result", campaignStopped, "campaign-finished"},
		ready: planCampaign,
		ask: func(r *run) {
			r.eventually("the campaign runs", 20*time.Second, func() bool {
				_, err := r.cl.RunCampaign(r.t.Context(), r.campaign, api.CampaignOrder{Actor: "test"})
				return err == nil
			})
		},
		settle: settleCampaign,
	},
	rolloutForward,
	rolloutReturn,
	upgradeForward,
	upgradeReturn,
}

// moveAgain moves a tenant whose first move has failed.
func moveAgain(r *run, tenant string) {
	if m := r.env.settle(r.startMove(tenant, "cell-b", r.id+"-again").ID); m.State != api.MoveDone {
		r.t.Errorf("%s again: %s %s", tenant, m.State, m.Reason)
	}
}

// settleMove waits for the end of the run's move.
func settleMove(r *run) map[string]bool {
	r.move = r.settle(r.move.ID)
	return map[string]bool{r.names[0]: r.move.State == api.MoveDone}
}

// settled waits until a move's record is as it should be.
func (r *run) settled(what string, id cells.MoveID, ok func(*api.Move) bool) {
	r.t.Helper()
	r.eventually(what, 60*time.Second, func() bool {
		m, err := r.cl.MoveByID(r.t.Context(), id)
		return err == nil && ok(&m)
	})
}

func closeWindow(r *run) {
	r.t.Helper()
	r.eventually("the window is closed", 20*time.Second, func() bool {
		_, err := r.cl.CloseWindow(r.t.Context(), cells.TenantID(r.names[0]), api.CloseWindowRequest{Actor: "test"})
		return err == nil
	})
}

// askRollback lets a move get into its cut, and has it rolled back there.
func askRollback(r *run) {
	const cut = cells.StepFence
	r.haltAt(cut, r.step)
	r.move = r.startMove(r.names[0], "cell-b", r.id)
	r.waitHalted(cut)
	// The answer waits for the end, which may be far.
	ctx, cancel := context.WithCancel(r.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = r.cl.Rollback(ctx, r.move.ID, api.RollbackRequest{Reason: "test"})
	})
	r.t.Cleanup(func() { cancel(); wg.Wait() })
}

// campaignStopped is the step of a campaign that its failures have paused.
const campaignStopped cells.Step = "campaign-stopped"

func planCampaign(r *run) {
	settings := api.CampaignSettings{Concurrency: 2, StopAfter: "none", UndoWindow: "0s", Force: true}
	if r.step == campaignStopped {
		settings.StopAfter = "1"
	}
	var moves []api.PlannedMove
	for _, name := range r.names {
		moves = append(moves, api.PlannedMove{Tenant: cells.TenantID(name), From: "cell-a", To: "cell-b"})
	}
	p, err := r.cl.PlanCampaign(r.t.Context(), api.CampaignRequest{Moves: moves, Settings: settings, Actor: "test", OperationID: r.id})
	if err != nil {
		r.t.Fatal(err)
	}
	r.campaign = p.Campaign.ID
	if r.step == campaignStopped {
		r.jurisdiction("elsewhere") // the first move cannot be made any more
	}
}

// jurisdiction sets that of the run's first tenant.
func (r *run) jurisdiction(j string) {
	r.t.Helper()
	r.eventually("the jurisdiction is set", 20*time.Second, func() bool {
		_, err := r.cl.SetAttributes(r.t.Context(), cells.TenantID(r.names[0]), api.AttributesRequest{Jurisdiction: j, Actor: "test"})
		return err == nil
	})
}

// settleCampaign waits for the end of the run's campaign, and resumes it when it has
// stopped. Its items must say what the moves' records say.
func settleCampaign(r *run) map[string]bool {
	t := r.t
	fixed := false
	r.eventually("the campaign is done", 90*time.Second, func() bool {
		c, err := r.cl.Campaign(t.Context(), r.campaign)
		if err != nil {
			return false
		}
		if r.step == campaignStopped && c.State == api.CampaignPaused {
			if !fixed {
				r.jurisdiction("")
				fixed = true
			}
			_, _ = r.cl.ResumeCampaign(t.Context(), r.campaign, api.CampaignOrder{Actor: "test", Retry: true})
		}
		return c.State == api.CampaignDone
	})
	if r.step == campaignStopped && !fixed {
		t.Error("the campaign has not stopped at its failure")
	}
	items, err := r.cl.CampaignItems(t.Context(), r.campaign, client.ItemQuery{Limit: 100})
	if err != nil || len(items.Items) != len(r.names) {
		t.Fatalf("items %+v, %v", items, err)
	}
	out := map[string]bool{}
	for _, it := range items.Items {
		out[string(it.Tenant)] = it.State == api.ItemMoved
		if !it.State.Final() {
			t.Errorf("%s: %s in a campaign that is done", it.Tenant, it.State)
		}
		done, err := r.attempts(&it)
		if err != nil {
			t.Errorf("moves of %s: %v", it.Tenant, err)
		} else if (done == 1) != (it.State == api.ItemMoved) || done > 1 {
			t.Errorf("%s: %s after %d moves", it.Tenant, it.State, done)
		}
	}
	return out
}

// attempts waits until all that was begun for an item is over, and counts how often
// its tenant was moved.
func (r *run) attempts(it *api.CampaignItem) (done int, err error) {
	for n := 1; n <= it.Attempt; n++ {
		id := api.ItemMove(r.campaign, it.Pos, n)
		_, err := r.cl.MoveByID(r.t.Context(), id)
		if a := cells.AnswerOf(err); a != nil && a.Code == cells.CodeNotFound {
			continue // it was not recorded
		}
		if err != nil {
			return done, err
		}
		if m := r.env.settle(id); m.State == api.MoveDone {
			done++
		}
	}
	if it.State == api.ItemMoved && it.Attempt == 0 {
		return done, errors.New("moved without an attempt")
	}
	return done, nil
}

// Every operation has steps, and every fault has a way to begin.
func TestFaultMatrixIsWhole(t *testing.T) {
	seen := map[string]bool{}
	for o, op := range operations {
		if seen[op.name] || len(op.steps) == 0 || op.tenants == 0 || op.ask == nil || op.settle == nil {
			t.Errorf("operation %d: %+v", o, op)
		}
		seen[op.name] = true
		sampled := 0
		for s := range 2 {
			for i := range faults {
				for j := range op.steps {
					if op.sampled(s, o, i, j) {
						sampled++
					}
				}
			}
		}
		if !op.rare && (sampled < 3 && op.cells == nil || sampled == 0) {
			t.Errorf("%s: the suite visits %d of its steps", op.name, sampled)
		}
	}
}
