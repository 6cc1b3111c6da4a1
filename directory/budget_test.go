// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/receipt"
)

func withBudget(c *directory.Config) {
	c.Budget = cells.NewBudgetMeter(cells.WithBudgetStore(c.Store.Budgets()))
}

func TestBudgetAPI(t *testing.T) {
	_, d := fleetOf(t, withBudget)
	list, err := d.cl.Budgets(ctxOf(t))
	if err != nil || list.Default.Pause != 129600*time.Millisecond || list.Window != 720*time.Hour || len(list.Tenants) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := d.cl.SetBudget(ctxOf(t), "", api.BudgetSpec{Pause: time.Minute, Actor: "alice"}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.cl.SetBudget(ctxOf(t), "t", api.BudgetSpec{Pause: 1, Actor: "alice"}); err != nil {
		t.Fatal(err)
	}
	list, err = d.cl.Budgets(ctxOf(t))
	if err != nil || list.Default.Pause != time.Minute || len(list.Tenants) != 1 || list.Tenants[0].Tenant != "t" || list.Tenants[0].Actor != "alice" {
		t.Errorf("%+v, %v", list, err)
	}
	for _, bad := range []api.BudgetSpec{{Pause: -1}, {Pause: 721 * time.Hour}, {Actor: strings.Repeat("x", 1000)}} {
		_, err := d.cl.SetBudget(ctxOf(t), "t", bad)
		wantCode(t, err, cells.CodeBadRequest)
	}
	if a := d.raw(http.MethodPut, api.PathBudgets+"/t%20x", "", "application/json", `{"pause":1}`); a.status != 400 {
		t.Errorf("bad tenant: %d %s", a.status, a.body)
	}
	if a := d.raw(http.MethodGet, api.PathBudgets, "none", "", ""); a.status != 401 {
		t.Errorf("without a credential: %d", a.status)
	}

	// The move does not fit, and the refusal says what would.
	m := d.untilState(d.move("t", "b").ID, api.MoveRefused)
	for _, want := range []string{"1ns", "30 days", "--force"} {
		if !strings.Contains(m.Reason, want) {
			t.Errorf("reason %q lacks %q", m.Reason, want)
		}
	}
	acc, err := d.cl.Budget(ctxOf(t), "t")
	if err != nil || !acc.Limit.Own || acc.Left != 1 || len(acc.Entries) != 0 {
		t.Errorf("%+v, %v", acc, err)
	}
	// Forced, it goes through, and the account tells who.
	m, err = d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", Actor: "bob", Force: true})
	if err != nil {
		t.Fatal(err)
	}
	d.untilState(m.ID, api.MoveDone)
	acc, err = d.cl.Budget(ctxOf(t), "t")
	if err != nil || len(acc.Entries) != 1 || !acc.Entries[0].Forced || acc.Entries[0].Actor != "bob" || acc.Entries[0].Reserved || acc.Left != 0 {
		t.Errorf("%+v, %v", acc, err)
	}
	if err := d.cl.ResetBudget(ctxOf(t), "t", "alice"); err != nil {
		t.Fatal(err)
	}
	err = d.cl.ResetBudget(ctxOf(t), "t", "alice")
	wantCode(t, err, cells.CodeNotFound)
	if acc, err = d.cl.Budget(ctxOf(t), "t"); err != nil || acc.Limit.Own || acc.Limit.Pause != time.Minute {
		t.Errorf("%+v, %v", acc, err)
	}
}

func TestBudgetAPIWithoutBudgets(t *testing.T) {
	_, d := fleetOf(t, nil)
	_, err := d.cl.Budget(ctxOf(t), "t")
	wantCode(t, err, cells.CodeNotServed)
	_, err = d.cl.SetBudget(ctxOf(t), "", api.BudgetSpec{Pause: time.Minute})
	wantCode(t, err, cells.CodeNotServed)
}

// A driver that dies between the end of its move and the charge leaves a
// reservation; whoever concludes the move settles it, with the pause that the record
// tells, or with what was reserved if its steps were lost with the driver.
func TestReservationsAreSettled(t *testing.T) {
	for _, at := range []cells.Step{cells.StepActivate, cells.StepDrain, cells.StepBegin} {
		t.Run(string(at), func(t *testing.T) {
			died := make(chan struct{})
			s, d := fleetOf(t, func(c *directory.Config) {
				withBudget(c)
				c.StepHook = func(_ context.Context, ev cells.StepEvent) error {
					if ev.Step == at {
						close(died)
						return errors.New("died")
					}
					return nil
				}
				c.TakeOver = time.Hour
			})
			m := d.move("t", "b")
			<-died
			d.close()
			d = s.start(t, withBudget)
			end := d.untilState(m.ID, api.MoveDone)
			a, err := d.cl.Budget(ctxOf(t), "t")
			if err != nil {
				t.Fatal(err)
			}
			e, ok := a.Entry(m.ID)
			lost := at == cells.StepActivate && e.Driver == 0 && e.Pause >= cells.DefaultPauseHeadroom
			if !ok || e.Reserved || !lost && (e.Driver <= 0 || e.Pause != e.Driver) || e.Pause > time.Minute {
				t.Errorf("entry %+v of %+v", e, end)
			}
		})
	}
}

// A cut that hangs behind its prediction is rolled back within what it has reserved,
// and what it cost is charged.
func TestOverrunRollsBack(t *testing.T) {
	s, d := fleetOf(t, func(c *directory.Config) {
		withReceipts(c)
		c.PauseHeadroom = 300 * time.Millisecond
	})
	hang := make(chan struct{})
	defer close(hang)
	s.far.set(func() { s.far.block["Finish"] = hang })
	m := d.untilState(d.move("t", "b").ID, api.MoveRolledBack)
	if m.Bound < 300*time.Millisecond || m.Bound > time.Second || m.Pause < m.Bound || m.Pause > 15*time.Second {
		t.Errorf("bound %v, pause %v", m.Bound, m.Pause)
	}
	d.check("t", "a")
	a, err := d.cl.Budget(ctxOf(t), "t")
	if err != nil || len(a.Entries) != 1 || a.Entries[0].Reserved || a.Entries[0].Driver < m.Bound || a.Left != a.Limit.Pause-a.Entries[0].Driver {
		t.Errorf("%+v, %v", a, err)
	}
	if o := d.receipt(m.ID)[0].Outcome; o.Bound != m.Bound || o.Verdict != receipt.RolledBack || !strings.Contains(o.Reason, "deadline") {
		t.Errorf("outcome %+v", o)
	}
}
