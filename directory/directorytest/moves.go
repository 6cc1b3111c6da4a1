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
)

func move(id, tenant, from, to, op string) api.Move {
	return api.Move{ID: cells.MoveID(id), Tenant: cells.TenantID(tenant), From: cells.CellID(from), To: cells.CellID(to),
		State: api.MovePreparing, Step: "queued", Actor: "alice", OperationID: op, Driver: "d1/1", CreatedAt: epoch, UpdatedAt: epoch}
}

func (e *env) createMove(m api.Move) (api.Move, bool, error) {
	return e.s.CreateMove(e.ctx, m, audit("move.create", m.Tenant))
}

func (e *env) mustCreate(m api.Move) api.Move {
	e.Helper()
	rec, created, err := e.createMove(m)
	e.must(err)
	if !created {
		e.Fatalf("move %s was not created", m.ID)
	}
	return rec
}

func (e *env) update(id cells.MoveID, fn func(*api.Move)) api.Move {
	e.Helper()
	m, err := e.s.UpdateMove(e.ctx, id, func(m *api.Move) error { fn(m); return nil }, nil)
	e.must(err)
	return m
}

func moveLifecycle(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{})
	e.settle("t", "a", 1)
	rec := e.mustCreate(move("m1", "t", "a", "b", "o1"))
	if rec.Seq == 0 || rec.Version != 1 {
		e.Errorf("seq %d version %d", rec.Seq, rec.Version)
	}
	again, created, err := e.createMove(move("m2", "t", "a", "b", "o1"))
	e.must(err)
	if created || again.ID != "m1" {
		e.Errorf("the operation again made %s, created %v", again.ID, created)
	}
	if _, err := e.s.Move(e.ctx, "m2"); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("unknown move: %v, want ErrNotFound", err)
	}
	if _, err := e.s.UpdateMove(e.ctx, "m2", func(*api.Move) error { return nil }, nil); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("update of an unknown move: %v, want ErrNotFound", err)
	}
	want := e.update("m1", func(m *api.Move) {
		m.State, m.Step, m.Predicted, m.Pause = api.MoveCutting, "quiesce", time.Second, 5*time.Millisecond
		m.Steps = append(m.Steps, api.StepTiming{Step: "quiesce", At: epoch, Took: 3, State: "QUIESCING", Epoch: 4})
		m.Progress = &cells.Progress{Phase: "snapshot", Done: 1, Total: 2}
		m.Rows, m.Bytes, m.Residue = 10, 20, []cells.Residue{{Cell: "a", Epoch: 2, Move: "m1"}}
		m.To, m.Tenant, m.Driver = "z", "z", "z" // not the updater's to change
	})
	if want.To != "b" || want.Tenant != "t" || want.Driver != "d1/1" || want.Version != 2 {
		e.Errorf("an update changed what it must not: %+v", want)
	}
	got, err := e.s.Move(e.ctx, "m1")
	e.must(err)
	if !reflect.DeepEqual(got, want) {
		e.Errorf("stored %+v\nwant   %+v", got, want)
	}
	boom := errors.New("boom")
	if _, err := e.s.UpdateMove(e.ctx, "m1", func(m *api.Move) error { m.Step = "x"; return boom }, nil); !errors.Is(err, boom) {
		e.Errorf("the updater's error came back as %v", err)
	}
	if got, err := e.s.Move(e.ctx, "m1"); err != nil || got.Step != "quiesce" {
		e.Errorf("a refused update changed the record: %+v %v", got, err)
	}
	// A final record with residue is unfinished still.
	e.update("m1", func(m *api.Move) { m.State = api.MoveRolledBack })
	list, err := e.s.Moves(e.ctx, directory.MoveFilter{Unfinished: true})
	e.must(err)
	if len(list) != 1 {
		e.Errorf("%d unfinished moves, want the one with residue", len(list))
	}
	e.update("m1", func(m *api.Move) { m.Residue = nil })
	list, err = e.s.Moves(e.ctx, directory.MoveFilter{Unfinished: true})
	e.must(err)
	if len(list) != 0 {
		e.Errorf("%d unfinished moves, want none", len(list))
	}
}

func moveRefusals(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{})
	e.cell("closed", api.CellSpec{Closed: true})
	e.cell("full", api.CellSpec{PlacementsMax: limit(0)})
	e.settle("t", "a", 1)
	if _, _, err := e.createMove(move("m0", "t", "a", "absent", "")); !errors.Is(err, directory.ErrNoCell) {
		e.Errorf("unknown cell: %v, want ErrNoCell", err)
	}
	for _, c := range []string{"closed", "full"} {
		if _, _, err := e.createMove(move("m0", "t", "a", c, "")); !errors.Is(err, directory.ErrCellClosed) {
			e.Errorf("%s cell: %v, want ErrCellClosed", c, err)
		}
	}
	if n := e.auditCount("t"); n != 0 {
		e.Errorf("refusals left %d audit entries", n)
	}
	e.mustCreate(move("m1", "t", "a", "b", "o1"))
	other, _, err := e.createMove(move("m2", "t", "a", "b", "o2"))
	if !errors.Is(err, directory.ErrMoveActive) || other.ID != "m1" {
		e.Errorf("second move: %v with record %s, want ErrMoveActive with m1", err, other.ID)
	}
	if _, _, err := e.createMove(move("m2", "t", "a", "closed", "o1")); !errors.Is(err, directory.ErrOperationReused) {
		e.Errorf("operation with another target: %v, want ErrOperationReused", err)
	}
	if _, _, err := e.createMove(move("m1", "u", "a", "b", "")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("move id used twice: %v, want ErrConflict", err)
	}
	for _, s := range []api.MoveState{api.MoveCutting, api.MoveCommitted} {
		e.update("m1", func(m *api.Move) { m.State = s })
		if _, _, err := e.createMove(move("m3", "t", "a", "b", "")); !errors.Is(err, directory.ErrMoveActive) {
			e.Errorf("second move while the first is %s: %v", s, err)
		}
	}
	e.update("m1", func(m *api.Move) { m.State = api.MoveCleaning })
	e.mustCreate(move("m4", "t", "b", "a", ""))
}

func moveCountsAtTarget(t TB, h Harness) {
	e := start(t, h)
	e.cell("a", api.CellSpec{})
	e.cell("b", api.CellSpec{PlacementsMax: limit(1)})
	e.settle("t", "a", 1)
	e.settle("u", "a", 2)
	e.mustCreate(move("m1", "t", "a", "b", ""))
	e.wantTenants("a", 2)
	e.wantTenants("b", 1)
	if _, _, err := e.createMove(move("m2", "u", "a", "b", "")); !errors.Is(err, directory.ErrCellClosed) {
		e.Errorf("move into a cell that an earlier move fills: %v, want ErrCellClosed", err)
	}
	if _, _, err := e.reserve(reservation("v", "b", "o1", 0)); !errors.Is(err, directory.ErrCellClosed) {
		e.Errorf("claim of a cell that a move fills: %v, want ErrCellClosed", err)
	}
	e.settle("t", "b", 7)
	e.wantTenants("a", 1)
	e.wantTenants("b", 1) // not counted twice
	e.update("m1", func(m *api.Move) { m.State = api.MoveDone })
	e.wantTenants("b", 1)

	e.cell("b", api.CellSpec{PlacementsMax: limit(2)})
	e.mustCreate(move("m3", "u", "a", "b", ""))
	e.update("m3", func(m *api.Move) { m.State = api.MoveRolledBack })
	e.wantTenants("b", 1)
}

func moveUpdatesAreNotLost(t TB, h Harness) {
	e := start(t, h)
	e.cell("b", api.CellSpec{})
	e.mustCreate(move("m1", "t", "a", "b", ""))
	stores := []directory.Store{e.s, e.open()}
	var wg sync.WaitGroup
	const writers, rounds = 6, 5
	for i := range writers {
		wg.Go(func() {
			for range rounds {
				if _, err := stores[i%2].UpdateMove(e.ctx, "m1", func(m *api.Move) error { m.Attempts++; return nil }, nil); err != nil {
					e.Errorf("update: %v", err)
				}
			}
		})
	}
	wg.Wait()
	m, err := e.s.Move(e.ctx, "m1")
	e.must(err)
	if m.Attempts != writers*rounds || m.Version != 1+writers*rounds {
		e.Errorf("%d attempts at version %d, want %d at %d", m.Attempts, m.Version, writers*rounds, 1+writers*rounds)
	}
}

func moveTakeover(t TB, h Harness) {
	e := start(t, h)
	e.cell("b", api.CellSpec{})
	e.mustCreate(move("m1", "t", "a", "b", ""))
	e.mustCreate(move("m2", "u", "a", "b", ""))
	e.update("m2", func(m *api.Move) { m.State = api.MoveRefused })
	beats := func() directory.MoveBeat {
		e.Helper()
		list, err := e.s.MoveBeats(e.ctx)
		e.must(err)
		if len(list) != 1 || list[0].ID != "m1" {
			e.Fatalf("beats %+v, want m1 only", list)
		}
		return list[0]
	}
	b0 := beats()
	e.must(e.s.Beat(e.ctx, "d2/1"))
	if b := beats(); b != b0 {
		e.Errorf("another driver's beat changed %+v to %+v", b0, b)
	}
	e.must(e.s.Beat(e.ctx, "d1/1"))
	b1 := beats()
	if b1.Beat <= b0.Beat {
		e.Errorf("beat went from %d to %d", b0.Beat, b1.Beat)
	}
	if ok, err := e.s.TakeMove(e.ctx, b0, "d2/1"); err != nil || ok {
		e.Errorf("took a move whose driver has beaten since: %v %v", ok, err)
	}
	stores := []directory.Store{e.s, e.open()}
	var wg sync.WaitGroup
	var mu sync.Mutex
	won := ""
	for i := range 4 {
		wg.Go(func() {
			driver := fmt.Sprintf("d%d/9", i+2)
			ok, err := stores[i%2].TakeMove(e.ctx, b1, driver)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				e.Errorf("take: %v", err)
			} else if ok && won != "" {
				e.Errorf("both %s and %s took the move", won, driver)
			} else if ok {
				won = driver
			}
		})
	}
	wg.Wait()
	m, err := e.s.Move(e.ctx, "m1")
	e.must(err)
	if m.Driver != won || won == "" {
		e.Errorf("driver %q, want %q", m.Driver, won)
	}
	if got := e.update("m1", func(m *api.Move) { m.Step = "x" }); got.Driver != won {
		e.Errorf("an update changed the driver to %q", got.Driver)
	}
}

func movePages(t TB, h Harness) {
	e := start(t, h)
	e.cell("b", api.CellSpec{})
	for i := range 7 {
		id, tenant := fmt.Sprintf("m%d", i), fmt.Sprintf("t%d", i%2)
		e.mustCreate(move(id, tenant, "a", "b", ""))
		e.update(cells.MoveID(id), func(m *api.Move) { m.State = api.MoveRefused })
	}
	var got []cells.MoveID
	f := directory.MoveFilter{Tenant: "t0", State: api.MoveRefused, Limit: 3}
	for {
		list, err := e.s.Moves(e.ctx, f)
		e.must(err)
		for _, m := range list {
			got = append(got, m.ID)
		}
		if len(list) < 3 {
			break
		}
		f.After = list[len(list)-1].Seq
	}
	if want := []cells.MoveID{"m6", "m4", "m2", "m0"}; !reflect.DeepEqual(got, want) {
		e.Errorf("pages gave %v, want %v", got, want)
	}
	list, err := e.s.Moves(e.ctx, directory.MoveFilter{State: api.MoveDone})
	e.must(err)
	if len(list) != 0 {
		e.Errorf("%d done moves, want none", len(list))
	}
}
