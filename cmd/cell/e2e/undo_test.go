// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
)

// moveKept moves a tenant so that the move can be undone, and waits until the target
// serves.
func (e *env) moveKept(tenant, to, op string) api.Move {
	e.t.Helper()
	window := time.Hour
	mv := e.askMove(api.MoveRequest{Tenant: cells.TenantID(tenant), To: cells.CellID(to), OperationID: op, Actor: "test", Force: true, UndoWindow: &window})
	e.eventually("move "+string(mv.ID)+" ends", 60*time.Second, func() bool {
		m, err := e.cl.MoveByID(e.t.Context(), mv.ID)
		if err == nil {
			mv = m
		}
		return err == nil && m.State.Final()
	})
	if mv.State != api.MoveDone || len(mv.Residue) != 1 || !mv.Residue[0].Held() {
		e.t.Fatalf("the move cannot be undone: %+v", mv)
	}
	return mv
}

func (e *env) undo(tenant, op string) api.Move {
	e.t.Helper()
	return e.askMove(api.MoveRequest{Tenant: cells.TenantID(tenant), Undo: true, OperationID: op, Actor: "test", Force: true})
}

// brought waits until changes have come back to the cell that keeps the tenant's rows.
func (e *env) brought(tenant string) {
	e.t.Helper()
	e.eventually("changes are brought back", 60*time.Second, func() bool {
		t, err := e.cl.Tenant(e.t.Context(), cells.TenantID(tenant))
		return err == nil && t.Window != nil && t.Window.Changes > 0
	})
}

// A tenant is moved and the move is undone, again and again, while it is hammered: no
// request fails, nothing is lost, and what the clients saw is one history.
func TestUndoUnderLoad(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		e := start(t, fleet.Config{Store: store})
		*e.traces = append(*e.traces, cells.ActionReturn, "undo")
		tenant := e.tenant("undone", "cell-a")
		if err := tenant.Fill(t.Context(), "bulk", 300, 200, func(int) {}); err != nil {
			t.Fatal(err)
		}
		h := &load.Hammer{Client: tenant, Clients: 4, Keys: 4, Pause: 5 * time.Millisecond}
		stop := e.hammer(h)
		for i := range 3 {
			m := e.moveKept("undone", "cell-b", fmt.Sprintf("there-%d", i))
			if i < 2 {
				e.brought("undone") // once it is undone before any round
			}
			u := e.settle(e.undo("undone", fmt.Sprintf("back-%d", i)).ID)
			if u.State != api.MoveDone || u.Undoes != m.ID || e.cellOf("undone") != "cell-a" {
				t.Fatalf("the undo ended %s (%s), the tenant is in %s", u.State, u.Reason, e.cellOf("undone"))
			}
		}
		mustBeClean(t, "undone", stop(), false)
		if r := linearizable(h.Ops(), h.Found); r != porcupine.Ok {
			t.Errorf("the history is %v", r)
		}
	})
}

// The driver, a process of the source and one of the target are killed with SIGKILL
// at the steps of an undo, one of them at each, while the tenant is used. Each time the
// undo ends with one owner and every acknowledged write, and nothing is left behind.
func TestUndoKilledAtEveryStep(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		e := start(t, fleet.Config{Store: store})
		these := steps
		if testing.Short() {
			these = []cells.Step{cells.StepPrepare, cells.StepFinish, cells.StepOpen}
		}
		for i, step := range these {
			victim := []string{"directory", "cell-b-1", "cell-a-1"}[i%3] // b is the undo's source
			t.Run(fmt.Sprintf("%s/%s", step, victim), func(t *testing.T) {
				e := &env{Fleet: e.Fleet, t: t, cl: e.cl, http: e.http, halt: e.halt}
				name := "undone-" + string(step)
				tenant := e.tenant(name, "cell-a")
				if err := tenant.Fill(t.Context(), "bulk", 100, 200, func(int) {}); err != nil {
					t.Fatal(err)
				}
				stop := e.hammer(&load.Hammer{Client: tenant, Clients: 3, Keys: 5, Pause: 4 * time.Millisecond})
				m := e.moveKept(name, "cell-b", name)
				e.haltAt(step)
				u := e.undo(name, "undo-"+name)
				e.waitHalted()
				e.kill(victim)
				e.release()
				end := e.settle(u.ID)
				owner := e.cellOf(name)
				mustBeClean(t, name, stop(), true)
				if want := map[api.MoveState]cells.CellID{api.MoveDone: "cell-a", api.MoveRolledBack: "cell-b"}[end.State]; owner != want {
					t.Errorf("the undo ended %s, the owner is %s", end.State, owner)
				}
				e.eventually("the record of the move is clean", 20*time.Second, func() bool {
					got, err := e.cl.MoveByID(t.Context(), m.ID)
					return err == nil && len(got.Residue) == 0 && (got.UndoneBy == u.ID) == (end.State == api.MoveDone)
				})
				e.nothingLeft(map[string]cells.CellID{name: owner})
				t.Logf("%s in %s", end.State, owner)
			})
		}
	})
}
