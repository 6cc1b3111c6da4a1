// SPDX-License-Identifier: Apache-2.0

package spec_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// The actions of traces, the events and effects of the core, the states of rows
// and the invariants are named in the model as they are in Go and in the design.
func TestNames(t *testing.T) {
	model := read(t, "CellMove.tla")
	defined := func(name string) bool {
		return regexp.MustCompile(`(?m)^` + name + `(\(\w+\))? +==`).MatchString(model)
	}
	for _, name := range []string{
		cells.ActionClaim, cells.ActionBegin, cells.ActionQuiesce, cells.ActionGatesClosed, cells.ActionDrained, cells.ActionCommit,
		cells.ActionRollback, cells.ActionOpened, cells.ActionRemoved, cells.ActionDelete, cells.ActionDeleted, cells.ActionWindowClosed,
		cells.ActionRead, cells.ActionCloseFence, cells.ActionOpenFence, cells.ActionPauseEvents, cells.ActionStartEvents, cells.ActionDiscard, cells.ActionReturn,
		"I1", "I2", "I3", "I4", "I5", "I6", "U1", "U2",
	} {
		if !defined(name) {
			t.Errorf("the model does not define %s", name)
		}
	}
	camel := func(s string) string {
		var b strings.Builder
		for part := range strings.SplitSeq(s, "-") {
			b.WriteString(strings.ToUpper(part[:1]) + part[1:])
		}
		return b.String()
	}
	for k := cells.EventClaim; k <= cells.EventWindowClosed; k++ {
		if !defined(camel(k.String())) {
			t.Errorf("the model has no action for the event %s", k)
		}
	}
	for k := cells.EffectOpenFence; k <= cells.EffectReturn; k++ {
		if !defined(camel(k.String())) {
			t.Errorf("the model has no action for the effect %s", k)
		}
	}
	for s := cells.RouteState(0); s <= cells.StateDeleted; s++ {
		if !strings.Contains(model, `"`+s.String()+`"`) {
			t.Errorf("the model does not know the state %s", s)
		}
	}
	for _, cfg := range configs(t) {
		if !strings.Contains(read(t, cfg), "Weak = {}") {
			t.Errorf("%s checks a weakened model", cfg)
		}
	}
}

func configs(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob("*.cfg")
	if err != nil || len(all) == 0 {
		t.Fatalf("configurations: %v, %v", all, err)
	}
	return all
}

// TLA2TOOLS names a tla2tools.jar; without it what needs TLC is skipped.
const envTools = "TLA2TOOLS"

var verdict = regexp.MustCompile(`(?m)^(?:Error: (?:Invariant|Action property) (\w+) is violated|Model checking completed\. (No error) has been found)`)

// check runs TLC in a folder of its own: "No error", or what is violated first.
func check(t *testing.T, cfg string) string {
	t.Helper()
	tools := os.Getenv(envTools)
	if tools == "" {
		t.Skip("no " + envTools)
	}
	dir := t.TempDir()
	for name, content := range map[string]string{"CellMove.tla": read(t, "CellMove.tla"), "Check.cfg": cfg} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "java", "-XX:+UseParallelGC", "-cp", tools, "tlc2.TLC", "-workers", "2", "-config", "Check.cfg", "CellMove.tla")
	cmd.Dir = dir
	out, runErr := cmd.CombinedOutput()
	m := verdict.FindSubmatch(out)
	if m == nil {
		t.Fatalf("TLC: %v\n%s", runErr, out)
	}
	if i := strings.LastIndex(string(out), "states generated"); i >= 0 {
		line := string(out)[strings.LastIndex(string(out)[:i], "\n")+1:]
		t.Log(line[:strings.Index(line, "\n")])
	}
	return string(m[1]) + string(m[2])
}

func TestModel(t *testing.T) {
	for _, cfg := range configs(t) {
		t.Run(cfg, func(t *testing.T) {
			if got := check(t, read(t, cfg)); got != "No error" {
				t.Errorf("%s is violated", got)
			}
		})
	}
}

// Each rule of the protocol that is broken lets an invariant fail. Which of several
// is found first depends on how the work is shared out.
func TestWeakenings(t *testing.T) {
	for _, c := range []struct {
		weak          string
		moves, writes int
		drivers       string
		violated      []string
		undo          bool
	}{
		{`"openBeforeDecide"`, 1, 1, "d1", []string{"I1"}, false},
		{`"rollbackCommitting"`, 1, 1, "d1", []string{"I1", "I3", "I5"}, false},
		{`"casIgnoresRevision"`, 1, 1, "d1, d2", []string{"I1", "I2", "I3", "I4", "I5", "I6"}, false},
		{`"removedBeforeDiscard"`, 1, 1, "d1", []string{"I6"}, false},
		{`"fenceTakesOlder"`, 1, 1, "d1", []string{"I1", "I3"}, false},
		{`"floorKept"`, 1, 1, "d1", []string{"I1"}, false},
		{`"skipFence"`, 1, 2, "d1", []string{"I1", "I2", "I4"}, false},
		{`"skipPause"`, 1, 1, "d1", []string{"I4"}, false},
		{`"pauseDoesNotWait"`, 1, 1, "d1", []string{"I4"}, false},
		{`"openBeforeStart"`, 1, 2, "d1", []string{"I4"}, false},
		{`"importWithoutFence"`, 1, 1, "d1", []string{"I2", "I4", "I6", "U1"}, false},
		{`"importWithoutProgress"`, 1, 2, "d1", []string{"I2", "U1"}, false},
		{`"importWithoutFence", "importWithoutProgress"`, 1, 2, "d1", []string{"I2", "I4", "U1"}, false},
		{`"discardWithoutFence"`, 2, 1, "d1", []string{"I2", "U1"}, false},
		{`"discardAnyEpoch"`, 2, 1, "d1", []string{"I2", "U1"}, false},
		{`"returnWithoutFence", "returnAfterRemoval"`, 2, 1, "d1", []string{"I2", "I4", "I6", "U1"}, true},
		{`"returnAfterRemoval"`, 1, 2, "d1", []string{"I6"}, true},
		{`"captureLate"`, 1, 2, "d1", []string{"U2"}, true},
		{`"discardHeld"`, 1, 1, "d1", []string{"U2"}, true},
	} {
		t.Run(c.weak, func(t *testing.T) {
			got := check(t, fmt.Sprintf(`CONSTANTS
    Cells = {a, b}
    NoCell = none
    Default = none
    Drivers = {%s}
    MaxMoves = %d
    MaxWrites = %d
    MaxDeletes = 0
    Undo = %s
    Weak = {%s}
SPECIFICATION Spec
SYMMETRY Symmetry
INVARIANTS I1 I2 I4 I6%s
PROPERTIES I3 I5 U1
CHECK_DEADLOCK FALSE
`, c.drivers, c.moves, c.writes, strings.ToUpper(fmt.Sprint(c.undo)), c.weak, map[bool]string{true: " U2"}[c.undo]))
			if !slices.Contains(c.violated, got) {
				t.Errorf("%q, want one of %v", got, c.violated)
			}
			t.Logf("%s: %s", c.weak, got)
		})
	}
}
