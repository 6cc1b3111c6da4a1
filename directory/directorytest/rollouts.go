// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member/vitals"
)

// rollout records one of n units in two waves, the first of which has one, over cells.
func (e *env) rollout(id api.RolloutID, op string, n int, over ...cells.CellID) (api.Rollout, bool, error) {
	e.Helper()
	var units []api.RolloutUnit
	for i := range n {
		u := api.RolloutUnit{Pos: int64(i + 1), Unit: fmt.Sprintf("u%03d", i), Wave: 2, Home: "a", State: api.UnitPending}
		if i == 0 {
			u.Wave = 1
		}
		units = append(units, u)
	}
	return e.s.CreateRollout(e.ctx, api.Rollout{ID: id, State: api.RolloutChanging, Wave: 1, Waves: make([]api.RolloutWave, 2), Old: over, OperationID: op, CreatedAt: epoch}, units, audit("rollout.start", ""))
}

// unitCounts compares the record's counts with the units.
func (e *env) unitCounts(id api.RolloutID) api.UnitCounts {
	e.Helper()
	r, err := e.s.Rollout(e.ctx, id)
	e.must(err)
	waves := make([]api.UnitCounts, len(r.Waves))
	f := rollout.UnitFilter{Rollout: id, Limit: 7}
	for {
		list, err := e.s.RolloutUnits(e.ctx, f)
		e.must(err)
		for _, u := range list {
			waves[u.Wave-1].Total++
			*waves[u.Wave-1].Of(u.State)++
			if u.Pos <= f.After {
				e.Errorf("unit %d after %d", u.Pos, f.After)
			}
			f.After = u.Pos
		}
		if len(list) < f.Limit {
			break
		}
	}
	for i := range waves {
		if waves[i] != r.Waves[i].Counts {
			e.Errorf("wave %d counts %+v, its units are %+v", i+1, r.Waves[i].Counts, waves[i])
		}
	}
	return r.Counts()
}

func rolloutLifecycle(t TB, h Harness) {
	e := start(t, h)
	r, created, err := e.rollout("r1", "o1", 250, "a", "b")
	e.must(err)
	if !created || r.Version != 1 || r.Seq == 0 || r.Driver != "" || r.Counts().Pending != 250 || r.Waves[0].Counts.Total != 1 {
		e.Errorf("created %v: %+v", created, r)
	}
	e.unitCounts("r1")
	again, created, err := e.rollout("r9", "o1", 1, "z")
	e.must(err)
	if created || again.ID != "r1" {
		e.Errorf("a repeated operation: %s, created %v", again.ID, created)
	}
	if _, err := e.s.Rollout(e.ctx, "r9"); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("a rollout that was not made: %v", err)
	}
	r, err = e.s.UpdateRollout(e.ctx, "r1", func(r *api.Rollout) error {
		r.ID, r.Old, r.Driver, r.Reason = "x", nil, "me", "why"
		r.Waves[0].Counts.Total = 77
		return nil
	}, nil)
	e.must(err)
	if r.ID != "r1" || len(r.Old) != 2 || r.Driver != "" || r.Reason != "why" || r.Version != 2 {
		e.Errorf("changed %+v", r)
	}
	e.unitCounts("r1")
	boom := errors.New("boom")
	if _, err := e.s.UpdateRollout(e.ctx, "r1", func(r *api.Rollout) error { r.Reason = "no"; return boom }, nil); !errors.Is(err, boom) {
		e.Errorf("a refused change: %v", err)
	}
	if r, err := e.s.Rollout(e.ctx, "r1"); err != nil || r.Reason != "why" || r.Version != 2 {
		e.Errorf("after a refused change: %+v, %v", r, err)
	}
}

func rolloutUnits(t TB, h Harness) {
	e := start(t, h)
	_, _, err := e.rollout("r1", "", 20, "a")
	e.must(err)
	pending := []api.UnitState{api.UnitPending}
	n, err := e.s.MoveUnits(e.ctx, "r1", epoch, 2, 2, pending, api.UnitChanging, "go")
	e.must(err)
	if n != 19 {
		e.Errorf("%d units were moved", n)
	}
	if n, err := e.s.MoveUnits(e.ctx, "r1", epoch, 1, 2, []api.UnitState{api.UnitChanging}, api.UnitLeft, ""); err != nil || n != 0 {
		e.Errorf("%d units became what they may not, %v", n, err)
	}
	n, err = e.s.ChangeUnits(e.ctx, "r1", epoch, []rollout.UnitChange{{Unit: "u001", To: api.UnitChanged}, {Unit: "u002", To: api.UnitReturned}, {Unit: "u003", To: api.UnitChanging, Reason: "still"},
		{Unit: "nobody", To: api.UnitChanged}, {Unit: "u000", To: api.UnitChanging}})
	e.must(err)
	if n != 3 {
		e.Errorf("%d units were changed", n)
	}
	if c := e.unitCounts("r1"); c.Changed != 1 || c.Changing != 19 || c.Total != 20 {
		e.Errorf("counts %+v", c)
	}
	list, err := e.s.RolloutUnits(e.ctx, rollout.UnitFilter{Rollout: "r1", Wave: 2, States: []api.UnitState{api.UnitChanged, api.UnitPending}})
	e.must(err)
	if len(list) != 1 || list[0].Unit != "u001" || !list[0].At.Equal(epoch) || list[0].Home != "a" {
		e.Errorf("units %+v", list)
	}
	n, err = e.s.AddUnits(e.ctx, "r1", epoch, 2, []api.RolloutUnit{{Unit: "u001", Home: "a"}, {Unit: "new", Home: "b"}, {Unit: "new", Home: "b"}})
	e.must(err)
	if n != 1 {
		e.Errorf("%d units were added", n)
	}
	list, err = e.s.RolloutUnits(e.ctx, rollout.UnitFilter{Rollout: "r1", After: 20})
	e.must(err)
	if len(list) != 1 || list[0].Pos != 21 || list[0].Unit != "new" || list[0].State != api.UnitPending || list[0].Wave != 2 {
		e.Errorf("added %+v", list)
	}
	if c := e.unitCounts("r1"); c.Total != 21 {
		e.Errorf("counts %+v", c)
	}
}

// A cell has one rollout at most, until that is over.
func rolloutHoldsCells(t TB, h Harness) {
	e := start(t, h)
	_, _, err := e.rollout("r1", "", 1, "a", "b")
	e.must(err)
	if _, _, err := e.rollout("r2", "", 1, "b", "c"); !errors.Is(err, directory.ErrRolloutActive) {
		e.Errorf("a second rollout of cell b: %v", err)
	}
	if err := e.s.RolloutHeld(e.ctx, &api.Rollout{ID: "r2", Old: []cells.CellID{"c"}, New: []cells.CellID{"b"}}); !errors.Is(err, directory.ErrRolloutActive) {
		e.Errorf("a second rollout of cell b, only asked about: %v", err)
	}
	e.must(e.s.RolloutHeld(e.ctx, &api.Rollout{ID: "r2", Old: []cells.CellID{"c"}}))
	if _, err := e.s.Rollout(e.ctx, "r2"); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("a refused rollout is recorded: %v", err)
	}
	_, _, err = e.rollout("r3", "", 1, "c")
	e.must(err)
	_, err = e.s.UpdateRollout(e.ctx, "r1", func(r *api.Rollout) error { r.State = api.RolloutHalted; return nil }, nil)
	e.must(err)
	e.must(e.s.RolloutHeld(e.ctx, &api.Rollout{ID: "r4", Old: []cells.CellID{"b"}}))
	_, created, err := e.rollout("r4", "", 1, "b")
	e.must(err)
	list, err := e.s.Rollouts(e.ctx, directory.RolloutFilter{State: api.RolloutChanging})
	e.must(err)
	if !created || len(list) != 2 || list[0].ID != "r4" || list[1].ID != "r3" {
		e.Errorf("created %v, running %+v", created, list)
	}
}

func rolloutTakeover(t TB, h Harness) {
	e := start(t, h)
	_, _, err := e.rollout("r1", "", 1, "a")
	e.must(err)
	beats, err := e.s.RolloutBeats(e.ctx)
	e.must(err)
	if len(beats) != 1 || beats[0].ID != "r1" || beats[0].Driver != "" {
		e.Fatalf("beats %+v", beats)
	}
	ok, err := e.s.TakeRollout(e.ctx, beats[0], "d1/1")
	e.must(err)
	late, err := e.open().TakeRollout(e.ctx, beats[0], "d2/1")
	e.must(err)
	if !ok || late {
		e.Errorf("taken by the first %v, by the second %v", ok, late)
	}
	now, err := e.s.RolloutBeats(e.ctx)
	e.must(err)
	e.must(e.s.BeatRollouts(e.ctx, "d1/1"))
	if ok, err := e.s.TakeRollout(e.ctx, now[0], "d2/1"); err != nil || ok {
		e.Errorf("taken from a driver that lives: %v, %v", ok, err)
	}
	_, err = e.s.UpdateRollout(e.ctx, "r1", func(r *api.Rollout) error { r.State, r.Driver = api.RolloutDone, ""; return nil }, nil)
	e.must(err)
	if beats, err := e.s.RolloutBeats(e.ctx); err != nil || len(beats) != 0 {
		e.Errorf("one that is over is to be driven: %+v, %v", beats, err)
	}
}

func vitalsOnlyGrow(t TB, h Harness) {
	e := start(t, h)
	row := func(source string, n int64) directory.VitalsRow {
		c := vitals.Counts{Requests: n}
		c.Latency[2] = n
		return directory.VitalsRow{Measured: api.MeasuredByEdge, Source: source, Row: vitals.Row{Cell: "a", Version: "v1", Counts: c}}
	}
	total := func(want int64) {
		e.Helper()
		list, err := e.s.Vitals(e.ctx)
		e.must(err)
		if len(list) != 1 || list[0].Requests != want || list[0].Latency[2] != want || list[0].Cell != "a" || list[0].Version != "v1" {
			e.Errorf("totals %+v, want %d requests", list, want)
		}
	}
	e.must(e.s.SaveVitals(e.ctx, []directory.VitalsRow{row("x", 10), row("y", 5)}, epoch))
	total(15)
	e.must(e.s.SaveVitals(e.ctx, []directory.VitalsRow{row("x", 8), row("y", 5)}, epoch)) // late, and again
	total(15)
	e.must(e.open().SaveVitals(e.ctx, []directory.VitalsRow{row("x", 12)}, epoch.Add(time.Hour)))
	total(17)
	for range 2 {
		e.must(e.s.FoldVitals(e.ctx, epoch.Add(time.Minute)))
		total(17)
	}
	e.must(e.s.FoldVitals(e.ctx, epoch.Add(2*time.Hour)))
	total(17)
	e.must(e.s.SaveVitals(e.ctx, []directory.VitalsRow{row("z", 1)}, epoch.Add(3*time.Hour)))
	total(18)
}
