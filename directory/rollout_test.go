// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/directory/sqlite"
	"github.com/cloister-dev/cloister/member/vitals"
)

// background runs f about fifty times a second until the test ends, on a store of its
// own on the directory's file.
func (s *state) background(t *testing.T, f func(ctx context.Context, store *sqlite.Store) error) {
	t.Helper()
	store, err := sqlite.Open(ctxOf(t), filepath.Join(s.dir, "directory.db"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if err := f(ctx, store); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
}

// traffic has the edge and the processes of cells count requests; of those of the
// cell bad, the share that is returned fails.
func (s *state) traffic(t *testing.T, bad cells.CellID, all ...cells.CellID) *atomic.Int64 {
	t.Helper()
	var n, failed int64
	percent := new(atomic.Int64)
	s.background(t, func(ctx context.Context, store *sqlite.Store) error {
		n++
		var rows []directory.VitalsRow
		failed += percent.Load()
		for _, cell := range all {
			c := vitals.Counts{Requests: 100 * n}
			if cell == bad {
				c.Failed = failed
			}
			c.Latency[3] = c.Requests - c.Failed
			for _, by := range []string{api.MeasuredByEdge, api.MeasuredByCell} {
				rows = append(rows, directory.VitalsRow{Measured: by, Source: "x", Row: vitals.Row{Cell: cell, Counts: c}})
			}
		}
		return store.SaveVitals(ctx, rows, time.Now())
	})
	return percent
}

func (d *dir) rollout(s api.RolloutSettings) api.RolloutID {
	d.t.Helper()
	out, err := d.cl.StartRollout(ctxOf(d.t), api.RolloutRequest{Settings: s, Actor: "alice"})
	if err != nil {
		d.t.Fatalf("rollout: %v", err)
	}
	return out.Rollout.ID
}

func (d *dir) untilRollout(id api.RolloutID, what string, ok func(*api.Rollout) bool) api.Rollout {
	d.t.Helper()
	var r api.Rollout
	eventually(d.t, what, func() bool {
		var err error
		r, err = d.cl.Rollout(ctxOf(d.t), id)
		return err == nil && ok(&r)
	})
	return r
}

func over(r *api.Rollout) bool { return r.State.Final() }

// A rollout whose directory is killed after each of its steps halts, and its wave is
// returned; so does a good one get to its end.
func TestRolloutSurvivesKills(t *testing.T) {
	for _, c := range []struct {
		name  string
		fails int64
		bake  time.Duration
		end   api.RolloutState
		steps []string
	}{
		{"bad", 30, time.Hour, api.RolloutHalted, []string{"taken", "units", "open", "created", "run", "closed", "settled", "judged", "returned"}},
		{"good", 0, 100 * time.Millisecond, api.RolloutDone, []string{"taken", "units", "open", "created", "run", "closed", "settled", "judged"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := newState(t)
			var mu sync.Mutex // guards killed
			killed := map[string]bool{}
			var reached chan string
			hook := func(ctx context.Context, step string, _ api.RolloutID) error {
				mu.Lock()
				before := killed[step]
				killed[step] = true
				mu.Unlock()
				if before {
					return nil
				}
				reached <- step
				<-ctx.Done()
				return ctx.Err()
			}
			boot := func() *dir {
				reached = make(chan string, 1)
				return st.start(t, func(cfg *directory.Config) { cfg.RolloutHook = hook })
			}
			d := boot()
			d.cell("a", api.CellSpec{Version: "v1"})
			d.cell("b", api.CellSpec{Version: "v2"})
			d.crowd("a", 0, 4)
			percent := st.traffic(t, "b", "a", "b")
			id := d.rollout(api.RolloutSettings{Version: "v2", By: api.ByMove, Waves: []float64{50, 100}, Canary: []string{"t03"}, Bake: c.bake, Patience: time.Minute})
			for {
				r, err := d.cl.Rollout(ctxOf(t), id)
				if err != nil {
					t.Fatal(err)
				}
				if over(&r) {
					break
				}
				if r.State == api.RolloutBaking {
					percent.Store(c.fails)
				}
				select {
				case step := <-reached:
					t.Logf("killed after %s", step)
					d.close()
					d = boot()
				case <-time.After(50 * time.Millisecond):
				}
			}
			r := d.untilRollout(id, "the rollout ends", over)
			if r.State != c.end {
				t.Fatalf("%s: %s", r.State, r.Reason)
			}
			// The last step may be reached a moment after the rollout is seen to be over.
			for _, step := range c.steps {
				eventually(t, "it is killed after "+step, func() bool {
					mu.Lock()
					defer mu.Unlock()
					return killed[step]
				})
			}
			home := cells.CellID("b")
			if c.end == api.RolloutHalted {
				home = "a"
				if r.Waves[0].Counts.Returned != 2 || r.Waves[1].Counts.Pending != 2 || r.Verdict == nil || r.Verdict.Health != api.Unhealthy {
					t.Errorf("halted as %+v, verdict %+v", r.Waves, r.Verdict)
				}
			}
			for _, tenant := range []cells.TenantID{"t00", "t01", "t02", "t03"} {
				if at := d.route(tenant); at.CellID != home || at.State != cells.StateActive {
					t.Errorf("%s is %s in %s", tenant, at.State, at.CellID)
				}
			}
			if _, err := d.store.TakeRollout(ctxOf(t), directory.RolloutBeat{ID: id}, "somebody"); err != nil {
				t.Error(err)
			}
		})
	}
}

// provisioner does at once what the specs want.
func (s *state) provisioner(t *testing.T) {
	s.background(t, func(ctx context.Context, store *sqlite.Store) error {
		list, _, err := store.Provisioned(ctx)
		if err != nil {
			return err
		}
		for i := range list {
			if list[i].Status.Reached(&list[i].Spec) {
				continue
			}
			_, err := store.UpdateProvisioned(ctx, list[i].Spec.Cell, func(ch *directory.ProvisionChange) error {
				spec := &ch.Record.Spec
				ch.Record.Status = provision.Status{Cell: spec.Cell, ObservedGeneration: spec.Generation, Version: spec.Version, Replicas: spec.Replicas, Ready: spec.Replicas,
					Updated: spec.Replicas, Phase: provision.PhaseRunning, At: time.Now()}
				if ch.Cell != nil {
					ch.Cell.State = api.CellServing
				}
				return nil
			}, nil)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// By upgrade whole cells get the new version, and the old one back when it is worse;
// what a rollout holds no other one gets; orders are taken at any time.
func TestRolloutByUpgrade(t *testing.T) {
	st := newState(t)
	d := st.start(t, nil)
	ctx := ctxOf(t)
	for _, v := range []string{"v1", "v2", "v3"} {
		if _, err := d.store.PutVersion(ctx, provision.Version{Name: v, Command: []string{"run", v}}, false, api.AuditEntry{At: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	st.provisioner(t)
	ids := []cells.CellID{"a", "b", "c"}
	for _, id := range ids {
		if _, err := d.cl.ProvisionCell(ctx, id, api.ProvisionRequest{Version: "v1", Replicas: 1, Actor: "alice"}); err != nil {
			t.Fatal(err)
		}
	}
	versions := func() (out []string) {
		list, _, err := d.store.Provisioned(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for i := range list {
			out = append(out, list[i].Status.Version)
		}
		return out
	}
	eventually(t, "the cells run", func() bool { return slices.Equal(versions(), []string{"v1", "v1", "v1"}) })
	st.traffic(t, "", ids...)
	set := api.RolloutSettings{Version: "v2", By: api.ByUpgrade, Waves: []float64{1, 100}, Bake: 100 * time.Millisecond, Patience: time.Minute}
	start := api.RolloutRequest{OperationID: "op-upgrade", Settings: set, Actor: "alice"}
	plan, err := d.cl.StartRollout(ctx, start)
	if err != nil {
		t.Fatal(err)
	}
	id := plan.Rollout.ID
	set.Version = "v3"
	set.From = "v1"
	for _, dry := range []bool{false, true} {
		_, err = d.cl.StartRollout(ctx, api.RolloutRequest{Settings: set, DryRun: dry})
		if a := wantCode(t, err, cells.CodeConflict); !strings.Contains(a.Detail, string(id)) {
			t.Errorf("dry %v: the answer does not name the other rollout: %s", dry, a.Detail)
		}
	}
	if r := d.untilRollout(id, "v2 is everywhere", over); r.State != api.RolloutDone || !slices.Equal(versions(), []string{"v2", "v2", "v2"}) {
		t.Fatalf("%s %s, versions %v", r.State, r.Reason, versions())
	}
	// Its start said again finds what it has started, although nothing is left to do.
	if r, err := d.cl.StartRollout(ctx, start); err != nil || r.Rollout.ID != id || r.Rollout.State != api.RolloutDone {
		t.Errorf("started again: %+v, %v", r, err)
	}
	start.Settings.Version = "v1"
	for _, start.DryRun = range []bool{false, true} {
		_, err = d.cl.StartRollout(ctx, start)
		wantCode(t, err, cells.CodeConflict)
	}
	// The next one is aborted while it bakes.
	set.From, set.Bake, set.Canary = "v2", time.Hour, []string{"b"}
	id = d.rollout(set)
	d.untilRollout(id, "the canary bakes", func(r *api.Rollout) bool { return r.State == api.RolloutBaking })
	if got := versions(); !slices.Equal(got, []string{"v2", "v3", "v2"}) {
		t.Errorf("versions %v", got)
	}
	if r, err := d.cl.PauseRollout(ctx, id, api.RolloutOrder{Actor: "bob"}); err != nil || !r.Paused {
		t.Errorf("paused: %+v, %v", r, err)
	}
	if _, err := d.cl.AbortRollout(ctx, id, api.RolloutOrder{Actor: "bob", Reason: "not today"}); err != nil {
		t.Fatal(err)
	}
	r := d.untilRollout(id, "the canary is returned", over)
	if r.State != api.RolloutAborted || r.Reason != "not today" || !slices.Equal(versions(), []string{"v2", "v2", "v2"}) || r.Waves[0].Counts.Returned != 1 {
		t.Errorf("%s %q, versions %v, %+v", r.State, r.Reason, versions(), r.Waves)
	}
	_, err = d.cl.ResumeRollout(ctx, id, api.RolloutOrder{})
	wantCode(t, err, cells.CodeConflict)
	list, err := d.cl.Rollouts(ctx, client.RolloutQuery{State: api.RolloutAborted})
	if err != nil || len(list.Rollouts) != 1 || list.Rollouts[0].ID != id {
		t.Errorf("list %+v, %v", list, err)
	}
}

// Without data nothing counts as healthy: it pauses, and says what is missing.
func TestRolloutWithoutData(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{Version: "v1"})
	d.cell("b", api.CellSpec{Version: "v2"})
	d.crowd("a", 0, 2)
	id := d.rollout(api.RolloutSettings{Version: "v2", By: api.ByMove, Waves: []float64{50, 100}, Bake: 50 * time.Millisecond, Patience: 50 * time.Millisecond})
	r := d.untilRollout(id, "it pauses", func(r *api.Rollout) bool { return r.Paused })
	if r.State != api.RolloutBaking || r.Wave != 1 || r.Verdict == nil || r.Verdict.Health != api.HealthUnknown {
		t.Errorf("%s in wave %d: %+v", r.State, r.Wave, r.Verdict)
	}
	if _, err := d.cl.AbortRollout(ctxOf(t), id, api.RolloutOrder{Keep: true}); err != nil {
		t.Fatal(err)
	}
	if r := d.untilRollout(id, "it ends", over); r.State != api.RolloutAborted || !r.Kept || r.Counts().Changed != 1 {
		t.Errorf("%s, kept %v: %+v", r.State, r.Kept, r.Waves)
	}
}

// What edges and cells report over the channel arrives in the totals, once.
func TestVitalsArrive(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{Version: "v1"})
	c := vitals.Counts{Requests: 10, Failed: 2, Latency: vitals.Histogram{8}}
	edge, cell := d.peer(channel.RoleEdge, "e1"), d.peer(channel.RoleCell, "a")
	for range 3 { // the same again changes nothing
		if a := d.post(edge, api.PathVitals, api.VitalsReport{Instance: "i", Seq: 1, Rows: []vitals.Row{{Cell: "a", Version: "v1", Counts: c}, {Cell: "ghost", Counts: c}}}); a.status != 200 {
			t.Fatalf("%+v", a)
		}
		hb := heartbeat("a", "i1", true)
		hb.Version, hb.Vitals = "v1", &c
		if a := d.post(cell, "/cells/v1/members/heartbeat", hb); a.status != 200 {
			t.Fatalf("%+v", a)
		}
	}
	if a := d.post(cell, api.PathVitals, api.VitalsReport{Instance: "i", Seq: 1}); a.status != 403 {
		t.Errorf("a cell reports as an edge: %d", a.status)
	}
	if a := d.post(edge, api.PathVitals, api.VitalsReport{Instance: "i", Seq: 1, Rows: []vitals.Row{{Cell: "a", Counts: vitals.Counts{Requests: 1, Failed: 2}}}}); a.status != 400 {
		t.Errorf("counts that cannot be are taken: %d", a.status)
	}
	eventually(t, "both have arrived", func() bool {
		list, err := d.store.Vitals(ctxOf(t))
		if err != nil {
			t.Fatal(err)
		}
		return len(list) == 2 && list[0].Counts == c && list[1].Counts == c && list[0].Cell == "a" && list[0].Version == "v1"
	})
}

var _ rollout.Store = directory.Store(nil)
