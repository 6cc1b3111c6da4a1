// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

// The actions of traces are those of the model.
func TestCampaignActionsAreTheModels(t *testing.T) {
	b, err := os.ReadFile("../cells/spec/Campaign.tla")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		directory.ActionRun, directory.ActionPause, directory.ActionResume, directory.ActionAbort, directory.ActionRetry, directory.ActionTake,
		directory.ActionBegin, directory.ActionRecord, directory.ActionUnfit, directory.ActionResult, directory.ActionFinish,
	} {
		if !regexp.MustCompile(`(?m)^` + name + `(\([\w, ]+\))? +==`).Match(b) {
			t.Errorf("the model has no action %s", name)
		}
	}
}

// tracedCampaigns runs a campaign that stops at a failure and is resumed, and one
// that is aborted, and returns the lines of the trace.
func tracedCampaigns(t *testing.T) []map[string]any {
	t.Helper()
	s := newState(t)
	d := s.start(t, nil)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.crowd("a", 0, 4)
	move := func(id cells.TenantID) api.PlannedMove { return api.PlannedMove{Tenant: id, From: "a", To: "b"} }
	c := d.planned(api.CampaignRequest{Moves: []api.PlannedMove{move("t00"), move("t01"), move("t02")}, Settings: api.CampaignSettings{Concurrency: 1}})
	d.jurisdiction("t01", "eu")
	d.run(c.ID)
	d.untilCampaign(c.ID, "stopped", func(c *api.Campaign) bool { return c.State == api.CampaignPaused && c.Counts.Running == 0 })
	d.jurisdiction("t01", "")
	if _, err := d.cl.ResumeCampaign(ctxOf(t), c.ID, api.CampaignOrder{Actor: "bob", Retry: true}); err != nil {
		t.Fatal(err)
	}
	d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone && c.Counts.Moved == 3 })
	c = d.planned(api.CampaignRequest{Moves: []api.PlannedMove{move("t03")}})
	if _, err := d.cl.AbortCampaign(ctxOf(t), c.ID, api.CampaignOrder{Actor: "bob"}); err != nil {
		t.Fatal(err)
	}
	d.untilCampaign(c.ID, "aborted", func(c *api.Campaign) bool { return c.State == api.CampaignAborted })
	rep, err := s.traced()
	if err != nil {
		t.Fatal(err)
	}
	for action, want := range map[string]int{directory.ActionRun: 1, directory.ActionPause: 1, directory.ActionResume: 1, directory.ActionAbort: 1, directory.ActionRetry: 1,
		directory.ActionBegin: 4, directory.ActionRecord: 3, directory.ActionUnfit: 1, directory.ActionResult: 3, directory.ActionFinish: 3} {
		if rep.CampaignActions[action] != want {
			t.Errorf("%d of %s, want %d", rep.CampaignActions[action], action, want)
		}
	}
	if rep.Campaigns != 2 || rep.CampaignActions[directory.ActionTake] < 2 || rep.CampaignGaps != 0 || rep.Others == 0 || rep.Actions[cells.ActionCommit] != 3 {
		t.Errorf("%+v", rep)
	}
	return s.lines(t)
}

// lines are those of the trace.
func (s *state) lines(t *testing.T) []map[string]any {
	t.Helper()
	var out []map[string]any
	for line := range strings.SplitSeq(strings.TrimSpace(s.trace.String()), "\n") {
		var l map[string]any
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatal(err)
		}
		out = append(out, l)
	}
	return out
}

// mutation is a change of a trace, and what the checker must say of it.
type mutation struct {
	want string
	f    func([]map[string]any) []map[string]any
}

// mutations checks that a trace is good, and that each of its changes is noticed.
func mutations(t *testing.T, whole []map[string]any, all map[string]mutation) {
	text := func(lines []map[string]any) string {
		var b strings.Builder
		for _, l := range lines {
			j, err := json.Marshal(l)
			if err != nil {
				t.Fatal(err)
			}
			b.Write(append(j, '\n'))
		}
		return b.String()
	}
	for name, tc := range all {
		t.Run(name, func(t *testing.T) {
			var copied []map[string]any
			b, err := json.Marshal(whole)
			if err == nil {
				err = json.Unmarshal(b, &copied)
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := directory.CheckTrace(strings.NewReader(text(copied))); err != nil {
				t.Fatalf("before the change: %v", err)
			}
			_, err = directory.CheckTrace(strings.NewReader(text(tc.f(copied))))
			if !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// A trace that is changed is noticed.
func TestCampaignTraceMutations(t *testing.T) {
	whole := tracedCampaigns(t)
	// nth is the number of the nth line of a campaign's action.
	nth := func(action string, n int, with ...string) int {
		for i, l := range whole {
			if l["campaign"] == nil || l["action"] != action || len(with) == 2 && l[with[0]] != with[1] {
				continue
			}
			if n--; n == 0 {
				return i
			}
		}
		t.Fatalf("no %s", action)
		return 0
	}
	alter := func(i int, field string, v any) func([]map[string]any) []map[string]any {
		return func(ls []map[string]any) []map[string]any {
			ls[i][field] = v
			return ls
		}
	}
	again := func(i int, change func(map[string]any)) func([]map[string]any) []map[string]any {
		return func(ls []map[string]any) []map[string]any {
			l := map[string]any{}
			for k, v := range ls[i] {
				l[k] = v
			}
			change(l)
			return append(ls, l)
		}
	}
	moved := nth(directory.ActionResult, 1, "item_to", "MOVED")
	mutations(t, whole, map[string]mutation{
		"a move that was committed fails": {"was committed", alter(moved, "item_to", "FAILED")},
		"moved without a commit":          {"was not committed", func(ls []map[string]any) []map[string]any { return rolledBack(ls, ls[moved]["move"]) }},
		"moved without a move":            {"without a move", alter(nth(directory.ActionUnfit, 1), "item_to", "MOVED")},
		"recorded twice":                  {"recorded 2 times", again(nth(directory.ActionRecord, 1), func(map[string]any) {})},
		"recorded after it was given up":  {"given up", again(nth(directory.ActionRecord, 1), func(l map[string]any) { l["move"] = whole[nth(directory.ActionUnfit, 1)]["move"] })},
		"begun by somebody else":          {"the driver is", alter(nth(directory.ActionBegin, 1), "by", "d2/X")},
		"begun while it is paused":        {"in a campaign that is PAUSED", alter(nth(directory.ActionBegin, 2), "from", "PAUSED")},
		"the same attempt again":          {"as attempt 1 after 1", alter(nth(directory.ActionBegin, 1), "before", 1)},
		"a result of another attempt":     {"attempt", alter(moved, "attempt", 7)},
		"an item that was something else": {"finds item", alter(moved, "item_from", "PENDING")},
		"a campaign that was another":     {"finds the campaign", alter(nth(directory.ActionPause, 1), "from", "ABORTING")},
		"two transactions of one version": {"written twice", again(nth(directory.ActionBegin, 1), func(map[string]any) {})},
		"over while something runs":       {"with &{", alter(nth(directory.ActionFinish, 1, "to", "DONE"), "counts", map[string]int{"running": 1})},
		"done after it was aborted":       {"DONE after ABORTING", alter(nth(directory.ActionFinish, 1, "to", "DONE"), "from", "ABORTING")},
		"a state that nothing leads to":   {"by Other", alter(nth(directory.ActionRun, 1), "action", "Other")},
		"a route that is not the protocol": {"no row asked", func(ls []map[string]any) []map[string]any {
			return append(ls, map[string]any{"tenant": "t00", "action": "OpenFence", "cell": "a", "epoch": 9})
		}},
	})
	if _, err := directory.CheckTrace(strings.NewReader("{\"campaign\":7}\n")); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a broken line: %v", err)
	}
}

// rolledBack makes the decision of a move one for its source.
func rolledBack(ls []map[string]any, move any) []map[string]any {
	for _, l := range ls {
		if r, ok := l["row"].(map[string]any); ok && r["move"] == move && r["state"] == "COMMITTING" {
			r["cell"] = r["source"]
		}
	}
	return ls
}

// The trace of a directory that cannot be written to costs it nothing.
func TestTraceThatCannotBeWritten(t *testing.T) {
	s := newState(t)
	d := s.start(t, func(c *directory.Config) { c.Trace = failingWriter{} })
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.crowd("a", 0, 1)
	c := d.planned(api.CampaignRequest{Moves: []api.PlannedMove{{Tenant: "t00", From: "a", To: "b"}}})
	d.run(c.ID)
	d.untilCampaign(c.ID, "done", func(c *api.Campaign) bool { return c.State == api.CampaignDone && c.Counts.Moved == 1 })
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("full") }
