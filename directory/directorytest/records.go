// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

func membersBeat(t TB, h Harness) {
	e := start(t, h)
	a := member.Heartbeat{Cell: "a", Instance: "i1", Version: "v", PID: 7, ServiceURL: "http://x", AgentURL: "https://y", Ready: true, Revision: 9}
	b := member.Heartbeat{Cell: "b", Instance: "i1"}
	e.must(e.s.SaveMembers(e.ctx, []member.Heartbeat{a, b}, epoch))
	first, err := e.s.Members(e.ctx)
	e.must(err)
	if len(first) != 2 || !reflect.DeepEqual(first[0].Heartbeat, a) || !first[0].SeenAt.Equal(epoch) {
		e.Fatalf("members %+v", first)
	}
	a.Ready, a.Reason = false, "fences"
	e.must(e.s.SaveMembers(e.ctx, []member.Heartbeat{a}, epoch.Add(time.Second)))
	second, err := e.s.Members(e.ctx)
	e.must(err)
	if second[0].Beat <= first[0].Beat || second[1].Beat != first[1].Beat {
		e.Errorf("beats went from %d and %d to %d and %d", first[0].Beat, first[1].Beat, second[0].Beat, second[1].Beat)
	}
	if !reflect.DeepEqual(second[0].Heartbeat, a) {
		e.Errorf("heartbeat %+v, want %+v", second[0].Heartbeat, a)
	}
	e.must(e.s.RemoveMember(e.ctx, "a", "i1"))
	e.must(e.s.RemoveMember(e.ctx, "a", "i1"))
	last, err := e.s.Members(e.ctx)
	e.must(err)
	if len(last) != 1 || last[0].Heartbeat.Cell != "b" {
		e.Errorf("members after a removal: %+v", last)
	}
}

func budgetsAreAtomic(t TB, h Harness) {
	e := start(t, h)
	b := []cells.BudgetStore{e.s.Budgets(), e.open().Budgets()}
	if list, err := b[0].Entries(e.ctx, "t"); err != nil || len(list) != 0 {
		e.Fatalf("a new store has entries %v, %v", list, err)
	}
	entry := cells.BudgetEntry{Tenant: "t", Move: "m", At: epoch, Pause: 1500 * time.Microsecond, Reserved: true,
		Driver: 7, Seen: 8 * time.Second, Reported: true, Forced: true, Actor: "alice"}
	e.must(b[0].Update(e.ctx, "u", func(old []cells.BudgetEntry) ([]cells.BudgetEntry, error) {
		return []cells.BudgetEntry{{Tenant: "u", Move: "other", At: epoch, Pause: time.Second}}, nil
	}))
	var wg sync.WaitGroup
	const writers = 8
	for i := range writers {
		wg.Go(func() {
			err := b[i%2].Update(e.ctx, "t", func(old []cells.BudgetEntry) ([]cells.BudgetEntry, error) {
				n := entry
				n.Move = cells.MoveID(fmt.Sprintf("m%d", len(old)))
				return append(old, n), nil
			})
			if err != nil {
				e.Errorf("update: %v", err)
			}
		})
	}
	wg.Wait()
	list, err := b[1].Entries(e.ctx, "t")
	e.must(err)
	if len(list) != writers {
		e.Errorf("%d entries, want %d: updates were lost", len(list), writers)
	}
	for _, got := range list {
		want := entry
		want.Move = got.Move
		if !reflect.DeepEqual(got, want) {
			e.Errorf("entry %+v, want %+v", got, want)
		}
	}
	boom := errors.New("boom")
	if err := b[0].Update(e.ctx, "t", func([]cells.BudgetEntry) ([]cells.BudgetEntry, error) { return nil, boom }); !errors.Is(err, boom) {
		e.Errorf("the change's error came back as %v", err)
	}
	if list, err := b[0].Entries(e.ctx, "t"); err != nil || len(list) != writers {
		e.Errorf("a refused update changed the entries: %d, %v", len(list), err)
	}
	e.must(b[0].Update(e.ctx, "t", func([]cells.BudgetEntry) ([]cells.BudgetEntry, error) { return nil, nil }))
	if list, err := b[0].Entries(e.ctx, "t"); err != nil || len(list) != 0 {
		e.Errorf("%d entries are left, %v", len(list), err)
	}
	if list, err := b[0].Entries(e.ctx, "u"); err != nil || len(list) != 1 {
		e.Errorf("another tenant's entries: %d, %v", len(list), err)
	}
}

func auditFollowsChanges(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{})
	e.mustReserve(reservation("t", "", "o1", 0))
	e.settle("t", "a", 1)
	m := e.mustCreate(move("m1", "t", "a", "b", "o2"))
	if _, _, err := e.createMove(m); err != nil {
		e.Errorf("retry: %v", err)
	}
	entry := audit("move.rollback", "t")
	entry.Move, entry.Detail = "m1", []byte(`{"reason":"x"}`)
	_, err := e.s.UpdateMove(e.ctx, "m1", func(m *api.Move) error { m.Reason = "x"; return nil }, &entry)
	e.must(err)
	if _, err := e.s.UpdateMove(e.ctx, "m1", func(*api.Move) error { return errors.New("no") }, &entry); err == nil {
		e.Errorf("a refused update succeeded")
	}
	e.must(e.s.AppendAudit(e.ctx, audit("tenant.delete", "u")))

	list, err := e.s.Audit(e.ctx, directory.AuditFilter{})
	e.must(err)
	var actions []string
	for i, a := range list {
		actions = append(actions, a.Action)
		if a.Actor != "alice" || a.Peer != "operator" || a.RequestID != "r-"+a.Action || !a.At.Equal(epoch) {
			e.Errorf("entry %+v lost something", a)
		}
		if i > 0 && a.Seq >= list[i-1].Seq {
			e.Errorf("entries are not newest first")
		}
	}
	want := []string{"tenant.delete", "move.rollback", "move.create", "placement.reserve", "cell.put", "cell.put"}
	if !reflect.DeepEqual(actions, want) {
		e.Errorf("audit has %v, want %v", actions, want)
	}
	if list[1].Move != "m1" || string(list[1].Detail) != `{"reason":"x"}` {
		e.Errorf("entry %+v lost its move or detail", list[1])
	}
	if list[3].Cell != "a" {
		e.Errorf("the reservation's entry names cell %q, want the one that was chosen", list[3].Cell)
	}
	page, err := e.s.Audit(e.ctx, directory.AuditFilter{Tenant: "t", After: list[1].Seq, Limit: 1})
	e.must(err)
	if len(page) != 1 || page[0].Action != "move.create" {
		e.Errorf("page %+v, want move.create", page)
	}
}

func survivesReopen(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{PlacementsMax: limit(3)})
	e.mustReserve(reservation("t", "a", "o1", 0))
	e.settle("u", "a", 3)
	e.mustCreate(move("m1", "v", "x", "a", ""))
	e.must(e.s.Close())

	e.s = e.open()
	e.wantTenants("a", 3)
	if _, _, err := e.reserve(reservation("w", "a", "o2", 0)); !errors.Is(err, directory.ErrCellClosed) {
		e.Errorf("the quota was forgotten: %v", err)
	}
	row, joined, err := e.reserve(reservation("t", "a", "o1", 0))
	e.must(err)
	if !joined || row.State != directory.PlacementReserved {
		e.Errorf("the reservation was forgotten: %+v", row)
	}
	m, err := e.s.Move(e.ctx, "m1")
	e.must(err)
	if m.State != api.MovePreparing || m.Step != "queued" {
		e.Errorf("move came back as %s", m.String())
	}
}

func closedStoreIsUnavailable(t TB, h Harness) {
	e := start(t, h)
	s := e.open()
	e.must(s.Ping(e.ctx))
	e.must(s.Close())
	if err := s.Ping(e.ctx); !errors.Is(err, cells.ErrUnavailable) {
		e.Errorf("Ping: %v, want ErrUnavailable", err)
	}
	if _, _, err := s.Cells(e.ctx); !errors.Is(err, cells.ErrUnavailable) {
		e.Errorf("Cells: %v, want ErrUnavailable", err)
	}
	if _, _, err := s.Reserve(e.ctx, reservation("t", "a", "o", 0), audit("x", "t")); !errors.Is(err, cells.ErrUnavailable) {
		e.Errorf("Reserve: %v, want ErrUnavailable", err)
	}
}
