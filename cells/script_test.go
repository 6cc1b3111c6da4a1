// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts print into testdata/scripts")

// A script is a text file of steps. A step is lines of commands, a line of four
// dashes, and what the commands print, up to an empty line. Lines that begin
// with # are kept. Run with -rewrite after a change and read the difference.

// command is one line of a script: a name, plain arguments and key=value ones.
type command struct {
	line string
	name string
	args []string
	kv   map[string]string
}

func parseCommand(line string) command {
	c := command{line: line, kv: map[string]string{}}
	for i, w := range strings.Fields(line) {
		k, v, ok := strings.Cut(w, "=")
		switch {
		case i == 0:
			c.name = w
		case ok:
			c.kv[k] = v
		default:
			c.args = append(c.args, w)
		}
	}
	return c
}

func (c command) arg(i int) string {
	if i < len(c.args) {
		return c.args[i]
	}
	return ""
}

func (c command) num(t testing.TB, key string) uint64 {
	v, ok := c.kv[key]
	if !ok {
		return 0
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", c.line, err)
	}
	return n
}

// runScripts runs each file that matches the pattern.
func runScripts(t *testing.T, pattern string, run func(t *testing.T, content string) string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", "scripts", pattern))
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts %s: %v", pattern, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := run(t, string(content))
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(content) {
				t.Errorf("%s prints something else (read it, then run with -rewrite):\n%s", file, firstDifference(string(content), got))
			}
		})
	}
}

func runScript(t *testing.T, content string, do func(command) string) string {
	var out, printed bytes.Buffer
	inOutput := false
	flush := func() {
		if inOutput {
			out.Write(printed.Bytes())
			printed.Reset()
			inOutput = false
		}
	}
	lines := strings.Split(strings.TrimRight(content, "\n"), "\n")
	for _, line := range lines {
		switch {
		case inOutput && strings.TrimSpace(line) != "":
			continue // the expected output: what is printed takes its place
		case strings.TrimSpace(line) == "":
			flush()
			out.WriteString("\n")
		case line == "----":
			inOutput = true
			out.WriteString(line + "\n")
		case strings.HasPrefix(line, "#"):
			out.WriteString(line + "\n")
		default:
			out.WriteString(line + "\n")
			printed.WriteString("> " + line + "\n")
			for l := range strings.Lines(do(parseCommand(line))) {
				if strings.TrimSpace(l) == "" {
					t.Fatalf("%q prints an empty line", line)
				}
				printed.WriteString(strings.TrimRight(l, "\n") + "\n")
			}
		}
	}
	flush()
	return out.String()
}

func firstDifference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range g {
		if i >= len(w) || w[i] != g[i] {
			ww := "(end)"
			if i < len(w) {
				ww = w[i]
			}
			return fmt.Sprintf("line %d\n  file:    %s\n  printed: %s", i+1, ww, g[i])
		}
	}
	return fmt.Sprintf("line %d: the file goes on", len(g)+1)
}

// showRoute prints everything of a row that the protocol decides.
func showRoute(r TenantRoute) string {
	if r.State == 0 {
		return "ABSENT"
	}
	s := fmt.Sprintf("%s(%s,%d)", r.State, r.CellID, r.Epoch)
	if r.Floor != r.Epoch {
		s += fmt.Sprintf(" floor=%d", r.Floor)
	}
	if r.MoveID != "" {
		s += fmt.Sprintf(" move=%s:%s->%s base=%d", r.MoveID, r.SourceCell, r.TargetCell, r.Base)
	}
	if r.Undoes != "" {
		s += " undoes=" + string(r.Undoes)
	}
	if r.UndoWindow > 0 {
		s += fmt.Sprintf(" window=%v", r.UndoWindow)
	}
	if r.EventMark != 0 {
		s += fmt.Sprintf(" event-mark=%d", r.EventMark)
	}
	if r.DataMark != "" {
		s += " data-mark=" + r.DataMark
	}
	for _, e := range r.Residue {
		s += fmt.Sprintf(" residue=%s@%d:%s", e.Cell, e.Epoch, e.Move)
		if e.Held() {
			s += "(held, from " + string(e.Back) + ")"
		} else if e.Back != "" {
			s += "(from " + string(e.Back) + ")"
		}
	}
	if r.OperationID != "" {
		s += " operation=" + r.OperationID
	}
	if r.Reason != "" {
		s += fmt.Sprintf(" reason=%q", r.Reason)
	}
	return maskRandom(s)
}

// TestNextScripts replays testdata/scripts/next_*.txt: each command is an event,
// given to the row that the one before left.
func TestNextScripts(t *testing.T) {
	kinds := map[string]EventKind{}
	for k := EventClaim; int(k) < len(eventNames); k++ {
		kinds[k.String()] = k
	}
	runScripts(t, "next_*.txt", func(t *testing.T, content string) string {
		var row TenantRoute
		saved := map[string]TenantRoute{}
		events := 0
		return runScript(t, content, func(c command) string {
			switch c.name {
			case "save":
				saved[c.arg(0)] = row
				return ""
			case "load":
				r, ok := saved[c.arg(0)]
				if !ok {
					t.Fatalf("%s: nothing saved", c.line)
				}
				row = r
				return showRoute(row)
			case "effects":
				return showEffects(Effects(row))
			}
			events++
			k, ok := kinds[c.name]
			if !ok {
				t.Fatalf("unknown event %q", c.line)
			}
			ev := Event{Kind: k, Tenant: "t", Move: MoveID(c.kv["move"]), Cell: CellID(c.kv["cell"]), From: CellID(c.kv["from"]),
				Fallback: CellID(c.kv["fallback"]), Epoch: Epoch(c.num(t, "epoch")), EventMark: EventSeq(c.num(t, "event-mark")),
				DataMark: c.kv["data-mark"], OwnsData: c.kv["owns-data"] == "yes", OperationID: c.kv["operation"],
				Reason: c.kv["reason"], Stamp: strconv.Itoa(events)}
			if d := c.kv["deadline"]; d != "" {
				s, err := time.ParseDuration(d)
				if err != nil {
					t.Fatal(err)
				}
				ev.Deadline = time.Unix(0, 0).Add(s)
			}
			ev.Undoes = MoveID(c.kv["undoes"])
			if d := c.kv["window"]; d != "" {
				w, err := time.ParseDuration(d)
				if err != nil {
					t.Fatal(err)
				}
				ev.UndoWindow = w
			}
			next, effects, err := Next(row, ev)
			if err != nil {
				return "refused: " + err.Error()
			}
			s := showRoute(next) + "\n"
			if next.Stamp != ev.Stamp {
				s = "unchanged " + s
			}
			row = next
			return s + showEffects(effects)
		})
	})
}

func showEffects(es []Effect) string {
	var b strings.Builder
	for _, e := range es {
		fmt.Fprintf(&b, "  %s\n", maskRandom(e.String()))
	}
	return b.String()
}
