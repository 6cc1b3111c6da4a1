// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

func printRollout(w io.Writer, r *api.Rollout) error {
	id := string(r.ID)
	if id == "" {
		id = "(not started)"
	}
	s := &r.Settings
	name := ""
	if r.Name != "" {
		name = " " + r.Name
	}
	fmt.Fprintf(w, "%s %s%s, from %s to %s by %s, by %s\n", id, stateOf(r), name, dash(s.From), s.Version, s.By, r.Actor)
	if r.Reason != "" {
		fmt.Fprintf(w, "  reason     %s\n", r.Reason)
	}
	if r.Trouble != "" {
		fmt.Fprintf(w, "  not yet    %s\n", r.Trouble)
	}
	fmt.Fprintf(w, "  cells      %s", names(r.Old))
	if len(r.New) > 0 {
		fmt.Fprintf(w, " -> %s", names(r.New))
	}
	fmt.Fprintln(w)
	for i := range r.Waves {
		x := &r.Waves[i]
		mark := " "
		if i+1 == r.Wave {
			mark = "*"
		}
		fmt.Fprintf(w, "  wave %d%s    %g%%, %d%s", i+1, mark, x.Percent, x.Counts.Total, unitCounts(&x.Counts))
		if x.Verdict != nil {
			fmt.Fprintf(w, "; %s", x.Verdict.Health)
		}
		fmt.Fprintln(w)
	}
	if r.Moves != nil {
		fmt.Fprintf(w, "  moves      %d of %d, %d running, %d failed (campaign %s)\n", r.Moves.Finished(), r.Moves.Total, r.Moves.Running, r.Moves.Failed, r.Campaign)
	}
	if r.State == api.RolloutBaking {
		fmt.Fprintf(w, "  bakes      for %s, %s left\n", short(s.Bake), short(r.BakeLeft.Round(time.Second)))
	}
	if err := printVerdict(w, "now", r.Now); err != nil {
		return err
	}
	return printVerdict(w, "decided", r.Verdict)
}

func names(list []cells.CellID) string {
	var out []string
	for _, c := range list {
		out = append(out, string(c))
	}
	return strings.Join(out, ", ")
}

// unitCounts lists what there is of the states.
func unitCounts(c *api.UnitCounts) string {
	s := ""
	for _, st := range api.UnitStates {
		if n := *c.Of(st); n > 0 {
			s += fmt.Sprintf(", %d %s", n, strings.ToLower(string(st)))
		}
	}
	return s
}

func printVerdict(w io.Writer, what string, v *api.Verdict) error {
	if v == nil {
		return nil
	}
	fmt.Fprintf(w, "  %-9s  %s, of %s\n", what, v.Health, short(v.At.Sub(v.Since).Round(time.Second)))
	for _, r := range v.Reasons {
		fmt.Fprintf(w, "    %s\n", r)
	}
	for i := range v.Measured {
		if m := &v.Measured[i]; m.Reference != "" {
			fmt.Fprintf(w, "    %s: the old version as it was measured %s\n", m.By, m.Reference)
		}
	}
	return nil
}

func printUnits(w io.Writer, list []api.RolloutUnit, total int64) error {
	rows := [][]string{{"#", "WAVE", "UNIT", "HOME", "STATE", "REASON"}}
	for i := range list {
		u := &list[i]
		rows = append(rows, []string{fmt.Sprint(u.Pos), fmt.Sprint(u.Wave), u.Unit, dash(u.Home), string(u.State), dash(u.Reason)})
	}
	if more := total - int64(len(list)); more > 0 {
		rows = append(rows, []string{fmt.Sprintf("and %d more", more), "", "", "", "", ""})
	}
	return table(w, rows)
}
