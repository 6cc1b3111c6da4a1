// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// faultRow is what came of one fault at one step of an operation.
type faultRow struct {
	Op, Store, Fault string
	Step             cells.Step
	// Tenants took part; AtTarget of them have cell-b for their owner in the end, the
	// others cell-a.
	Tenants, AtTarget int
	Writes            int
	Lost              int // acknowledged and not found, or found twice, or never written
	Failed            int
	Events            int // gaps and repetitions
	Others            int
	Settled           time.Duration
}

// report collects rows and writes them as tables into the file that CELL_FAULTS_OUT
// names: a section for each operation. Sections of operations that were not visited
// stay as they are.
type report struct{ rows []faultRow }

const reportHead = `<!-- Written by make faults. -->
# Faults at every step

Each run is an operation on tenants that three clients use, with one other tenant in use in each cell. The target is cell-b, the
source cell-a; of a rollout by upgrade the target is the new version. *Failed* are requests of the tenants that take part, *others failed* those of tenants in cells that were
not hurt.
`

func (r *report) write(t *testing.T) {
	path := os.Getenv("CELL_FAULTS_OUT")
	if path == "" || len(r.rows) == 0 {
		return
	}
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
		return
	}
	if err := os.WriteFile(path, []byte(r.text(string(old), time.Now())), 0o644); err != nil {
		t.Error(err)
	}
}

// text is the report, with what it has nothing of taken from an old one.
func (r *report) text(old string, now time.Time) string {
	var b strings.Builder
	b.WriteString(reportHead)
	for _, op := range operations {
		head := "\n## " + op.title + "\n"
		part := report{}
		for _, x := range r.rows {
			if x.Op == op.name {
				part.rows = append(part.rows, x)
			}
		}
		if len(part.rows) > 0 {
			fmt.Fprintf(&b, "%s\n%s, %d runs.\n", head, now.UTC().Format(time.DateOnly), len(part.rows))
			part.table(&b, "Fault", func(x faultRow) string { return x.Store + ", " + x.Fault })
			part.table(&b, "Step", func(x faultRow) string { return string(x.Step) })
			continue
		}
		if _, kept, ok := strings.Cut(old, head); ok {
			kept, _, _ = strings.Cut(kept, "\n## ")
			b.WriteString(head + strings.TrimRight(kept, "\n") + "\n")
		}
	}
	return b.String()
}

// table writes one line for each group of rows, in order of first appearance.
func (r *report) table(b *strings.Builder, title string, group func(faultRow) string) {
	var names []string
	groups := map[string][]faultRow{}
	for _, x := range r.rows {
		g := group(x)
		if groups[g] == nil {
			names = append(names, g)
		}
		groups[g] = append(groups[g], x)
	}
	fmt.Fprintf(b, "\n| %s | runs | tenants | target owns | source owns | writes acknowledged | lost | events lost | failed | others failed | settled, median | settled, longest |\n|%s\n", title, strings.Repeat("---|", 12))
	for _, name := range names {
		var sum faultRow
		var took []time.Duration
		for _, x := range groups[name] {
			sum.Tenants, sum.AtTarget, sum.Writes = sum.Tenants+x.Tenants, sum.AtTarget+x.AtTarget, sum.Writes+x.Writes
			sum.Lost, sum.Events, sum.Failed, sum.Others = sum.Lost+x.Lost, sum.Events+x.Events, sum.Failed+x.Failed, sum.Others+x.Others
			took = append(took, x.Settled)
		}
		fmt.Fprintf(b, "| %s | %d | %d | %d | %d | %d | %d | %d | %d | %d | %s | %s |\n", name, len(took), sum.Tenants, sum.AtTarget, sum.Tenants-sum.AtTarget,
			sum.Writes, sum.Lost, sum.Events, sum.Failed, sum.Others,
			load.Percentile(took, 50).Round(10*time.Millisecond), load.Percentile(took, 100).Round(10*time.Millisecond))
	}
}

// A report of some operations keeps what an older one says of the others, and counts
// what its rows say.
func TestReportKeepsTheOtherSections(t *testing.T) {
	row := func(op string, lost int) faultRow {
		return faultRow{Op: op, Store: "sqlite", Fault: "f", Step: "s", Tenants: 3, AtTarget: 2, Writes: 7, Lost: lost, Settled: time.Second}
	}
	first := (&report{rows: []faultRow{row("move", 0), row("campaign", 0)}}).text("", time.Unix(0, 0))
	second := (&report{rows: []faultRow{row("campaign", 5), row("campaign", 6), row("undo", 0)}}).text(first, time.Unix(1e9, 0))
	for text, want := range map[string][]string{
		first:  {"## A move\n\n1970-01-01, 1 runs.", "## A campaign of three moves\n\n1970-01-01", "| sqlite, f | 1 | 3 | 2 | 1 | 7 | 0 |"},
		second: {"## A move\n\n1970-01-01, 1 runs.", "## A campaign of three moves\n\n2001-09-09, 2 runs.", "| sqlite, f | 2 | 6 | 4 | 2 | 14 | 11 |", "## The undo of a move\n\n2001"},
	} {
		for _, w := range want {
			if strings.Count(text, w) < 1 {
				t.Errorf("%q is not in\n%s", w, text)
			}
		}
	}
	if n := strings.Count(second, "\n## "); n != 3 {
		t.Errorf("%d sections in\n%s", n, second)
	}
	path := filepath.Join(t.TempDir(), "faults.md")
	t.Setenv("CELL_FAULTS_OUT", path)
	(&report{rows: []faultRow{row("move", 0)}}).write(t)
	if b, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(b), reportHead) {
		t.Errorf("%v: %s", err, b)
	}
}
