// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// bin has the programs under test, built once.
var bin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "cell-e2e-")
	if err != nil {
		panic(err)
	}
	code := 1
	if err := build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		bin = dir
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func build(dir string) error {
	for _, b := range []struct{ dir, pkg, out string }{{"..", ".", "cell"}, {"../../../services", "./memory/cmd/memory", "memory"}} {
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, b.out), b.pkg)
		cmd.Dir = b.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building %s: %w\n%s", b.out, err, out)
		}
	}
	return os.Chmod(dir, 0o755)
}

// env is a running fleet with what tests need of it.
type env struct {
	*fleet.Fleet
	t    *testing.T
	cl   *client.Client
	http *http.Client
	// halt and clock are files that the directory reads.
	halt, clock string
	// traces collects the actions that the directory's trace must have in the end.
	traces *[]string
}

// in is the environment for a subtest.
func (e *env) in(t *testing.T) *env {
	out := *e
	out.t = t
	return &out
}

// start starts a fleet in a folder of its own.
func start(t *testing.T, cfg fleet.Config) *env {
	t.Helper()
	dir, err := os.MkdirTemp("", "cell-fleet-")
	if err != nil {
		t.Fatal(err)
	}
	return startIn(t, dir, cfg)
}

// startIn starts a fleet below dir. The folder is removed in the end, or kept and
// the logs shown when the test has failed. What the directory did is checked.
func startIn(t *testing.T, dir string, cfg fleet.Config, more ...func(*fleet.Options)) *env {
	t.Helper()
	if err := os.Chmod(dir, 0o755); err != nil { // Postgres runs as another user
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the fleet's files are kept in %s", dir)
			logs, _ := filepath.Glob(filepath.Join(dir, "state", "logs", "*.log"))
			for _, l := range logs {
				b, _ := os.ReadFile(l)
				t.Logf("--- %s\n%s", filepath.Base(l), b[max(0, len(b)-3000):])
			}
			return
		}
		_ = os.RemoveAll(dir)
	})
	cfg.Listen = "127.0.0.1:0"
	// What a test gives is another service, or further arguments of this one.
	if c := cfg.Service.Command; len(c) == 0 || strings.HasPrefix(c[0], "-") {
		cfg.Service.Command = append([]string{filepath.Join(bin, "memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}"}, c...)
	}
	halt, trace := filepath.Join(dir, "halt"), filepath.Join(dir, "trace.jsonl")
	o := fleet.Options{Dir: filepath.Join(dir, "state"), Cell: filepath.Join(bin, "cell"), Log: slog.New(slog.DiscardHandler), PostgresNoSync: true,
		DirectoryArgs: []string{"--halt-file", halt, "--trace", trace, "--clock-file", filepath.Join(dir, "clock")}}
	for _, f := range more {
		f(&o)
	}
	f, err := fleet.Start(t.Context(), cfg, o)
	if err != nil {
		t.Fatal(err)
	}
	var wanted []string
	t.Cleanup(func() {
		f.Close()
		checkTrace(t, trace, wanted)
	})
	cl, err := f.Client()
	if err != nil {
		t.Fatal(err)
	}
	hc := load.NewHTTPClient(64)
	t.Cleanup(hc.CloseIdleConnections)
	return &env{Fleet: f, t: t, cl: cl, http: hc, halt: halt, clock: filepath.Join(dir, "clock"), traces: &wanted}
}

// checkTrace holds everything that the fleet's directories did against the actions
// of moves, campaigns and rollouts, whatever the test was about; those that are wanted must
// be there.
func checkTrace(t *testing.T, path string, wanted []string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	rep, err := directory.CheckTrace(f)
	if err != nil {
		t.Errorf("the trace is no behaviour of the protocol: %v", err)
	}
	t.Logf("trace: %+v", rep)
	for _, action := range wanted {
		n := rep.Actions[action]
		if name, ok := strings.CutPrefix(action, "campaign "); ok {
			n = rep.CampaignActions[name]
		}
		if name, ok := strings.CutPrefix(action, "rollout "); ok {
			n = rep.RolloutActions[name]
		}
		if action == "undo" {
			n = rep.Undos
		}
		if n == 0 {
			t.Errorf("the trace has no %s", action)
		}
	}
}

// stores runs a test on both engines.
func stores(t *testing.T, f func(t *testing.T, store string)) {
	for _, store := range []string{fleet.StoreSQLite, fleet.StorePostgres} {
		t.Run(store, func(t *testing.T) { f(t, store) })
	}
}

func (e *env) tenant(name, cell string) *load.Client {
	e.t.Helper()
	c := &load.Client{Base: e.Info.Edge, Tenant: name, HTTP: e.http}
	if err := (fleet.Mover{Client: e.cl}).Place(e.t.Context(), name, cell); err != nil {
		e.t.Fatal(err)
	}
	if err := load.WaitServed(e.t.Context(), c); err != nil {
		e.t.Fatal(err)
	}
	return c
}

// hammer starts a hammer and returns what stops it and reads its books.
func (e *env) hammer(h *load.Hammer) (stop func() load.Tally) {
	ctx, cancel := context.WithCancel(e.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { h.Run(ctx) })
	var once sync.Once
	var tally load.Tally
	stop = func() load.Tally {
		once.Do(func() {
			cancel()
			wg.Wait()
			if err := load.WaitServed(context.WithoutCancel(ctx), h.Client); err != nil {
				e.t.Error(err)
				return
			}
			var err error
			if tally, err = h.Verify(context.WithoutCancel(ctx)); err != nil {
				e.t.Errorf("books of %s: %v", h.Client.Tenant, err)
			}
		})
		return tally
	}
	e.t.Cleanup(func() { cancel(); wg.Wait() })
	return stop
}

// haltAt makes the directory stop for ever after it has persisted one of the steps.
func (e *env) haltAt(steps ...cells.Step) {
	e.t.Helper()
	var b strings.Builder
	for _, s := range steps {
		b.WriteString(string(s) + "\n")
	}
	e.t.Cleanup(e.release) // also after a failure: those that come next must not stand still, too
	_ = os.Remove(e.halt + ".reached")
	if err := os.WriteFile(e.halt+".tmp", []byte(b.String()), 0o644); err != nil {
		e.t.Fatal(err)
	}
	if err := os.Rename(e.halt+".tmp", e.halt); err != nil {
		e.t.Fatal(err)
	}
}

// waitHalted waits until the directory stands at one of the steps, or at the one that is named.
func (e *env) waitHalted(at ...cells.Step) {
	e.t.Helper()
	e.eventually("the driver stands at the step", 60*time.Second, func() bool {
		b, err := os.ReadFile(e.halt + ".reached")
		step, _, _ := strings.Cut(string(b), " ")
		return err == nil && (len(at) == 0 || cells.Step(step) == at[0])
	})
}

// release lets the directory go on (or, when it was killed, not stop again).
func (e *env) release() {
	_ = os.Remove(e.halt)
	_ = os.Remove(e.halt + ".reached")
}

func (e *env) eventually(what string, within time.Duration, ok func() bool) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), within)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			e.t.Fatalf("not within %s: %s", within, what)
		case <-tick.C:
		}
	}
}

// kill ends a process with SIGKILL and waits until it runs again.
func (e *env) kill(name string) {
	e.t.Helper()
	p := e.Procs.Proc(name)
	pid := p.PID()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), time.Minute)
	defer cancel()
	if err := p.WaitRestart(ctx, pid); err != nil {
		e.t.Fatal(err)
	}
}

// killCell ends every process of a cell with SIGKILL, and waits until each of them runs
// again, or was given up for another.
func (e *env) killCell(cell cells.CellID) {
	e.t.Helper()
	killed := e.pids(string(cell) + "-")
	if len(killed) == 0 {
		e.t.Fatalf("no process of %s runs", cell)
	}
	for name, pid := range killed {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			e.t.Fatalf("%s: %v", name, err)
		}
	}
	e.eventually("the processes of "+string(cell)+" run again", time.Minute, func() bool {
		now := e.pids(string(cell) + "-")
		for name, pid := range killed {
			if now[name] == pid || now[name] == 0 && e.Procs.Proc(name) != nil {
				return false
			}
		}
		return len(now) > 0
	})
}

// startMove asks for a move; the request is repeated while the directory is away.
func (e *env) startMove(tenant, to, op string) api.Move {
	e.t.Helper()
	none := time.Duration(0)
	return e.askMove(api.MoveRequest{Tenant: cells.TenantID(tenant), To: cells.CellID(to), OperationID: op, Actor: "test", Force: true, UndoWindow: &none})
}

func (e *env) askMove(req api.MoveRequest) api.Move {
	e.t.Helper()
	tenant := req.Tenant
	var mv api.Move
	e.eventually("move is accepted", 20*time.Second, func() bool {
		m, err := e.cl.Move(e.t.Context(), req)
		if a := cells.AnswerOf(err); a != nil && !a.Code.Retry() {
			e.t.Fatalf("move of %s: %v", tenant, err)
		}
		mv = m
		return err == nil
	})
	return mv
}

// settle waits until a move is over and nothing is left to remove.
func (e *env) settle(id cells.MoveID) api.Move {
	e.t.Helper()
	var mv api.Move
	e.eventually("move "+string(id)+" ends", 60*time.Second, func() bool {
		m, err := e.cl.MoveByID(e.t.Context(), id)
		if err == nil {
			mv = m
		}
		return err == nil && m.State.Final() && len(m.Residue) == 0
	})
	return mv
}

func (e *env) cellOf(tenant string) cells.CellID {
	e.t.Helper()
	t, err := e.cl.Tenant(e.t.Context(), cells.TenantID(tenant))
	if err != nil || t.Route == nil {
		e.t.Fatalf("route of %s: %v", tenant, err)
	}
	if !t.Route.Serving() || t.Route.MoveID != "" {
		e.t.Fatalf("%s is %s with move %q", tenant, t.Route.State, t.Route.MoveID)
	}
	return t.Route.CellID
}

func mustBeClean(t *testing.T, who string, tally load.Tally, failuresAllowed bool) {
	t.Helper()
	if tally.Lost+tally.Duplicated+tally.Phantom > 0 {
		t.Errorf("%s: %d lost, %d duplicated, %d phantom of %d writes; first: %s", who, tally.Lost, tally.Duplicated, tally.Phantom, tally.Writes, tally.FirstLoss)
	}
	if !failuresAllowed && tally.Failed > 0 {
		t.Errorf("%s: %d of %d requests failed, the first with %s", who, tally.Failed, tally.Requests, tally.FirstFailure)
	}
	if failuresAllowed && tally.Failed > 100 {
		t.Logf("%s: %d of %d requests failed, the first with %s", who, tally.Failed, tally.Requests, tally.FirstFailure)
	}
	if tally.Writes == 0 {
		t.Errorf("%s: nothing was written", who)
	}
}

// orphans lists processes that run a program of this test's.
func orphans(t *testing.T, mark string) []string {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range procs {
		b, err := os.ReadFile(p)
		if err == nil && strings.Contains(string(b), mark) {
			out = append(out, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	slices.Sort(out)
	return out
}
