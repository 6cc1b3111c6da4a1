// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"flag"
	"strings"
	"testing"
)

var deep = flag.Bool("deep", false, "explore larger configurations too (minutes, gigabytes)")

var (
	xOneMove = xconfig{name: "two drivers, one move", cells: 2, drivers: 2, moves: 1, writes: 2}
	xTwo     = xconfig{name: "two moves", cells: 2, drivers: 1, moves: 2, writes: 2}
	xThree   = xconfig{name: "three cells", cells: 3, drivers: 1, moves: 2, writes: 1}
	xLife    = xconfig{name: "claims and deletions", cells: 2, drivers: 1, moves: 1, writes: 1, deletes: 1, settle: true}
	xDefault = xconfig{name: "default cell", cells: 2, drivers: 2, moves: 1, writes: 1, fallback: true}
	xHome    = xconfig{name: "home after every crash", cells: 2, drivers: 1, moves: 2, writes: 1, settle: true}
	xUndo    = xconfig{name: "undo", cells: 2, drivers: 1, moves: 2, writes: 2, undo: true, settle: true}
	xUndone  = xconfig{name: "undo, then again", cells: 2, drivers: 1, moves: 3, writes: 1, undo: true}
	xRace    = xconfig{name: "claims race", cells: 3, drivers: 2, moves: 0, writes: 1, deletes: 1, settle: true}
)

// TestExplore visits every reachable state of small configurations and checks
// I1 to I6 in each.
func TestExplore(t *testing.T) {
	cfgs := []xconfig{xOneMove, xTwo, xThree, xLife, xDefault, xHome, xRace, xUndo}
	if exploreSmall {
		cfgs = []xconfig{xOneMove, xLife, xDefault, xRace, xUndo}
	}
	if *deep {
		cfgs = append(cfgs, xUndone,
			xconfig{name: "deep: two drivers, two moves", cells: 2, drivers: 2, moves: 2, writes: 1},
			xconfig{name: "deep: three cells", cells: 3, drivers: 1, moves: 2, writes: 2, settle: true},
			xconfig{name: "deep: two lives", cells: 2, drivers: 1, moves: 1, writes: 2, deletes: 2, settle: true})
	}
	for _, cfg := range cfgs {
		t.Run(cfg.name, func(t *testing.T) {
			n, acts, err := explore(cfg, xrules{})
			if err != nil {
				t.Fatalf("after %d states: %v", n, err)
			}
			t.Logf("%d states, new by action: %v", n, acts)
			// An exploration that reaches nothing proves nothing.
			want := []string{"commit", "rollback", "opened", "discard", "removed", "late", "write", "member"}
			if cfg.moves == 0 {
				want = []string{"claim", "delete", "deleted", "late", "write", "member"}
			}
			if cfg.undo {
				want = append(want, "return", "window-closed")
			}
			for _, a := range want {
				if acts[a] == 0 {
					t.Errorf("no state was reached by %q", a)
				}
			}
		})
	}
}

// TestExploreMutations breaks one rule at a time; the explorer must notice, and
// for the reason given.
func TestExploreMutations(t *testing.T) {
	dig := func(c xconfig) xconfig { c.deep = true; return c }
	for _, tc := range []struct {
		name  string
		rules xrules
		cfg   xconfig
		want  string
	}{
		{"open before the decision", xrules{openBeforeDecide: true}, xOneMove, "I1"},
		{"rollback after the commit", xrules{rollbackAfterCommit: true}, xOneMove, "I5"},
		{"rollback after the commit, seen by the cells only", xrules{rollbackAfterCommit: true}, dig(xOneMove), "I1"},
		{"rollback to the epoch that the source had", xrules{rollbackSameEpoch: true}, xTwo, "I3"},
		{"imports without the fence", xrules{importUnguarded: true}, xTwo, "I2"},
		{"imports while the fence is closed by anybody", xrules{importWrongMove: true}, xTwo, "I2"},
		{"imports out of order within a move", xrules{importUnordered: true}, xOneMove, "I2"},
		{"removals without the fence", xrules{removeUnguarded: true}, xTwo, "I2"},
		{"floor kept after a close", xrules{floorKept: true}, xOneMove, "I1"},
		{"fences that take older orders", xrules{fenceTakesOlder: true}, dig(xOneMove), "I"},
		{"another move's state taken for its own", xrules{adoptsOther: true}, xOneMove, "I1"},
		{"writes that compare the state instead of the revision", xrules{casIgnoresRevision: true}, xOneMove, "I"},
		{"commit without the source's fence", xrules{skipFence: true}, xOneMove, "I1"},
		{"commit without the event mark", xrules{skipPause: true}, xOneMove, "I4"},
		{"move to a cell that holds old rows", xrules{beginOverResidue: true}, xTwo, "I2"},
		{"re-creation restarts epochs", xrules{claimRestartsEpoch: true}, xLife, "I3"},
		{"re-creation restarts epochs, seen by the cells only", xrules{claimRestartsEpoch: true}, dig(xLife), "I6"},
		{"re-creation over old rows", xrules{claimOverResidue: true}, xLife, "I2"},
		{"members open from any state", xrules{memberOpensAny: true}, xLife, "I6"},
		{"members open without starting events", xrules{memberSkipsStart: true}, xOneMove, "I4"},
		{"the residue is forgotten before its rows are gone", xrules{removedBeforeDiscard: true}, xTwo, "I2"},
		{"returns without the fence", xrules{returnUnguarded: true}, xUndo, "I2"},
		{"returns after the removal", xrules{returnAfterRemoval: true}, xUndone, "I2"},
		{"held rows are removed", xrules{removeHeld: true}, xUndo, "I2"},
		{"undo after the window is closed", xrules{undoAfterClose: true}, xUndo, "I2"},
		{"undo copies over what is there", xrules{undoCopiesOver: true}, xUndo, "I2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, _, err := explore(tc.cfg, tc.rules)
			var v *violation
			if !errors.As(err, &v) {
				t.Fatalf("not noticed in %d states: %v", n, err)
			}
			if !strings.HasPrefix(v.err.Error(), tc.want) {
				t.Errorf("noticed for another reason than %s: %v", tc.want, err)
			}
			t.Logf("after %d states: %v", n, err)
		})
	}
}
