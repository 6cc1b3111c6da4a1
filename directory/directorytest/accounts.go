// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

func budgetLimits(t TB, h Harness) {
	e := start(t, h)
	other := e.open()
	left := func(tenant cells.TenantID) time.Duration {
		e.Helper()
		d, err := cells.NewBudgetMeter(cells.WithBudgetStore(other.Budgets())).Remaining(e.ctx, tenant)
		e.must(err)
		return d
	}
	if d := left("t"); d != cells.DefaultBudget {
		e.Errorf("a new store leaves %v", d)
	}
	put := func(l api.BudgetLimit) {
		e.Helper()
		e.must(e.s.SetLimit(e.ctx, l, audit("budget.put", l.Tenant)))
	}
	put(api.BudgetLimit{Pause: time.Minute, Actor: "alice", At: epoch})
	put(api.BudgetLimit{Tenant: "t", Pause: time.Hour, Actor: "alice", At: epoch})
	own := api.BudgetLimit{Tenant: "t", Pause: time.Second, Actor: "bob", At: epoch.Add(time.Second)}
	put(own)
	put(api.BudgetLimit{Tenant: "none", At: epoch})
	for tenant, want := range map[cells.TenantID]time.Duration{"t": time.Second, "u": time.Minute, "none": 0} {
		if d := left(tenant); d != want {
			e.Errorf("tenant %s has %v left, want %v", tenant, d, want)
		}
	}
	list, err := other.Limits(e.ctx)
	e.must(err)
	if len(list) != 3 || list[0].Tenant != "" || list[1].Tenant != "none" || !reflect.DeepEqual(list[2], own) {
		e.Errorf("limits %+v", list)
	}
	e.must(e.s.RemoveLimit(e.ctx, "t", audit("budget.delete", "t")))
	if err := e.s.RemoveLimit(e.ctx, "t", audit("budget.delete", "t")); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("removed twice: %v, want ErrNotFound", err)
	}
	if d := left("t"); d != time.Minute {
		e.Errorf("without a limit of its own it has %v", d)
	}
	if n := e.auditCount("t"); n != 3 {
		e.Errorf("%d audit entries of 3 changes", n)
	}
}

// budgetIsNotSpentTwice has several directories reserve at once what only one of
// them can have.
func budgetIsNotSpentTwice(t TB, h Harness) {
	e := start(t, h)
	meters := []*cells.BudgetMeter{}
	for range 3 {
		meters = append(meters, cells.NewBudgetMeter(cells.WithBudgetStore(e.open().Budgets()), cells.WithBudget(10*time.Second, time.Hour)))
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := 0
	for i := range 12 {
		wg.Go(func() {
			err := meters[i%3].Reserve(e.ctx, "t", cells.MoveID(fmt.Sprintf("m%d", i)), 4*time.Second)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				got++
			case !errors.Is(err, cells.ErrBudget):
				e.Errorf("reserve: %v", err)
			}
		})
	}
	wg.Wait()
	a, err := meters[0].Account(e.ctx, "t")
	e.must(err)
	if got != 2 || a.Left != 2*time.Second || len(a.Entries) != 2 {
		e.Errorf("%d reservations of 4s were granted out of 10s, %v are left: %+v", got, a.Left, a.Entries)
	}
}

func seenKeepsTheNewest(t TB, h Harness) {
	e := start(t, h)
	other := e.open()
	save := func(s directory.Store, r directory.SeenRow, want bool) {
		e.Helper()
		ok, err := s.SaveSeen(e.ctx, r)
		e.must(err)
		if ok != want {
			e.Errorf("report %+v: saved %v, want %v", r, ok, want)
		}
	}
	zero := directory.SeenRow{Move: "m1", Edge: "e1", Instance: "i1", Seq: 1}
	some := directory.SeenRow{Move: "m1", Edge: "e1", Instance: "i1", Seq: 3, Refused: 5, First: epoch, Last: epoch.Add(time.Second)}
	older := some
	older.Seq, older.Refused = 2, 4
	second := directory.SeenRow{Move: "m1", Edge: "e1", Instance: "i2", Seq: 1, Refused: 1, First: epoch, Last: epoch}
	save(e.s, zero, true)
	save(other, some, true)
	save(e.s, some, false)
	save(e.s, older, false)
	save(other, second, true)
	save(other, directory.SeenRow{Move: "m2", Edge: "e1", Instance: "i1", Seq: 1}, true)
	list, err := e.s.Seen(e.ctx, "m1")
	e.must(err)
	if !reflect.DeepEqual(list, []directory.SeenRow{some, second}) {
		e.Errorf("seen %+v", list)
	}
	if list, err := e.s.Seen(e.ctx, "m3"); err != nil || len(list) != 0 {
		e.Errorf("of an unknown move: %+v, %v", list, err)
	}
}

func receiptsOnlyGrow(t TB, h Harness) {
	e := start(t, h)
	stores := []directory.Store{e.s, e.open()}
	var wg sync.WaitGroup
	const writers = 8
	for i := range writers {
		wg.Go(func() {
			err := stores[i%2].AppendReceipt(e.ctx, "m1", func(old [][]byte) (directory.ReceiptChange, error) {
				return directory.ReceiptChange{Entry: []byte(fmt.Sprintf("%d after %d", len(old), len(bytes.Join(old, nil))))}, nil
			})
			if err != nil {
				e.Errorf("append: %v", err)
			}
		})
	}
	wg.Wait()
	boom := errors.New("boom")
	if err := e.s.AppendReceipt(e.ctx, "m1", func([][]byte) (directory.ReceiptChange, error) { return directory.ReceiptChange{}, boom }); !errors.Is(err, boom) {
		e.Errorf("the builder's error came back as %v", err)
	}
	e.must(e.s.AppendReceipt(e.ctx, "m1", func([][]byte) (directory.ReceiptChange, error) { return directory.ReceiptChange{}, nil }))
	list, err := stores[1].Receipt(e.ctx, "m1")
	e.must(err)
	if len(list) != writers {
		e.Errorf("%d entries, want %d", len(list), writers)
	}
	size := 0
	for i, b := range list {
		if want := fmt.Sprintf("%d after %d", i, size); string(b) != want {
			e.Errorf("entry %d is %q, want %q", i, b, want)
		}
		size += len(b)
	}
	if list, err := e.s.Receipt(e.ctx, "m2"); err != nil || len(list) != 0 {
		e.Errorf("receipt of an unknown move: %q, %v", list, err)
	}
}

// Receipts are found when their end is due, the oldest first, and not before; who ends
// one ends it for all.
func receiptsEnd(t TB, h Harness) {
	e := start(t, h)
	at := func(d time.Duration) *time.Time { x := epoch.Add(d); return &x }
	add := func(m cells.MoveID, entry string, end *time.Time) {
		e.Helper()
		e.must(e.s.AppendReceipt(e.ctx, m, func([][]byte) (directory.ReceiptChange, error) {
			return directory.ReceiptChange{Entry: []byte(entry), EndAt: end}, nil
		}))
	}
	var never time.Time
	add("late", "a", at(time.Hour))
	add("second", "a", at(3*time.Second))
	add("first", "a", at(5*time.Second))
	add("first", "b", at(time.Second))
	add("kept", "a", at(2*time.Second))
	add("kept", "b", nil)
	add("none", "a", at(time.Second))
	add("none", "b", &never)
	end := func(s directory.Store, limit int, change directory.ReceiptChange) (found []cells.MoveID) {
		e.Helper()
		n, err := s.EndReceipts(e.ctx, epoch.Add(time.Minute), limit, func(m cells.MoveID, old [][]byte) (directory.ReceiptChange, error) {
			if len(old) == 0 || string(old[0]) != "a" {
				e.Errorf("%s has entries %q", m, old)
			}
			found = append(found, m)
			return change, nil
		})
		e.must(err)
		if n != len(found) {
			e.Errorf("%d receipts, and %v were asked about", n, found)
		}
		return found
	}
	boom := errors.New("boom")
	if _, err := e.s.EndReceipts(e.ctx, epoch.Add(time.Minute), 9, func(cells.MoveID, [][]byte) (directory.ReceiptChange, error) {
		return directory.ReceiptChange{Entry: []byte("lost"), EndAt: &never}, boom
	}); !errors.Is(err, boom) {
		e.Errorf("the builder's error came back as %v", err)
	}
	if got := end(e.s, 2, directory.ReceiptChange{}); !slices.Equal(got, []cells.MoveID{"first", "kept"}) {
		e.Errorf("due are %v", got)
	}
	if got := end(e.open(), 2, directory.ReceiptChange{Entry: []byte("end"), EndAt: &never}); !slices.Equal(got, []cells.MoveID{"first", "kept"}) {
		e.Errorf("due are %v", got)
	}
	if got := end(e.s, 9, directory.ReceiptChange{EndAt: at(time.Hour)}); !slices.Equal(got, []cells.MoveID{"second"}) {
		e.Errorf("due are %v", got)
	}
	if got := end(e.s, 9, directory.ReceiptChange{}); len(got) != 0 {
		e.Errorf("due are %v", got)
	}
	list, err := e.s.Receipt(e.ctx, "first")
	e.must(err)
	if len(list) != 3 || string(list[2]) != "end" {
		e.Errorf("entries %q", list)
	}
}
