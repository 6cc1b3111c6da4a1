// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member/vitals"
)

var rewrite = flag.Bool("rewrite", false, "write the scripts' outputs again")

// Each script in testdata is a rollout: a line that begins with ">" is what the line
// before has made of it.
//
//	new move|upgrade PERCENT,PERCENT UNITS      a record that is started
//	units WAVE STATE=N ...                      the wave's units are in these states
//	count CANARY-REQUESTS CANARY-ERRORS BASELINE-REQUESTS   what both sides have counted since
//	after DURATION                              time passes
//	EVENT [keep] [again] [REASON...]            something happens
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			s := &script{t: t}
			for line := range strings.Lines(string(text)) {
				line = strings.TrimSpace(line)
				switch {
				case strings.HasPrefix(line, ">"):
				case line == "", strings.HasPrefix(line, "#"):
					fmt.Fprintln(&out, line)
				default:
					fmt.Fprintln(&out, line)
					if said := s.do(strings.Fields(line)); said != "" {
						fmt.Fprintln(&out, "> "+said)
					}
				}
			}
			if *rewrite {
				if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if out.String() != string(text) {
				t.Errorf("%s says otherwise:\n%s", file, out.String())
			}
		})
	}
}

type script struct {
	t                *testing.T
	r                api.Rollout
	at               time.Time
	canary, baseline vitals.Counts
}

func (s *script) number(text string) int64 {
	s.t.Helper()
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *script) do(f []string) string {
	s.t.Helper()
	switch f[0] {
	case "new":
		set := api.RolloutSettings{Version: "v2", From: "v1", By: f[1], Bake: 10 * time.Minute, Patience: 10 * time.Minute, Health: api.HealthRule{LatencyRatio: -1, Budget: "500", MeasuredBy: []string{"edge"}}}
		for _, p := range strings.Split(f[2], ",") {
			set.Waves = append(set.Waves, float64(s.number(p)))
		}
		if err := set.Normalize(); err != nil {
			s.t.Fatal(err)
		}
		var units []api.RolloutUnit
		for i := range s.number(f[3]) {
			units = append(units, api.RolloutUnit{Unit: fmt.Sprint(i)})
		}
		s.r, s.at = api.Rollout{ID: "ro", Settings: set, Old: []cells.CellID{"old"}, New: []cells.CellID{"new"}}, time.Unix(0, 0).UTC()
		_, s.r.Waves = rollout.Waves(&set, units)
		return s.event(rollout.Event{Kind: rollout.Start})
	case "units":
		c := &s.r.Waves[s.number(f[1])-1].Counts
		*c = api.UnitCounts{}
		for _, x := range f[2:] {
			state, n, _ := strings.Cut(x, "=")
			*c.Of(api.UnitState(strings.ToUpper(state))) = s.number(n)
			c.Total += s.number(n)
		}
		return ""
	case "count":
		n := s.number(f[1])
		s.canary = s.canary.Plus(vitals.Counts{Requests: n, Failed: s.number(f[2])})
		s.baseline = s.baseline.Plus(vitals.Counts{Requests: s.number(f[3])})
		return ""
	case "after":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			s.t.Fatal(err)
		}
		s.at = s.at.Add(d)
		return ""
	}
	ev := rollout.Event{Kind: rollout.Kind(f[0]), Actor: "bob", Canary: []cells.CellID{"new"}, Baseline: []cells.CellID{"old"}}
	rest := f[1:]
	for len(rest) > 0 && (rest[0] == "keep" || rest[0] == "again") {
		ev.Keep, ev.Again = ev.Keep || rest[0] == "keep", ev.Again || rest[0] == "again"
		rest = rest[1:]
	}
	ev.Reason = strings.Join(rest, " ")
	return s.event(ev)
}

func (s *script) event(ev rollout.Event) string {
	ev.At = s.at
	ev.Totals = rollout.Totals{"edge": {"new": s.canary, "old": s.baseline}}
	r, err := rollout.Next(s.r, ev)
	if err != nil {
		return "error: " + err.Error()
	}
	s.r = r
	out := fmt.Sprintf("%s wave=%d", r.State, r.Wave)
	for _, x := range []struct {
		on   bool
		text string
	}{{r.Paused, "paused"}, {r.Bad, "bad"}, {r.Kept, "kept"}, {r.ReturnFrom > 0, fmt.Sprintf("from=%d", r.ReturnFrom)}, {r.Campaign != "", "campaign=" + string(r.Campaign)}, {r.Back, "back"}, {r.Drop, "drop"},
		{r.Reference != nil, "reference"}, {r.Trouble != "", "trouble=" + strconv.Quote(r.Trouble)}, {r.Reason != "", "reason=" + strconv.Quote(r.Reason)}} {
		if x.on {
			out += " " + x.text
		}
	}
	return out
}
