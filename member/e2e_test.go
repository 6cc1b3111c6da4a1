// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// front is an edge in miniature: it looks routes up in its own view, sends each
// request to a ready process of the cell, and repeats what the platform says did
// not run.
type front struct {
	t      *testing.T
	p      *plane
	router *cells.Router
	http   *http.Client

	mu      sync.Mutex
	acked   map[cells.TenantID]map[int]bool
	unknown map[cells.TenantID]map[int]bool // sent, and the answer never came
	failed  []string
	slowest time.Duration
}

func newFront(t *testing.T, p *plane) *front {
	t.Helper()
	f := &front{t: t, p: p, router: cells.NewRouter(p.table, cells.WithRouterLogger(quiet)), http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}},
		acked: map[cells.TenantID]map[int]bool{}, unknown: map[cells.TenantID]map[int]bool{}}
	if err := f.router.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.router.Close()
		f.http.CloseIdleConnections()
	})
	return f
}

// write writes one key, whatever it takes.
func (f *front) write(ctx context.Context, tenant cells.TenantID, k int) {
	begun := time.Now()
	note := func(m map[cells.TenantID]map[int]bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if m[tenant] == nil {
			m[tenant] = map[int]bool{}
		}
		m[tenant][k] = true
		f.slowest = max(f.slowest, time.Since(begun))
	}
	for try := 0; ctx.Err() == nil; try++ {
		d := f.router.Lookup(tenant)
		if d.Refusal() != nil {
			if _, err := f.router.Wait(ctx, tenant, d.Route.Revision); err != nil {
				return
			}
			continue
		}
		hbs, _ := f.p.locate(ctx, d.Cell)
		var urls []string
		for _, h := range hbs {
			if h.Ready {
				urls = append(urls, h.ServiceURL)
			}
		}
		if len(urls) == 0 {
			_, _ = f.router.Refresh(ctx, tenant)
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, urls[(k+try)%len(urls)]+"/add?k="+strconv.Itoa(k), nil)
		if err != nil {
			f.t.Error(err)
			return
		}
		req.Header.Set(cells.HeaderTenant, string(tenant))
		req.Header.Set(cells.HeaderEpoch, strconv.FormatUint(uint64(d.Epoch), 10))
		req.Header.Set(cells.HeaderAdmission, cells.MintToken(cells.DeriveCellKey(masterKey, d.Cell), tenant, d.Cell, d.Epoch))
		resp, err := f.http.Do(req)
		if err != nil {
			if ctx.Err() != nil || !strings.Contains(err.Error(), "connection refused") {
				note(f.unknown)
				return
			}
			continue // it did not get there
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		switch {
		case err != nil:
			note(f.unknown)
			return
		case resp.StatusCode == http.StatusOK:
			note(f.acked)
			return
		case cells.Code(resp.Header.Get(cells.HeaderAnswer)).Retry():
			_, _ = f.router.Refresh(ctx, tenant)
			continue
		}
		f.mu.Lock()
		f.failed = append(f.failed, fmt.Sprintf("%s %d: %s: %s", tenant, k, resp.Status, body))
		f.mu.Unlock()
		return
	}
}

// hammer writes from several goroutines until stop is called; keys are never used
// twice.
func (f *front) hammer(tenants ...cells.TenantID) (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	var halt atomic.Bool
	var next atomic.Int64
	var wg sync.WaitGroup
	for _, tenant := range tenants {
		for range 3 {
			wg.Go(func() {
				for !halt.Load() {
					f.write(ctx, tenant, int(next.Add(1)))
				}
			})
		}
	}
	return func() {
		halt.Store(true)
		t := time.AfterFunc(time.Minute, cancel) // a write that hangs is a lost one
		wg.Wait()
		t.Stop()
		cancel()
	}
}

// count is how many writes of the tenant were acknowledged so far.
func (f *front) count(tenant cells.TenantID) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.acked[tenant])
}

// check compares what a cell holds with what was acknowledged: nothing lost,
// nothing there that nobody sent, and the events are the writes, in order and
// without gaps.
func (f *front) check(file string, tenant cells.TenantID) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	keys, events := rowsOf(f.t, file, tenant)
	for k := range f.acked[tenant] {
		if _, ok := keys[k]; !ok {
			f.t.Errorf("%s: acknowledged write %d is lost", tenant, k)
		}
	}
	for k := range keys {
		if !f.acked[tenant][k] && !f.unknown[tenant][k] {
			f.t.Errorf("%s: write %d is there and nobody was told", tenant, k)
		}
	}
	if len(events) != len(keys) {
		f.t.Errorf("%s: %d rows and %d events", tenant, len(keys), len(events))
	}
	last := int64(0)
	for i, e := range events {
		k, _ := strconv.Atoi(e.Key)
		if e.Seq != int64(i+1) || e.Epoch < last || keys[k] != e.Epoch {
			f.t.Errorf("%s: event %d is %+v (epoch before: %d, row's: %d)", tenant, i+1, e, last, keys[k])
		}
		last = e.Epoch
	}
	if len(f.failed) > 0 {
		f.t.Errorf("%d failed requests: %v", len(f.failed), f.failed[:min(3, len(f.failed))])
	}
}

func (p *plane) controller(t *testing.T, opts ...cells.ControllerOption) *cells.MoveController {
	c := p.client(t)
	opts = append([]cells.ControllerOption{cells.WithFencer(c), cells.WithEventBarrier(c), cells.WithDrainer(c), cells.WithDataMover(c)}, opts...)
	return cells.NewMoveController(p.table, opts...)
}

func (p *plane) serve(t *testing.T, cell cells.CellID, file string) *service {
	t.Helper()
	cfg := p.config(t, cell)
	cfg.AdmissionKeyFile = writeKey(t, cell)
	s, err := startService(t.Context(), cfg, file, quiet, nil, WithHeartbeatEvery(20*time.Millisecond), WithReconcile(100*time.Millisecond, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	p.ready(t, s.m)
	return s
}

// A tenant moves there and back between two cells with SQLite files while it, and
// its neighbours on both, are being written to.
func TestMoveUnderLoad(t *testing.T) {
	p := newPlane(t)
	dir := t.TempDir()
	files := map[cells.CellID]string{"a": filepath.Join(dir, "a.db"), "b": filepath.Join(dir, "b.db")}
	p.serve(t, "a", files["a"])
	p.serve(t, "b", files["b"])
	ctrl := p.controller(t, cells.WithDrainDeadline(10*time.Second))
	for tenant, cell := range map[cells.TenantID]cells.CellID{"mover": "a", "stays-a": "a", "stays-b": "b"} {
		if err := ctrl.Assign(t.Context(), tenant, cell, "test"); err != nil {
			t.Fatal(err)
		}
	}
	f := newFront(t, p)
	stop := f.hammer("mover", "stays-a", "stays-b")
	eventually(t, "some writes", func() bool { return f.count("mover") > 100 })
	for i, to := range []cells.CellID{"b", "a", "b"} {
		before := f.count("mover")
		res, err := ctrl.Run(t.Context(), cells.MovePlan{TenantID: "mover", ToCell: to, Actor: "test"})
		if err != nil || res.RolledBack || res.Route.CellID != to {
			stop()
			t.Fatalf("move %d to %s: %+v %v", i, to, res, err)
		}
		t.Logf("move %d to %s: %d writes meanwhile, pause %s, predicted %s", i, to, f.count("mover")-before, res.Pause, res.Predicted)
		eventually(t, "writes after the move", func() bool { return f.count("mover") > before+50 })
	}
	stop()
	f.check(files["b"], "mover")
	f.check(files["a"], "stays-a")
	f.check(files["b"], "stays-b")
	if keys, events := rowsOf(t, files["a"], "mover"); len(keys)+len(events) != 0 {
		t.Errorf("the loser still holds %d rows and %d events", len(keys), len(events))
	}
	if len(f.unknown["mover"]) > 0 {
		t.Errorf("writes without an answer: %v", f.unknown["mover"])
	}
	t.Logf("slowest write: %s", f.slowest)
}

// Each cell has two processes on one file. One of them is killed in the middle of
// a step; the step goes on in the other one and the move is committed, with all
// acknowledged writes.
func TestMoveSurvivesKilledProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes")
	}
	for _, at := range []string{"claimed", "captured", "batch", "verified", "prepared", "final", "applied", "compared", "finished"} {
		t.Run("target at "+at, func(t *testing.T) {
			p := newPlane(t)
			p.setLapse(30 * time.Second) // a slow machine does not make the victim lapse before it dies
			dir := t.TempDir()
			a, b := filepath.Join(dir, "a.db"), filepath.Join(dir, "b.db")
			p.serve(t, "a", a)
			victim := p.spawn(t, "b", "b-victim", b, at)
			p.spawn(t, "b", "b-heir", b, "")
			// The victim is asked first: the other one is hidden until it is dead.
			c := p.client(t)
			hidden := NewAgentClient(p.ch, func(ctx context.Context, cell cells.CellID) ([]Heartbeat, error) {
				hbs, err := p.locate(ctx, cell)
				if cell != "b" {
					return hbs, err
				}
				select {
				case <-victim.exited:
					return hbs, err
				default:
				}
				for i, h := range hbs {
					if h.Instance != victim.instance {
						hbs[i].Ready = false
					}
				}
				return hbs, err
			})
			defer hidden.CloseIdleConnections()
			ctrl := cells.NewMoveController(p.table, cells.WithFencer(c), cells.WithEventBarrier(c), cells.WithDrainer(c), cells.WithDataMover(hidden),
				cells.WithDrainDeadline(20*time.Second))
			moveThroughKill(t, p, ctrl, a, b, func() {
				select {
				case <-victim.exited:
				default:
					t.Error("the victim lives: its point was not reached")
				}
			})
		})
	}
	t.Run("source while it is read", func(t *testing.T) {
		p := newPlane(t)
		dir := t.TempDir()
		a, b := filepath.Join(dir, "a.db"), filepath.Join(dir, "b.db")
		victim := p.spawn(t, "a", "a-victim", a, "")
		p.spawn(t, "a", "a-heir", a, "")
		p.serve(t, "b", b)
		var once sync.Once
		ctrl := p.controller(t, cells.WithDrainDeadline(20*time.Second), cells.WithObserver(func(e cells.StepEvent) {
			if e.Progress != nil && e.Step == cells.StepPrepare {
				once.Do(victim.kill)
			}
		}))
		moveThroughKill(t, p, ctrl, a, b, func() {
			select {
			case <-victim.exited:
			default:
				t.Error("the victim lives")
			}
		})
	})
}

func moveThroughKill(t *testing.T, p *plane, ctrl *cells.MoveController, a, b string, after func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := ctrl.Assign(ctx, "mover", "a", "test"); err != nil {
		t.Fatal(err)
	}
	f := newFront(t, p)
	stop := f.hammer("mover")
	eventually(t, "some writes", func() bool { return f.count("mover") > 50 })
	res, err := ctrl.Run(ctx, cells.MovePlan{TenantID: "mover", ToCell: "b", Actor: "test"})
	for tries := 0; errors.Is(err, cells.ErrRolledBack) && tries < 3; tries++ {
		// Giving up is allowed while nothing is decided; losing is not.
		t.Logf("rolled back: %v; again", res.Reason)
		res, err = ctrl.Run(ctx, cells.MovePlan{TenantID: "mover", ToCell: "b", Actor: "test"})
	}
	if err != nil || res.Route.CellID != "b" {
		stop()
		t.Fatalf("%+v %v", res, err)
	}
	before := f.count("mover")
	eventually(t, "writes after the move", func() bool { return f.count("mover") > before+20 })
	stop()
	after()
	f.check(b, "mover")
	if keys, _ := rowsOf(t, a, "mover"); len(keys) != 0 {
		t.Errorf("the loser still holds %d rows", len(keys))
	}
	t.Logf("pause %s, slowest write %s, unknown %d", res.Pause, f.slowest, len(f.unknown["mover"]))
}
