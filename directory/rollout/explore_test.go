// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// explored is a state of the world with what may still be done to it.
type explored struct {
	*world
	orders, faults, moods int // left of an operator's, of failures, of changes of health
}

// key tells states apart by all that matters: no times, no totals.
func (e *explored) key() string {
	var b strings.Builder
	r := &e.rec
	fmt.Fprintf(&b, "%s %v %d %d %v %v %q %v %v %v %d%d%d %s|", r.State, r.Paused, r.Wave, r.ReturnFrom, r.Bad, r.Kept, r.Campaign, r.Back, r.Drop, r.Reference != nil, e.orders, e.faults, e.moods, e.health)
	for _, u := range e.units {
		fmt.Fprintf(&b, "%s%d%s@%s ", u.Unit, u.Wave, u.State, e.routes[u.Unit])
	}
	for _, t := range slices.Sorted(maps.Keys(e.routes)) {
		fmt.Fprintf(&b, "%s@%s ", t, e.routes[t])
	}
	if c := e.campaigns[r.Campaign]; c != nil {
		fmt.Fprintf(&b, "|%s", c.state)
		for _, it := range c.items {
			fmt.Fprintf(&b, " %s%s", it.Tenant, it.State)
		}
	}
	for _, c := range slices.Sorted(maps.Keys(e.has)) {
		fmt.Fprintf(&b, "|%s %s %s %v", c, e.has[c], e.wished[c], e.refuse[c])
	}
	return b.String()
}

// check holds what must be true in every state.
func (e *explored) check(t *testing.T, names []string) {
	t.Helper()
	r := &e.rec
	for i, n := range names {
		if u := e.units[i]; u.Unit != n && !slices.ContainsFunc(e.units, func(u api.RolloutUnit) bool { return u.Unit == n }) {
			t.Fatalf("%s is lost from the waves: %s", n, e.key())
		}
	}
	seen := map[string]bool{}
	for _, u := range e.units {
		if seen[u.Unit] || u.Wave < 1 || u.Wave > len(r.Waves) {
			t.Fatalf("unit %s is there twice, or in no wave: %s", u.Unit, e.key())
		}
		seen[u.Unit] = true
		began := u.State != api.UnitPending && u.State != api.UnitGone
		if began && u.Wave > r.Wave {
			t.Fatalf("unit %s of wave %d has begun in wave %d: %s", u.Unit, u.Wave, r.Wave, e.key())
		}
		if !r.State.Final() {
			continue
		}
		if u.State == api.UnitChanging || u.State == api.UnitReturning {
			t.Fatalf("unit %s is under way in a rollout that is over: %s", u.Unit, e.key())
		}
		returned := r.ReturnFrom > 0 && !r.Kept && u.Wave >= r.ReturnFrom && u.Wave <= r.Wave
		if returned && (u.State == api.UnitChanged || u.State == api.UnitFailed || !e.home(&u) && u.State != api.UnitGone && u.State != api.UnitLeft) {
			t.Fatalf("unit %s was not returned: %s", u.Unit, e.key())
		}
		if r.State == api.RolloutDone && u.State != api.UnitChanged && u.State != api.UnitLeft && u.State != api.UnitGone && u.State != api.UnitReturned {
			t.Fatalf("unit %s is %s in a rollout that is done: %s", u.Unit, u.State, e.key())
		}
	}
	if r.State.Final() {
		for id, c := range e.campaigns {
			if !c.state.Final() {
				t.Fatalf("campaign %s goes on after the end: %s", id, e.key())
			}
		}
		if r.Driver != "" {
			t.Fatalf("a rollout that is over has a driver")
		}
	}
	if r.State == api.RolloutHalted && (r.Verdict == nil || r.Verdict.Health != api.Unhealthy) {
		t.Fatalf("halted by %+v", r.Verdict)
	}
}

// home reports whether a unit has what it had before.
func (e *explored) home(u *api.RolloutUnit) bool {
	if e.rec.Settings.By == api.ByUpgrade {
		return e.has[cells.CellID(u.Unit)] == u.Home && e.wished[cells.CellID(u.Unit)] == u.Home
	}
	return e.outsiders[u.Unit] || string(e.routes[u.Unit]) == u.Home
}

func (e *explored) next() *explored {
	return &explored{world: e.clone(), orders: e.orders, faults: e.faults, moods: e.moods}
}

// successors are all states that one thing leads to.
func (e *explored) successors(t *testing.T) []*explored {
	var out []*explored
	add := func(f func(*explored) bool) {
		if n := e.next(); f(n) {
			out = append(out, n)
		}
	}
	// The driver does its next thing, or dies at one of the steps on the way.
	for crash := range 4 {
		add(func(n *explored) bool {
			n.crashIn = crash
			_, err := n.driver().Step(t.Context(), n.rec.ID)
			if err != nil && !errors.Is(err, errCrash) && !errors.Is(err, rollout.ErrNotDriver) {
				t.Fatalf("step: %v in %s", err, e.key())
			}
			n.crashIn = 0
			return crash == 0 || errors.Is(err, errCrash)
		})
	}
	for id := range e.campaigns {
		add(func(n *explored) bool { return n.goOn(id, true) })
		if e.faults > 0 {
			add(func(n *explored) bool { n.faults--; return n.goOn(id, false) })
			add(func(n *explored) bool { // somebody aborts it by hand
				n.faults--
				before := n.campaigns[id].state
				_ = n.End(t.Context(), nil, id, false)
				return n.campaigns[id].state != before
			})
		}
	}
	for c := range e.has {
		if e.has[c] != e.wished[c] {
			add(func(n *explored) bool { n.has[c] = n.wished[c]; return true })
		}
		if e.faults > 0 && !e.refuse[c] {
			add(func(n *explored) bool { n.faults--; n.refuse[c] = true; return true })
		}
		if e.refuse[c] {
			add(func(n *explored) bool { delete(n.refuse, c); return true })
		}
	}
	if e.faults > 0 {
		for name := range e.routes {
			add(func(n *explored) bool { n.faults--; delete(n.routes, name); n.outsiders[name] = true; return true })
			add(func(n *explored) bool {
				n.faults--
				n.routes[name] = "elsewhere"
				n.outsiders[name] = true
				return true
			})
		}
		if e.rec.Settings.By == api.ByMove {
			add(func(n *explored) bool { n.faults--; n.routes["newcomer"] = "a"; return true })
		}
	}
	if e.moods > 0 {
		for _, h := range []string{"good", "bad", "none"} {
			if h != e.health {
				add(func(n *explored) bool { n.moods--; n.health = h; return true })
			}
		}
	}
	if e.orders > 0 && !e.rec.State.Final() {
		for _, ev := range []rollout.Event{{Kind: rollout.Pause, Actor: "bob"}, {Kind: rollout.Abort, Actor: "bob"}, {Kind: rollout.Abort, Actor: "bob", Keep: true}} {
			add(func(n *explored) bool { n.orders--; return n.order2(t, ev, false) })
		}
	}
	if e.rec.Paused {
		for _, skip := range []bool{false, true} {
			add(func(n *explored) bool { return n.order2(t, rollout.Event{Kind: rollout.Resume, Actor: "bob"}, skip) })
		}
	}
	return out
}

func (e *explored) order2(t *testing.T, ev rollout.Event, skip bool) bool {
	t.Helper()
	ev.At = e.now()
	_, err := rollout.Order(t.Context(), e.world, e.rec.ID, ev, skip, nil)
	if err != nil && !errors.Is(err, rollout.ErrNoChange) && !errors.Is(err, rollout.ErrRefused) {
		t.Fatalf("%s: %v", ev.Kind, err)
	}
	return err == nil
}

// ends drives the state on when nothing fails any more and nobody interferes but to
// resume: it must come to an end.
func (e *explored) ends(t *testing.T, names []string) api.RolloutState {
	t.Helper()
	n := e.next()
	clear(n.refuse)
	if n.health == "none" {
		n.health = "good"
	}
	for range 400 {
		if n.rec.State.Final() {
			n.check(t, names)
			return n.rec.State
		}
		if n.rec.Paused {
			n.order2(t, rollout.Event{Kind: rollout.Resume, Actor: "bob"}, false)
		}
		if _, err := n.driver().Step(t.Context(), n.rec.ID); err != nil {
			t.Fatalf("step: %v in %s", err, n.key())
		}
		for id := range n.campaigns {
			n.goOn(id, true)
		}
		maps.Copy(n.has, n.wished)
	}
	t.Fatalf("it never ends: from %s to %s", e.key(), n.key())
	return ""
}

func explore(t *testing.T, w *world, orders, faults, moods, most int) {
	t.Helper()
	var names []string
	for _, u := range w.units {
		names = append(names, u.Unit)
	}
	first := &explored{world: w, orders: orders, faults: faults, moods: moods}
	queue, seen := []*explored{first}, map[string]bool{first.key(): true}
	ends := map[api.RolloutState]int{}
	for len(queue) > 0 {
		e := queue[0]
		queue = queue[1:]
		e.check(t, names)
		ends[e.ends(t, names)]++
		for _, n := range e.successors(t) {
			if k := n.key(); !seen[k] {
				seen[k] = true
				queue = append(queue, n)
			}
		}
		if len(seen) > most {
			t.Fatalf("more than %d states: the space is not finite", most)
		}
	}
	t.Logf("%d states; they end as %v", len(seen), ends)
	for s, can := range map[api.RolloutState]bool{api.RolloutDone: true, api.RolloutHalted: moods > 0, api.RolloutAborted: orders > 0} {
		if can && ends[s] == 0 {
			t.Errorf("nothing ends as %s", s)
		}
	}
}

// Every state that two waves of tenants can get into with a driver that dies at any
// step, moves that fail, tenants that others move or delete, an operator, and health
// that changes: nobody is lost, what is returned is wholly returned, and it ends.
func TestExploreMoves(t *testing.T) {
	for _, c := range []struct{ orders, faults, moods int }{{1, 0, 1}, {0, 1, 1}, {1, 1, 0}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			explore(t, newWorld(api.ByMove, []float64{50, 100}, "t1", "t2"), c.orders, c.faults, c.moods, 200_000)
		})
	}
}

// The same for cells that are upgraded.
func TestExploreUpgrades(t *testing.T) {
	for _, c := range []struct{ orders, faults, moods int }{{1, 1, 1}, {2, 0, 1}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			explore(t, newWorld(api.ByUpgrade, []float64{50, 100}, "c1", "c2"), c.orders, c.faults, c.moods, 200_000)
		})
	}
}
