// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) moveCmd() *cobra.Command {
	var req api.MoveRequest
	var t throttle
	var to string
	var noWait bool
	var window time.Duration
	var c *cobra.Command
	c = &cobra.Command{
		Use:   "move TENANT --to CELL",
		Short: "Move a tenant to another cell while it is in use",
		Long: `Move a tenant: copy its rows while it is served where it is, hold its requests for
the moment of the cut, and serve it from the other cell. Nothing is refused and
nothing is lost. Interrupting the command does not stop the move; follow it with
cell moves show, give it up (before the cut is decided) with cell moves rollback.

After the cut the cell that the tenant came from keeps its rows and receives what is
written since, until the undo window closes: cell move undo takes the move back in
that time, cell move close-window ends it early. Another move closes it, too.

A cell that is closed, full by any of its limits or out of the tenant's jurisdiction
is refused, also with --force. --dry-run shows what the move would do and what
stands in its way.`,
		Example: "  cell move acme --to cell-b\n  cell move acme --to cell-b --dry-run",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			req.Tenant, req.To, req.Actor, req.Throttle = cells.TenantID(args[0]), cells.CellID(to), actor(), t.get()
			if c.Flags().Changed("undo-window") {
				req.UndoWindow = &window
			}
			if req.DryRun {
				return a.dryRun(ctx, cl, req)
			}
			return a.runMove(ctx, cl, req, noWait)
		}),
	}
	f := c.Flags()
	f.StringVar(&to, "to", "", "the cell to move to")
	f.BoolVar(&req.DryRun, "dry-run", false, "show the preflight, change nothing")
	f.BoolVar(&req.Force, "force", false, "move although the tenant's unavailability budget would be exceeded; recorded with your name")
	throttleFlags(f, &t)
	f.DurationVar(&window, "undo-window", 0, "for how long the move can be undone after its commit, 0 is not at all (default: the directory's, 24h)")
	f.BoolVar(&noWait, "no-wait", false, "start the move and return")
	f.StringVar(&req.OperationID, "operation-id", "", "makes a retry from a script safe: the same id answers the same move")
	_ = c.MarkFlagRequired("to")
	_ = c.RegisterFlagCompletionFunc("to", a.completeCells)
	c.AddCommand(a.moveUndoCmd(), a.moveCloseWindowCmd())
	return c
}

// runMove asks for a move, or for an undo, and follows it unless told not to.
func (a *app) runMove(ctx context.Context, cl *client.Client, req api.MoveRequest, noWait bool) error {
	m, err := cl.Move(ctx, req)
	if err != nil {
		return err
	}
	if noWait {
		if err := a.print(m, func(w io.Writer) error { return printMove(w, m) }); err != nil {
			return err
		}
		return ended(&m)
	}
	return a.followMove(ctx, cl, m)
}

// refused is the error of something that was refused after it was taken, or would be. A
// directory that does not say the code refuses because of what it found.
func refused(code cells.Code, tenant cells.TenantID, detail string) error {
	if code == "" {
		code = cells.CodeConflict
	}
	return &cells.Answer{Code: code, Tenant: tenant, Detail: detail}
}

// ended is the error of a move that is over and has not brought its tenant to the target.
func ended(m *api.Move) error {
	switch {
	case m.State == api.MoveRefused:
		return refused(m.Code, m.Tenant, fmt.Sprintf("move %s was refused: %s", m.ID, m.Reason))
	case m.State != api.MoveRolledBack:
		return nil
	case m.Code != "":
		return fmt.Errorf("%w: %w", cells.ErrRolledBack, refused(m.Code, m.Tenant, m.Reason))
	}
	return fmt.Errorf("%w: %s", cells.ErrRolledBack, m.Reason)
}

// dryRun shows what a move, or an undo, would do and what stands in its way; it fails
// if it would be refused.
func (a *app) dryRun(ctx context.Context, cl *client.Client, req api.MoveRequest) error {
	req.DryRun = true
	d, err := cl.DryRun(ctx, req)
	if err != nil {
		return err
	}
	if err := a.print(d, func(w io.Writer) error { return printDryRun(w, d) }); err != nil {
		return err
	}
	if d.Allowed {
		return nil
	}
	what := "the move would be refused"
	if req.Undo {
		what = "the undo would be refused"
	}
	return refused(d.Code, d.Tenant, what)
}

func printDryRun(w io.Writer, d api.DryRun) error {
	fmt.Fprintf(w, "%s: %s -> %s\n  rows     %d (%s)\n  copy     about %s\n  pause    about %s\n", d.Tenant, d.From, d.To,
		d.Preflight.Rows, size(d.Preflight.Bytes), short(d.Preflight.Copy), short(d.Preflight.Pause))
	for _, f := range d.Preflight.Findings {
		kind := f.Severity()
		if f.Blocking {
			kind = "BLOCKED"
		}
		fmt.Fprintf(w, "  %-8s %s %s%s: %s\n           %s\n", kind, f.Code, f.Cell, table2(f.Table), f.Message, f.Fix)
	}
	for _, r := range d.Refusals {
		fmt.Fprintf(w, "  REFUSED  %s\n", r)
	}
	if d.Allowed {
		fmt.Fprintln(w, "nothing stands in the way")
	}
	return nil
}

func table2(t string) string {
	if t == "" {
		return ""
	}
	return " " + t
}

func size(b int64) string {
	switch {
	case b >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(b)/(1<<30))
	case b >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(b)/(1<<20))
	default:
		return fmt.Sprintf("%.1f KiB", float64(b)/(1<<10))
	}
}

// followMove shows a move until the winner serves and the loser's rows are gone.
func (a *app) followMove(ctx context.Context, cl *client.Client, m api.Move) error {
	show := a.moveView()
	last := m
	err := cl.WatchMove(ctx, m.ID, func(now api.Move) error {
		last = now
		show.update(now)
		return nil
	})
	show.close()
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; the move goes on: cell moves show %s", m.ID)
		}
		return err
	}
	if err := a.print(last, func(w io.Writer) error { return printMove(w, last) }); err != nil {
		return err
	}
	return ended(&last)
}

// moveView draws phases and a bar on a terminal, plain lines elsewhere, nothing
// with --json.
type moveView struct {
	a     *app
	bars  *mpb.Progress
	bar   *mpb.Bar
	phase string
	step  string
	// waiting is what the running step was last said to wait for.
	waiting string
	label   string
}

func (a *app) moveView() *moveView {
	v := &moveView{a: a}
	if f, ok := a.err.(*os.File); ok && isTerminal(f) && !a.json {
		v.bars = mpb.New(mpb.WithOutput(f), mpb.WithWidth(40), mpb.WithAutoRefresh())
	}
	return v
}

func (v *moveView) update(m api.Move) {
	if v.a.json {
		return
	}
	if p := m.Progress; p != nil && p.Waiting != "" {
		if v.waiting != p.Waiting {
			v.waiting = p.Waiting
			v.say("waiting: " + p.Waiting)
		}
		return
	}
	v.waiting = ""
	if p := m.Progress; p != nil && v.bars != nil && p.Total > 0 {
		if v.phase != p.Phase {
			v.finishBar()
			v.phase = p.Phase
			v.bar = v.bars.AddBar(p.Total, mpb.BarRemoveOnComplete(),
				mpb.PrependDecorators(decor.Name(fmt.Sprintf("%-9s", p.Phase)), decor.CountersNoUnit("%d/%d rows")),
				mpb.AppendDecorators(decor.Percentage(), decor.Any(func(decor.Statistics) string { return v.label })))
		}
		v.label = ""
		if p.Left > 0 {
			v.label = "  " + short(p.Left) + " left"
		}
		v.bar.SetTotal(max(p.Total, p.Done), false)
		v.bar.SetCurrent(p.Done)
		return
	}
	if m.Step != v.step {
		v.finishBar()
		v.step = m.Step
		extra := ""
		if m.Step == string(cells.StepPrepare) && m.Predicted > 0 {
			extra = ", predicted pause " + short(m.Predicted)
		}
		if m.Pause > 0 && m.Served() {
			extra = ", pause " + short(m.Pause)
		}
		v.say(fmt.Sprintf("%-10s %s%s", m.State, m.Step, extra))
	}
}

// say writes a line above the bar.
func (v *moveView) say(text string) {
	line := fmt.Sprintf("%s  %s\n", time.Now().Format("15:04:05.000"), text)
	if v.bars != nil {
		_, _ = v.bars.Write([]byte(line))
	} else {
		fmt.Fprint(v.a.err, line)
	}
}

func (v *moveView) finishBar() {
	if v.bar != nil {
		v.bar.SetTotal(-1, true)
		v.bar = nil
	}
	v.phase = ""
}

func (v *moveView) close() {
	v.finishBar()
	if v.bars != nil {
		v.bars.Wait()
	}
}

func printMove(w io.Writer, m api.Move) error {
	fmt.Fprintf(w, "%s: %s %s -> %s, %s\n", m.ID, m.Tenant, m.From, m.To, m.State)
	if m.Reason != "" {
		fmt.Fprintf(w, "  reason     %s\n", m.Reason)
	}
	if m.Error != "" && !m.State.Final() {
		fmt.Fprintf(w, "  last error %s (attempt %d; the directory goes on trying)\n", m.Error, m.Attempts)
	}
	if m.Served() && m.State != api.MoveRolledBack && m.State != api.MoveRefused {
		fmt.Fprintf(w, "  pause      %s (predicted %s)%s\n", short(m.Pause), short(m.Predicted), sawText(m.Seen))
	}
	if m.Rows > 0 {
		fmt.Fprintf(w, "  copied     %d rows, %s\n", m.Rows, size(m.Bytes))
	}
	if m.Group != "" {
		fmt.Fprintf(w, "  group      %s (shares slots and snapshots with the campaign's other moves from %s to %s)\n", m.Group, m.From, m.To)
	}
	if m.Undoes != "" {
		fmt.Fprintf(w, "  undoes     %s\n", m.Undoes)
	}
	if m.UndoneBy != "" {
		fmt.Fprintf(w, "  undone by  %s\n", m.UndoneBy)
	}
	for _, r := range m.Residue {
		if r.Held() {
			fmt.Fprintf(w, "  can be undone until %s: %s keeps its rows (cell move undo %s)\n", r.Until.Local().Format(time.DateTime), r.Cell, m.Tenant)
			continue
		}
		fmt.Fprintf(w, "  to remove  rows in %s (fence closed at %d)\n", r.Cell, r.Epoch)
	}
	return nil
}

// atLeastOne refuses a flag's value below 1.
func atLeastOne(name string, n int) error {
	if n < 1 {
		return usagef("--%s %d: want at least 1", name, n)
	}
	return nil
}

func (a *app) movesCmd() *cobra.Command {
	var q client.MoveQuery
	var tenant, state string
	c := &cobra.Command{
		Use: "moves", Short: "List moves, newest first", Args: cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return atLeastOne("limit", q.Limit) },
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			q.Tenant, q.State = cells.TenantID(tenant), api.MoveState(strings.ToUpper(state))
			list, err := cl.Moves(ctx, q)
			if err != nil {
				return err
			}
			return a.print(list.Moves, func(w io.Writer) error {
				rows := [][]string{{"MOVE", "TENANT", "FROM", "TO", "STATE", "STEP", "PREDICTED", "PAUSE", "CLIENTS", "ROWS", "BY", "STARTED"}}
				for _, m := range list.Moves {
					rows = append(rows, []string{string(m.ID), string(m.Tenant), dash(string(m.From)), string(m.To), string(m.State), m.Step,
						short(m.Predicted), short(m.Pause), sawShort(m.Seen), fmt.Sprint(m.Rows), m.Actor, ago(m.CreatedAt)})
				}
				return table(w, rows)
			})
		}),
	}
	c.Flags().StringVar(&tenant, "tenant", "", "only this tenant's")
	c.Flags().StringVar(&state, "state", "", "only those in this state: preparing, cutting, committed, cleaning, done, rolled_back, refused")
	c.Flags().IntVar(&q.Limit, "limit", 50, "how many at most")
	c.AddCommand(a.movesShowCmd(), a.movesVerifyCmd(), a.movesRollbackCmd())
	return c
}

func (a *app) movesRollbackCmd() *cobra.Command {
	var reason string
	var yes bool
	c := &cobra.Command{
		Use: "rollback MOVE", Short: "Give a move up before its cut is decided; the source serves on", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeMoves,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if err := a.confirm(yes, "Give up move "+args[0]+"?"); err != nil {
				return err
			}
			m, err := cl.Rollback(ctx, cells.MoveID(args[0]), api.RollbackRequest{Reason: reason, Actor: actor()})
			if err != nil {
				return err
			}
			return a.print(m, func(w io.Writer) error { return printMove(w, m) })
		}),
	}
	c.Flags().StringVar(&reason, "reason", "", "why; kept with the move")
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}

// completeMoves offers the newest moves.
func (a *app) completeMoves(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(cmd, prefix, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, err := cl.Moves(ctx, client.MoveQuery{Limit: 100})
		return namesOf(list.Moves, err, func(m *api.Move) cells.MoveID { return m.ID })
	})
}

// pairValue writes a value of a JSON document for people.
func pairValue(v any) string {
	list, ok := v.([]any)
	if !ok {
		return fmt.Sprint(v)
	}
	out := make([]string, len(list))
	for i, x := range list {
		out[i] = fmt.Sprint(x)
	}
	return dash(strings.Join(out, ", "))
}

func printPairs(w io.Writer, doc map[string]any) error {
	keys := make([]string, 0, len(doc))
	for k := range doc {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	var rows [][]string
	for _, k := range keys {
		rows = append(rows, []string{k, pairValue(doc[k])})
	}
	return table(w, rows)
}
