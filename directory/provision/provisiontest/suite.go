// SPDX-License-Identifier: Apache-2.0

package provisiontest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/provision"
)

// TB is the part of [testing.TB] that the suite uses. Fatalf must not return.
type TB interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
	TempDir() string
	Context() context.Context
}

// Harness is one case's machine or cluster.
type Harness struct {
	// Provisioner is the one under test. Reopen returns another one on the same machine
	// or cluster, as after the first was killed; what a kill takes with it is gone.
	Provisioner provision.Provisioner
	Reopen      func() provision.Provisioner
	// Spec is a spec that works, of version v1, with two processes.
	Spec func(cell cells.CellID) provision.Spec
	// Broken changes a spec to one whose processes never become ready.
	Broken func(s *provision.Spec)
	// Left names everything of the cell that is there: processes, files, objects.
	Left func(cell cells.CellID) []string
}

// Case is one requirement.
type Case struct {
	Name string
	Run  func(t TB, h Harness)
}

// Run runs all cases; newHarness is called once for each of them.
func Run(t *testing.T, newHarness func(t TB) Harness) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, newHarness(t)) })
	}
}

// Cases returns the suite.
func Cases() []Case {
	return []Case{
		{"Provision", provisions},
		{"ProvisionIsIdempotent", provisionsAgain},
		{"Upgrade", upgrades},
		{"UpgradeIsIdempotent", upgradesAgain},
		{"UpgradeOfReplicas", scales},
		{"UpgradeOfEnvironment", changesEnvironment},
		{"BrokenVersion", breaks},
		{"UpgradeIsCutOff", cutOff},
		{"Drain", drains},
		{"Retire", retires},
		{"RetireAfterKill", retiresAfterKill},
		{"CellsAreApart", apart},
		{"Invalid", invalid},
	}
}

type env struct {
	TB
	Harness
	ctx context.Context
}

func begin(t TB, h Harness) *env {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return &env{TB: t, Harness: h, ctx: ctx}
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatalf("unexpected error: %v", err)
	}
}

func (e *env) status(cell cells.CellID) provision.Status {
	e.Helper()
	st, err := e.Provisioner.Status(e.ctx, cell)
	e.must(err)
	return st
}

// reached checks that the cell is as the spec wants it.
func (e *env) reached(s provision.Spec) {
	e.Helper()
	st := e.status(s.Cell)
	if !st.Reached(&s) || st.Cell != s.Cell {
		e.Fatalf("the cell is %+v, which is not what generation %d wants (%s, version %s)", st, s.Generation, s.Desired, s.Version)
	}
	if s.Desired == provision.DesiredServing && (st.Ready != s.Replicas || st.Replicas != s.Replicas || st.Updated != s.Replicas) {
		e.Fatalf("the cell has %+v, want %d processes", st, s.Replicas)
	}
}

// watch notes the fewest ready processes until it is stopped.
func (e *env) watch(cell cells.CellID) (fewest func() int) {
	ctx, cancel := context.WithCancel(e.ctx)
	e.Cleanup(cancel)
	n := e.status(cell).Ready
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			if st, err := e.Provisioner.Status(ctx, cell); err == nil {
				n = min(n, st.Ready)
			}
		}
	})
	return func() int { cancel(); wg.Wait(); return n }
}

func next(s provision.Spec, change func(*provision.Spec)) provision.Spec {
	s = s.Clone()
	s.Generation++
	change(&s)
	return s
}

func provisions(t TB, h Harness) {
	e := begin(t, h)
	if st := e.status("c1"); st.Replicas != 0 || st.Phase != provision.PhaseRetired || len(e.Left("c1")) > 0 {
		e.Fatalf("a cell that nobody made is %+v, with %v", st, e.Left("c1"))
	}
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	e.reached(s)
	if len(e.Left("c1")) == 0 {
		e.Errorf("nothing of the cell is there")
	}
}

func provisionsAgain(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	before := e.Left("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	e.reached(s)
	e.same("Provision again", before, e.Left("c1"))
}

func (e *env) same(what string, before, after []string) {
	e.Helper()
	if fmt.Sprint(before) != fmt.Sprint(after) {
		e.Errorf("%s: there was %v, and is %v", what, before, after)
	}
}

func upgrades(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	fewest := e.watch("c1")
	v2 := next(s, func(s *provision.Spec) { s.Version = "v2" })
	if st := e.status("c1"); st.Reached(&v2) {
		e.Fatalf("the upgrade is reached before it was asked for: %+v", st)
	}
	e.must(e.Provisioner.Upgrade(e.ctx, v2))
	e.reached(v2)
	if n := fewest(); n < s.Replicas {
		e.Errorf("only %d of %d processes were ready during the upgrade", n, s.Replicas)
	}
	back := next(v2, func(s *provision.Spec) { s.Version = "v1" })
	e.must(e.Provisioner.Upgrade(e.ctx, back))
	e.reached(back)
}

func upgradesAgain(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Upgrade(e.ctx, s)) // of nothing: it is made
	e.reached(s)
	before := e.Left("c1")
	e.must(e.Provisioner.Upgrade(e.ctx, s))
	e.reached(s)
	e.same("Upgrade again", before, e.Left("c1"))
}

func scales(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	for _, n := range []int{3, 1, 2} {
		s = next(s, func(s *provision.Spec) { s.Replicas = n })
		e.must(e.Provisioner.Upgrade(e.ctx, s))
		e.reached(s)
	}
}

func changesEnvironment(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	before := e.Left("c1")
	s = next(s, func(s *provision.Spec) { s.Env = map[string]string{"LEVEL": "debug"} })
	e.must(e.Provisioner.Upgrade(e.ctx, s))
	e.reached(s)
	if after := e.Left("c1"); fmt.Sprint(after) == fmt.Sprint(before) {
		e.Errorf("another environment changed nothing: %v", after)
	}
}

func breaks(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	fewest := e.watch("c1")
	bad := next(s, func(s *provision.Spec) { s.Version = "v3"; e.Broken(s) })
	if err := e.Provisioner.Upgrade(e.ctx, bad); err == nil {
		e.Errorf("a version that never gets ready was taken for an upgrade")
	}
	if st := e.status("c1"); st.Reached(&bad) || st.Ready < s.Replicas {
		e.Errorf("after an upgrade that failed: %+v", st)
	}
	if n := fewest(); n < s.Replicas {
		e.Errorf("only %d of %d processes were ready", n, s.Replicas)
	}
	good := next(bad, func(b *provision.Spec) { *b = s; b.Generation = bad.Generation + 1; b.Version = "v4" })
	e.must(e.Provisioner.Upgrade(e.ctx, good))
	e.reached(good)
}

func cutOff(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	v2 := next(s, func(s *provision.Spec) { s.Version = "v2" })
	for _, d := range []time.Duration{0, time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(e.ctx, d)
		_ = e.Provisioner.Upgrade(ctx, v2)
		cancel()
		if st := e.status("c1"); st.Ready < s.Replicas {
			e.Errorf("cut off after %v: %+v", d, st)
		}
	}
	e.Provisioner = e.Reopen()
	e.must(e.Provisioner.Upgrade(e.ctx, v2))
	e.reached(v2)
}

func drains(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	d := next(s, func(s *provision.Spec) { s.Desired = provision.DesiredDrained })
	for range 2 {
		e.must(e.Provisioner.Drain(e.ctx, d))
		e.reached(d)
		if st := e.status("c1"); st.Ready != s.Replicas {
			e.Errorf("a cell that is being emptied has %+v", st)
		}
	}
	again := next(d, func(s *provision.Spec) { s.Desired = provision.DesiredServing; s.Version = "v2" })
	e.must(e.Provisioner.Upgrade(e.ctx, again))
	e.reached(again)
}

func retires(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	r := next(s, func(s *provision.Spec) { s.Desired = provision.DesiredRetired })
	for range 2 {
		e.must(e.Provisioner.Retire(e.ctx, r))
		e.reached(r)
		if left := e.Left("c1"); len(left) > 0 {
			e.Errorf("left of a retired cell: %v", left)
		}
	}
	e.must(e.Provisioner.Retire(e.ctx, next(e.Spec("never"), func(s *provision.Spec) { s.Desired = provision.DesiredRetired })))
	anew := next(r, func(s *provision.Spec) { s.Desired = provision.DesiredServing })
	e.must(e.Provisioner.Provision(e.ctx, anew))
	e.reached(anew)
}

func retiresAfterKill(t TB, h Harness) {
	e := begin(t, h)
	s := e.Spec("c1")
	e.must(e.Provisioner.Provision(e.ctx, s))
	e.Provisioner = e.Reopen()
	r := next(s, func(s *provision.Spec) { s.Desired = provision.DesiredRetired })
	e.must(e.Provisioner.Retire(e.ctx, r))
	e.reached(r)
	if left := e.Left("c1"); len(left) > 0 {
		e.Errorf("left of a retired cell: %v", left)
	}
}

func apart(t TB, h Harness) {
	e := begin(t, h)
	one, two := e.Spec("c1"), e.Spec("c2")
	two.Replicas = 1
	var wg sync.WaitGroup
	errs := make([]error, 2)
	for i, s := range []provision.Spec{one, two} {
		wg.Go(func() { errs[i] = e.Provisioner.Provision(e.ctx, s) })
	}
	wg.Wait()
	e.must(errors.Join(errs...))
	before := e.Left("c2")
	r := next(one, func(s *provision.Spec) { s.Desired = provision.DesiredRetired })
	e.must(e.Provisioner.Retire(e.ctx, r))
	e.reached(r)
	e.reached(two)
	e.same("the other cell was retired", before, e.Left("c2"))
}

func invalid(t TB, h Harness) {
	e := begin(t, h)
	for name, spoil := range map[string]func(*provision.Spec){
		"cell":     func(s *provision.Spec) { s.Cell = "../c1" },
		"version":  func(s *provision.Spec) { s.Version = "" },
		"replicas": func(s *provision.Spec) { s.Replicas = 0 },
		"variable": func(s *provision.Spec) { s.Env = map[string]string{"CELL_ID": "other"} },
		"word":     func(s *provision.Spec) { s.Command = append([]string{"x"}, "{nonsense}") },
	} {
		s := e.Spec("c1")
		spoil(&s)
		for call, f := range map[string]func(context.Context, provision.Spec) error{"Provision": e.Provisioner.Provision, "Upgrade": e.Provisioner.Upgrade} {
			if err := f(e.ctx, s); !errors.Is(err, cells.ErrInvalid) {
				e.Errorf("%s with a bad %s: %v, want ErrInvalid", call, name, err)
			}
		}
	}
}
