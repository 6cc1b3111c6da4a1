// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// verified waits for a receipt that satisfies ok, and verifies it as an operator
// would, from a file and with the public key only.
func (e *env) verified(id cells.MoveID, what string, ok func([]receipt.Statement) bool) []receipt.Statement {
	e.t.Helper()
	var list []receipt.Statement
	e.eventually("the receipt of "+string(id)+": "+what, 20*time.Second, func() bool {
		r, err := e.cl.Receipt(e.t.Context(), id)
		if err != nil {
			return false
		}
		list, err = r.Statements()
		return err == nil && ok(list)
	})
	doc, _ := e.cell("moves", "show", string(id), "--receipt")
	file, key := filepath.Join(e.t.TempDir(), "receipt.json"), filepath.Join(e.t.TempDir(), "receipt.pub")
	public, err := os.ReadFile(filepath.Join(e.Layout.PKI(), pki.ReceiptPublicFile))
	if err != nil {
		e.t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(file, []byte(doc), 0o600), os.WriteFile(key, public, 0o600)); err != nil {
		e.t.Fatal(err)
	}
	if out, code := e.cell("--operator-url", "http://127.0.0.1:1", "moves", "verify", "--file", file, "--key", key); code != 0 && code != 7 || !strings.Contains(out, "verified") {
		e.t.Errorf("verify: %d %s", code, out)
	}
	if out, code := e.cell("moves", "verify", string(id), "--file", file); code != 0 && code != 7 {
		e.t.Errorf("verify with the directory: %d %s", code, out)
	}
	forged := strings.Replace(doc, `"actor": "`, `"actor": "m`, 1)
	if err := os.WriteFile(file, []byte(forged), 0o600); err != nil || forged == doc {
		e.t.Fatal("nothing was forged", err)
	}
	if out, code := e.cell("moves", "verify", "--file", file); code != 6 {
		e.t.Errorf("a forged receipt: %d %s", code, out)
	}
	return list
}

// The life of a budget: held requests cost nothing; a move that does not fit is
// refused, and says why; one that is forced goes through, and its receipt says who
// forced it.
func TestBudgetAndReceipts(t *testing.T) {
	t.Setenv("CELL_ACTOR", "alice")
	stores(t, func(t *testing.T, store string) {
		dir, err := os.MkdirTemp("", "cell-fleet-")
		if err != nil {
			t.Fatal(err)
		}
		e := startIn(t, dir, fleet.Config{Store: store}, func(o *fleet.Options) {
			o.DirectoryArgs = append(o.DirectoryArgs, "--receipt-grace", "5s")
		})
		tenant := e.tenant("acme", "cell-a")
		if err := tenant.Fill(t.Context(), "bulk", 200, 100, func(int) {}); err != nil {
			t.Fatal(err)
		}
		stop := e.hammer(&load.Hammer{Client: tenant, Clients: 3, Keys: 5, Namespace: "h", Pause: 2 * time.Millisecond})
		first, err := e.cl.Move(t.Context(), api.MoveRequest{Tenant: "acme", To: "cell-b", Actor: "bob", UndoWindow: new(time.Duration)})
		if err != nil {
			t.Fatal(err)
		}
		mv := e.settle(first.ID)
		if tally := stop(); tally.Failed > 0 || mv.State != api.MoveDone {
			t.Fatalf("%s: %s; %d requests failed: %s", mv.State, mv.Reason, tally.Failed, tally.FirstFailure)
		}
		clients := func(list []receipt.Statement) *receipt.Seen {
			seen := list[0].Outcome.Clients
			for _, s := range list {
				if s.Clients != nil {
					seen = &s.Clients.Seen
				}
			}
			return seen
		}
		list := e.verified(mv.ID, "the edge has reported, and the rows are gone", func(list []receipt.Statement) bool {
			return clients(list) != nil && slices.ContainsFunc(list, func(s receipt.Statement) bool { return s.Removal != nil })
		})
		o := list[0].Outcome
		whole, keys := 0, 0
		for _, x := range o.Tables {
			if x.Whole {
				whole++
			} else {
				keys++
			}
			if x.Source != x.Target || x.Source.Sum == "" {
				t.Errorf("comparison %+v", x)
			}
		}
		if o.Verdict != receipt.Committed || o.Actor != "bob" || o.Forced || o.DataMark == "" || o.EventMark == 0 || whole == 0 || keys == 0 ||
			o.Pause <= 0 || o.Bound < 5*time.Second || o.Budget == nil {
			t.Errorf("outcome %+v", o)
		}
		if seen := clients(list); seen.Refused != 0 || seen.Edges != 1 {
			t.Errorf("clients saw %+v", seen)
		}
		acc, err := e.cl.Budget(t.Context(), "acme")
		if err != nil || acc.Left != cells.DefaultBudget || len(acc.Entries) != 1 || acc.Entries[0].Driver <= 0 || !acc.Entries[0].Reported {
			t.Errorf("account %+v, %v", acc, err)
		}

		// Nothing is left: no move, unless it is forced.
		if out, code := e.cell("budget", "set", "acme", "--pause", "1ms"); code != 0 {
			t.Fatalf("%d %s", code, out)
		}
		out, code := e.cell("move", "acme", "--to", "cell-a")
		if code != 3 || !strings.Contains(out, "BUDGET_EXCEEDED") || !strings.Contains(out, "left of 1ms") || !strings.Contains(out, "--force") || e.cellOf("acme") != "cell-b" {
			t.Errorf("%d %s", code, out)
		}
		for _, dry := range [][]string{nil, {"--dry-run"}} {
			out, code := e.cell(append([]string{"--json", "move", "acme", "--to", "cell-a"}, dry...)...)
			if code != 3 || strings.Count(out, `"code": "BUDGET_EXCEEDED"`) != 2 || !strings.Contains(out, `"exit": 3`) { // in the record and in the error
				t.Errorf("%v: %d %s", dry, code, out)
			}
		}
		out, code = e.cell("--json", "move", "acme", "--to", "cell-a", "--force", "--undo-window", "0s")
		var forced api.Move
		if err := json.NewDecoder(strings.NewReader(out)).Decode(&forced); code != 0 || err != nil {
			t.Fatalf("%d %s %v", code, out, err)
		}
		e.settle(forced.ID)
		o = e.verified(forced.ID, "it is there", func(list []receipt.Statement) bool { return len(list) > 0 })[0].Outcome
		if !o.Forced || o.Actor != "alice" || o.Verdict != receipt.Committed || o.Budget.Limit != time.Millisecond {
			t.Errorf("outcome %+v", o)
		}
		if out, code := e.cell("budget", "acme"); code != 0 || !strings.Contains(out, "alice") || !strings.Contains(out, "its own limit") {
			t.Errorf("%d %s", code, out)
		}
		// By now the first receipt has its end; a copy of it that was cut is seen to be cut.
		e.eventually("the first receipt is whole", 60*time.Second, func() bool {
			_, code := e.cell("moves", "verify", string(mv.ID))
			return code == 0
		})
		copied, err := e.cl.Receipt(t.Context(), mv.ID)
		if err != nil {
			t.Fatal(err)
		}
		copied.Entries = copied.Entries[:len(copied.Entries)-1]
		doc, err := json.Marshal(copied)
		cut := filepath.Join(t.TempDir(), "cut.json")
		if err := errors.Join(err, os.WriteFile(cut, doc, 0o600)); err != nil {
			t.Fatal(err)
		}
		if out, code := e.cell("moves", "verify", "--file", cut); code != 7 || !strings.Contains(out, "verified, open") {
			t.Errorf("a cut receipt: %d %s", code, out)
		}
		if out, code := e.cell("moves", "verify", string(mv.ID), "--file", cut); code != 7 || !strings.Contains(out, "verified, cut") {
			t.Errorf("a cut receipt beside the directory's: %d %s", code, out)
		}
		if out, code := e.cell("moves", "show", string(forced.ID)); code != 0 || !strings.Contains(out, "FORCED") || !strings.Contains(out, "all rows") {
			t.Errorf("%d %s", code, out)
		}
	})
}

// A cut that takes longer than what it has reserved is rolled back; the tenant is
// served by its old cell, nothing is lost, and it is charged with what clients saw.
func TestOverrunIsRolledBackAndCharged(t *testing.T) {
	dir, err := os.MkdirTemp("", "cell-fleet-")
	if err != nil {
		t.Fatal(err)
	}
	e := startIn(t, dir, fleet.Config{}, func(o *fleet.Options) {
		o.DirectoryArgs = append(o.DirectoryArgs, "--pause-headroom", "500ms")
		o.EdgeArgs = append(o.EdgeArgs, "--hold-time", "200ms")
	})
	tenant := e.tenant("acme", "cell-a")
	if _, err := tenant.Set(t.Context(), "n", "k", "kept", -1); err != nil {
		t.Fatal(err)
	}
	h := &load.Hammer{Client: tenant, Clients: 3, Keys: 5, Namespace: "h", Pause: 5 * time.Millisecond}
	stop := e.hammer(h)
	e.haltAt(cells.StepFence)
	mv, err := e.cl.Move(t.Context(), api.MoveRequest{Tenant: "acme", To: "cell-b", Actor: "bob", UndoWindow: new(time.Duration)})
	if err != nil {
		t.Fatal(err)
	}
	e.waitHalted()
	// The driver stands still inside of the cut until its time is up and clients have
	// been refused.
	e.eventually("the edge has refused and said so", 20*time.Second, func() bool {
		a, err := e.cl.Budget(t.Context(), "acme")
		return err == nil && len(a.Entries) == 1 && a.Entries[0].Seen > 2*time.Second
	})
	e.release()
	end := e.settle(mv.ID)
	tally := stop()
	mustBeClean(t, "acme", tally, true)
	if end.State != api.MoveRolledBack || e.cellOf("acme") != "cell-a" || tally.Failed == 0 || end.Bound < 500*time.Millisecond || end.Bound > 2*time.Second {
		t.Errorf("%s in %s with bound %v: %s; %d requests failed", end.State, e.cellOf("acme"), end.Bound, end.Reason, tally.Failed)
	}
	list := e.verified(mv.ID, "the edge has said its last", func(list []receipt.Statement) bool {
		a, err := e.cl.Budget(t.Context(), "acme")
		last := list[len(list)-1]
		return err == nil && !a.Entries[0].Reserved && (last.Removal != nil || last.Clients != nil && last.Clients.Seen.Span == a.Entries[0].Seen)
	})
	o := list[0].Outcome
	if o.Verdict != receipt.RolledBack || o.Pause < o.Bound || !strings.Contains(o.Reason, "deadline") || o.Clients == nil || o.Clients.Refused == 0 {
		t.Errorf("outcome %+v, clients %+v", o, o.Clients)
	}
	a, err := e.cl.Budget(t.Context(), "acme")
	if err != nil || a.Left != cells.DefaultBudget-a.Entries[0].Seen || a.Entries[0].Driver < end.Bound || a.Entries[0].Pause != a.Entries[0].Seen {
		t.Errorf("account %+v, %v", a, err)
	}
	b, err := json.Marshal(a)
	if err != nil || !bytes.Contains(b, []byte(`"reported":true`)) {
		t.Errorf("%s %v", b, err)
	}
}
