// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/receipt"
)

var receiptKey = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))

func withReceipts(c *directory.Config) {
	withBudget(c)
	c.ReceiptKey = receiptKey
}

// receipt reads and verifies the receipt of a move.
func (d *dir) receipt(id cells.MoveID) []receipt.Statement {
	d.t.Helper()
	r, err := d.cl.Receipt(ctxOf(d.t), id)
	if err != nil {
		d.t.Fatal(err)
	}
	doc, err := json.Marshal(r)
	if err != nil {
		d.t.Fatal(err)
	}
	list, err := receipt.Verify(doc, []ed25519.PublicKey{receiptKey.Public().(ed25519.PublicKey)})
	if err != nil {
		d.t.Fatalf("%v\n%s", err, doc)
	}
	return list
}

func (d *dir) edge(name string) *client.EdgeClient {
	d.t.Helper()
	e, err := client.Edge(d.peer(channel.RoleEdge, name), d.chURL)
	if err != nil {
		d.t.Fatal(err)
	}
	return e
}

func TestReceiptOfACommittedMove(t *testing.T) {
	_, d := fleetOf(t, withReceipts)
	m, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b", Actor: "alice", Force: true, OperationID: "op-1"})
	if err != nil {
		t.Fatal(err)
	}
	m = d.untilState(m.ID, api.MoveDone)
	list := d.receipt(m.ID)
	if len(list) != 2 || list[1].Removal == nil || *list[1].Removal != (receipt.Removal{Cell: "a", Epoch: 2, Gone: true}) {
		t.Fatalf("%+v", list)
	}
	o := list[0].Outcome
	if o.Verdict != receipt.Committed || o.Source != "a" || o.Target != "b" || o.Base != 1 || o.Closed != 2 || o.Opened != 3 || o.DataMark == "" ||
		o.Actor != "alice" || !o.Forced || o.Operation != "op-1" || o.Request == "" || o.Driver != d.Instance() ||
		o.Predicted <= 0 || o.Bound <= 0 || o.Pause <= 0 || o.Clients != nil || o.Rows != 1000 || o.ComparedUnknown ||
		o.Cut.IsZero() || o.Decided.Before(o.Cut) || o.Served.Before(o.Decided) || len(o.Remains) != 1 || list[0].Tenant != "t" {
		t.Errorf("outcome %+v", o)
	}
	if b := o.Budget; b == nil || b.Limit != cells.DefaultBudget || b.Before != b.Limit || b.Charged <= 0 || b.After != b.Before-b.Charged {
		t.Errorf("budget %+v", o.Budget)
	}
	if len(o.Tables) != 2 || !o.Tables[0].Whole || o.Tables[0].Source != o.Tables[0].Target || o.Tables[0].Source.Rows != 1000 || o.Tables[1].Keys != 3 {
		t.Errorf("tables %+v", o.Tables)
	}
	if m.Bound != o.Bound || m.DataMark != o.DataMark || len(m.Compared) != 2 {
		t.Errorf("record %+v", m)
	}
	page, err := d.cl.Moves(ctxOf(t), client.MoveQuery{})
	if err != nil || len(page.Moves) != 1 || page.Moves[0].Compared != nil {
		t.Errorf("list %+v, %v", page, err)
	}
}

func TestReceiptOfARollback(t *testing.T) {
	s, d := fleetOf(t, withReceipts)
	s.far.set(func() { s.far.fail["Finish"] = -1 })
	m := d.untilState(d.move("t", "b").ID, api.MoveRolledBack)
	list := d.receipt(m.ID)
	o := list[0].Outcome
	if o.Verdict != receipt.RolledBack || o.Reason == "" || o.Opened != 3 || o.DataMark != "" || o.Pause <= 0 || o.Forced || o.Budget.Charged <= 0 {
		t.Errorf("outcome %+v", o)
	}
	if len(list) != 2 || list[1].Removal == nil || list[1].Removal.Cell != "b" || !list[1].Removal.Gone {
		t.Errorf("%+v", list)
	}
}

func TestNoReceipt(t *testing.T) {
	_, d := fleetOf(t, withBudget)
	m := d.untilState(d.move("t", "b").ID, api.MoveDone)
	_, err := d.cl.Receipt(ctxOf(t), m.ID)
	wantCode(t, err, cells.CodeNotFound)
	_, err = d.cl.Receipt(ctxOf(t), "mv-none")
	wantCode(t, err, cells.CodeNotFound)
}

// A driver that dies at any step leaves a move whose receipt the next driver writes,
// once.
func TestReceiptSurvivesItsDriver(t *testing.T) {
	for _, at := range []cells.Step{cells.StepBegin, cells.StepFinish, cells.StepCommit, cells.StepActivate, cells.StepDiscard, cells.StepRemoved} {
		t.Run(string(at), func(t *testing.T) {
			died := make(chan struct{})
			s, d := fleetOf(t, func(c *directory.Config) {
				withReceipts(c)
				dead := false
				c.StepHook = func(_ context.Context, ev cells.StepEvent) error {
					if ev.Step == at && !dead {
						dead = true
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
			d = s.start(t, withReceipts)
			d.untilState(m.ID, api.MoveDone)
			list := d.receipt(m.ID)
			if len(list) != 2 || list[0].Outcome.Verdict != receipt.Committed || list[0].Outcome.DataMark == "" || list[1].Removal == nil {
				t.Errorf("%+v", list)
			}
			if o := list[0].Outcome; (len(o.Tables) == 0) != o.ComparedUnknown {
				t.Errorf("tables %+v, unknown %v", o.Tables, o.ComparedUnknown)
			}
		})
	}
}

func TestSeenIsCharged(t *testing.T) {
	_, d := fleetOf(t, withReceipts)
	m := d.untilState(d.move("t", "b").ID, api.MoveDone)
	driver := func() cells.BudgetEntry {
		t.Helper()
		a, err := d.cl.Budget(ctxOf(t), "t")
		if err != nil || len(a.Entries) != 1 {
			t.Fatalf("%+v, %v", a, err)
		}
		return a.Entries[0]
	}
	before := driver()
	if before.Reported || before.Pause != before.Driver || before.Driver <= 0 {
		t.Fatalf("entry %+v", before)
	}
	report := func(edge, instance string, seq, refused int64, first, last time.Duration) {
		t.Helper()
		x := api.SeenMove{Tenant: "t", Move: m.ID, Base: m.Base, Seq: seq, Refused: refused, FirstAgo: first, LastAgo: last}
		if instance == "by-base" {
			x.Move = ""
		}
		if err := d.edge(edge).ReportSeen(ctxOf(t), api.SeenReport{Instance: instance, Moves: []api.SeenMove{x}}); err != nil {
			t.Fatal(err)
		}
	}
	want := func(span time.Duration, statements int) {
		t.Helper()
		e := driver()
		// Ages are turned into times when they arrive: two reports may be a little apart.
		if !e.Reported || e.Pause != e.Seen || e.Seen < span-span/10 || e.Seen > span+2*time.Second || span == 0 && e.Seen != 0 || e.Driver != before.Driver {
			t.Errorf("entry %+v, want %v", e, span)
		}
		rec, err := d.cl.MoveByID(ctxOf(t), m.ID)
		if err != nil || rec.Seen == nil || *rec.Seen != e.Seen {
			t.Errorf("record %+v, %v", rec.Seen, err)
		}
		list := d.receipt(m.ID)
		if len(list) != statements {
			t.Fatalf("%d statements, want %d: %+v", len(list), statements, list)
		}
		last := list[len(list)-1].Clients
		if last == nil || last.Seen.Span != e.Seen || last.Budget.Charged != e.Pause || last.Budget.Before != cells.DefaultBudget {
			t.Errorf("statement %+v", last)
		}
	}
	report("e1", "i1", 1, 0, 0, 0)
	want(0, 3)
	report("e1", "i1", 2, 5, 10*time.Minute, 8*time.Minute)
	want(2*time.Minute, 4)
	report("e1", "i1", 2, 5, 60*time.Minute, 1*time.Minute) // the same report again, late
	report("e1", "i1", 1, 0, 0, 0)
	want(2*time.Minute, 4)
	report("e2", "by-base", 1, 1, 30*time.Minute, 29*time.Minute) // another edge: from its first refusal to the last of any
	want(22*time.Minute, 5)
	report("e2", "i3", 1, 0, 0, 0) // a third that saw none
	want(22*time.Minute, 6)
}

func TestSeenBeforeTheEndIsInTheOutcome(t *testing.T) {
	reported := make(chan error, 1)
	var d *dir
	ready := make(chan struct{})
	_, d = fleetOf(t, func(c *directory.Config) {
		withReceipts(c)
		c.StepHook = func(_ context.Context, ev cells.StepEvent) error {
			if ev.Step == cells.StepFinish {
				<-ready
				reported <- d.edge("e1").ReportSeen(ctxOf(t), api.SeenReport{Instance: "i1", Moves: []api.SeenMove{
					{Tenant: "t", Base: 1, Seq: 1, Refused: 2, FirstAgo: 3 * time.Second, LastAgo: -time.Second}}})
			}
			return nil
		}
	})
	close(ready)
	m := d.untilState(d.move("t", "b").ID, api.MoveDone)
	if err := <-reported; err != nil {
		t.Fatal(err)
	}
	list := d.receipt(m.ID)
	o := list[0].Outcome
	if len(list) != 2 || o.Clients == nil || o.Clients.Span != 4*time.Second || o.Clients.Refused != 2 || o.Budget.Charged != 4*time.Second {
		t.Errorf("%+v", o.Clients)
	}
}

func TestSeenRefusals(t *testing.T) {
	_, d := fleetOf(t, withReceipts)
	m := d.untilState(d.move("t", "b").ID, api.MoveDone)
	good := api.SeenMove{Tenant: "t", Move: m.ID, Base: 1, Seq: 1, Refused: 1, FirstAgo: time.Second}
	for name, c := range map[string]struct {
		role   channel.Role
		mod    func(*api.SeenReport)
		status int
	}{
		"a cell":          {channel.RoleCell, func(*api.SeenReport) {}, http.StatusForbidden},
		"an operator":     {channel.RoleOperator, func(*api.SeenReport) {}, http.StatusForbidden},
		"no instance":     {channel.RoleEdge, func(r *api.SeenReport) { r.Instance = "" }, 400},
		"no seq":          {channel.RoleEdge, func(r *api.SeenReport) { r.Moves[0].Seq = 0 }, 400},
		"bad tenant":      {channel.RoleEdge, func(r *api.SeenReport) { r.Moves[0].Tenant = "t t" }, 400},
		"another tenant":  {channel.RoleEdge, func(r *api.SeenReport) { r.Moves[0].Tenant = "u" }, 400},
		"backwards":       {channel.RoleEdge, func(r *api.SeenReport) { r.Moves[0].LastAgo = 2 * time.Second }, 400},
		"too long ago":    {channel.RoleEdge, func(r *api.SeenReport) { r.Moves[0].FirstAgo = 25 * time.Hour }, 400},
		"times of nobody": {channel.RoleEdge, func(r *api.SeenReport) { r.Moves[0].Refused = 0 }, 400},
		"too many":        {channel.RoleEdge, func(r *api.SeenReport) { r.Moves = make([]api.SeenMove, api.MaxSeen+1) }, 400},
	} {
		r := api.SeenReport{Instance: "i1", Moves: []api.SeenMove{good}}
		c.mod(&r)
		if a := d.post(d.peer(c.role, "a"), api.PathSeen, r); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	// What is not known is no reason to send it for ever.
	x := good
	x.Move = "mv-unknown"
	y := good
	y.Move, y.Base = "", 99
	if err := d.edge("e1").ReportSeen(ctxOf(t), api.SeenReport{Instance: "i1", Moves: []api.SeenMove{x, y}}); err != nil {
		t.Error(err)
	}
	if a, err := d.cl.Budget(ctxOf(t), "t"); err != nil || len(a.Entries) != 1 || a.Entries[0].Reported {
		t.Errorf("%+v, %v", a, err)
	}
}

// A receipt is ended once nothing is left to tell, and edges have had their time: by
// whichever directory runs then. Reports that are later change the budget only.
func TestReceiptEnds(t *testing.T) {
	s := newState(t)
	d, f := s.startBack(t) // its grace is longer than the test
	window, none := time.Hour, time.Duration(0)
	m := d.moved(api.MoveRequest{Tenant: "t", To: "b", Actor: "alice", UndoWindow: &window})
	if list := d.receipt(m.ID); len(list) != 1 || receipt.Ended(list) {
		t.Errorf("%+v", list)
	}
	d.close()
	d = s.start(t, func(c *directory.Config) {
		withReceipts(c)
		c.Agents, c.ReceiptGrace, c.SweepEvery = f, time.Millisecond, 10*time.Millisecond
	})
	d.place("u", "a")
	// While rows are kept for the undo it goes on; another move's ends meanwhile.
	other := d.moved(api.MoveRequest{Tenant: "u", To: "b", UndoWindow: &none})
	eventually(t, "the receipt of the other move ends", func() bool { return receipt.Ended(d.receipt(other.ID)) })
	if list := d.receipt(m.ID); len(list) != 1 {
		t.Errorf("%+v", list)
	}
	if _, err := d.cl.CloseWindow(ctxOf(t), "t", api.CloseWindowRequest{Actor: "alice"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the receipt ends", func() bool { return receipt.Ended(d.receipt(m.ID)) })
	list := d.receipt(m.ID)
	if len(list) != 3 || list[1].Removal == nil || list[2].End.Statements != 3 || list[2].Tenant != "t" || list[2].By != d.Instance() {
		t.Errorf("%+v", list)
	}
	late := api.SeenMove{Tenant: "t", Move: m.ID, Base: m.Base, Seq: 1, Refused: 5, FirstAgo: 2 * time.Minute, LastAgo: time.Minute}
	if err := d.edge("e1").ReportSeen(ctxOf(t), api.SeenReport{Instance: "i1", Moves: []api.SeenMove{late}}); err != nil {
		t.Fatal(err)
	}
	if list := d.receipt(m.ID); len(list) != 3 {
		t.Errorf("a report behind the end: %+v", list)
	}
	if a, err := d.cl.Budget(ctxOf(t), "t"); err != nil || len(a.Entries) != 1 || a.Entries[0].Seen < 50*time.Second {
		t.Errorf("%+v, %v", a, err)
	}
}
