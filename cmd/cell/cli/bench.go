// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) benchCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "bench", Short: "Measure a fleet as its clients see it", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.benchMoveCmd(), a.benchCampaignCmd(), a.benchCopyCmd(), a.benchCatchUpCmd(), a.benchPauseCmd())
	return c
}

func (a *app) benchMoveCmd() *cobra.Command {
	var store string
	var replicas int
	run := load.MoveRun{OtherPerCell: 2, OtherClients: 2}
	c := &cobra.Command{
		Use:   "move",
		Short: "Move a tenant back and forth under load and count what was lost",
		Long: `Start a fleet of two cells in a folder of its own, fill a tenant, and move it back
and forth while clients read and write it through the edge, a subscriber follows
its events, and other tenants are used on both cells. In the end every
acknowledged write is looked up and every event is counted.

The pause is given twice: as the driver measures it, and as the longest wait for
an answer that a client had during the cut.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := benchFlags(store, map[string]int{"rows": run.Rows, "size": run.Size, "clients": run.Clients, "moves": run.Moves, "replicas": replicas}); err != nil {
				return err
			}
			rep, err := a.benchMove(cmd.Context(), store, replicas, run)
			return benchResult(a, rep, err, rep != nil && len(rep.Moves) > 0, func(w io.Writer) error { return printMoveReport(w, store, rep) })
		},
	}
	f := c.Flags()
	f.StringVar(&store, "store", fleet.StoreSQLite, "sqlite or postgres")
	completeStore(c)
	f.IntVar(&run.Rows, "rows", 100_000, "rows of the moving tenant")
	f.IntVar(&run.Size, "size", 200, "bytes of a row's value")
	f.IntVar(&run.Clients, "clients", 16, "clients of the moving tenant")
	f.DurationVar(&run.Think, "think", 0, "pause of each client between two requests; 0 saturates the machine")
	f.Float64Var(&run.Rate, "rate", 0, "requests a second of all clients of the moving tenant together; 0 is as many as are answered")
	f.IntVar(&run.WriteShare, "writes", 50, "of a hundred requests, how many write")
	f.IntVar(&run.Moves, "moves", 20, "moves, back and forth")
	f.IntVar(&run.OtherPerCell, "others", 2, "other tenants in each cell")
	f.IntVar(&replicas, "replicas", 1, "processes of each cell")
	return c
}

// benchFlags checks what every bench is given: its store, and counts by their flags.
func benchFlags(store string, counts map[string]int) error {
	if store != fleet.StoreSQLite && store != fleet.StorePostgres {
		return usagef("--store: %q; want %s or %s", store, fleet.StoreSQLite, fleet.StorePostgres)
	}
	for name, n := range counts {
		if n < 1 {
			return usagef("--%s %d: want at least 1", name, n)
		}
	}
	return nil
}

// benchResult prints a report if there is something in it, also one that came with an
// error, and fails where it is not clean.
func benchResult(a *app, rep interface{ Clean() bool }, err error, some bool, text func(io.Writer) error) error {
	if some {
		if perr := a.print(rep, text); perr != nil {
			return perr
		}
	}
	if err == nil && !rep.Clean() {
		err = errors.New("something failed or was lost; see above")
	}
	return err
}

func completeStore(c *cobra.Command) {
	_ = c.RegisterFlagCompletionFunc("store", cobra.FixedCompletions([]string{fleet.StoreSQLite, fleet.StorePostgres}, cobra.ShellCompDirectiveNoFileComp))
}

func (a *app) benchMove(ctx context.Context, store string, replicas int, run load.MoveRun) (*load.MoveReport, error) {
	f, cl, step, end, err := a.benchFleet(ctx, store, replicas)
	if err != nil {
		return nil, err
	}
	defer end()
	run.Edge, run.Cells, run.Mover, run.OnStep = f.Info.Edge, [2]string{"cell-a", "cell-b"}, fleet.Mover{Client: cl}, step
	return run.Run(ctx)
}

// benchFleet starts a fleet of two cells in a folder of its own; end removes both.
func (a *app) benchFleet(ctx context.Context, store string, replicas int, directoryArgs ...string) (f *fleet.Fleet, cl *client.Client, step func(string), end func(), _ error) {
	dir, err := os.MkdirTemp("", "cell-bench-")
	if err != nil {
		return nil, nil, nil, nil, err
	}
	end = func() { _ = os.RemoveAll(dir) }
	if err := os.Chmod(dir, 0o755); err != nil { // Postgres runs as another user
		end()
		return nil, nil, nil, nil, err
	}
	step = a.benchStep
	cfg := fleet.Config{Name: "bench", Listen: "127.0.0.1:0", Store: store,
		Cells: []fleet.Cell{{Name: "cell-a", Replicas: replicas}, {Name: "cell-b", Replicas: replicas}}}
	if f, err = fleet.Start(ctx, cfg, fleet.Options{Dir: dir, Log: a.log, OnStep: step, DirectoryArgs: directoryArgs}); err != nil {
		end()
		return nil, nil, nil, nil, err
	}
	end = func() {
		f.Close()
		_ = os.RemoveAll(dir)
	}
	if cl, err = f.Client(); err != nil {
		end()
		return nil, nil, nil, nil, err
	}
	return f, cl, step, end, nil
}

// benchStep tells what a bench is doing.
func (a *app) benchStep(s string) {
	if !a.json {
		fmt.Fprintf(a.err, "%s  %s\n", time.Now().Format("15:04:05"), s)
	}
}

func printMoveReport(w io.Writer, store string, r *load.MoveReport) error {
	var driver, clients, slowest, cp []time.Duration
	var rate, bytes float64
	for _, m := range r.Moves {
		driver, slowest, cp = append(driver, m.Pause), append(slowest, m.Client), append(cp, m.Copy)
		clients = append(clients, m.Clients...)
		if m.Copy > 0 {
			rate += float64(m.Rows) / m.Copy.Seconds() / float64(len(r.Moves))
			bytes += float64(m.Bytes) / m.Copy.Seconds() / float64(len(r.Moves))
		}
	}
	row := func(name string, took []time.Duration) []string {
		cols := []string{name}
		for _, p := range []int{50, 95, 99, 100} {
			cols = append(cols, short(load.Percentile(took, p)))
		}
		return cols
	}
	fmt.Fprintf(w, "store %s, %d rows of %d bytes, %d clients, %d moves in %s\n", store, r.Rows, r.Size, r.Clients, len(r.Moves), short(r.Elapsed))
	if err := table(w, [][]string{
		{"", "p50", "p95", "p99", "max"},
		row("pause, as clients see it", clients),
		row("of each cut's last client", slowest),
		row("pause, as the driver does", driver),
		row("preparation", cp),
	}); err != nil {
		return err
	}
	fmt.Fprintf(w, "copy rate            %.0f rows/s, %s/s (snapshot, catch-up and first verification together)\n", rate, size(int64(bytes)))
	if err := printCuts(w, r.Moves); err != nil {
		return err
	}
	tally := func(name string, t load.Tally, p99 time.Duration) {
		fmt.Fprintf(w, "%-20s %d requests (%d writes), p99 %s: %d failed, %d lost, %d duplicated, %d phantom\n", name, t.Requests, t.Writes, short(p99), t.Failed, t.Lost, t.Duplicated, t.Phantom)
		if t.FirstFailure != "" {
			fmt.Fprintf(w, "%-20s first failure: %s\n", "", t.FirstFailure)
		}
	}
	tally("moving tenant", r.Moving, r.MovingP99)
	tally("other tenants", r.Others, r.OtherP99)
	fmt.Fprintf(w, "events               %d received, %d gaps, %d repeats, %d missing at the end, %d reconnections\n", r.Events, r.Gaps, r.Repeats, r.MissedInEnd, r.Reconnects)
	return nil
}

// printCuts shows where the pause goes.
func printCuts(w io.Writer, moves []load.Moved) error {
	var names []string
	took := map[string][]time.Duration{}
	for _, m := range moves {
		for _, s := range m.Cut {
			if took[s.Step] == nil {
				names = append(names, s.Step)
			}
			took[s.Step] = append(took[s.Step], s.Took)
		}
	}
	rows := [][]string{append([]string{"step of the cut"}, names...), {"p50"}, {"max"}}
	for _, n := range names {
		rows[1] = append(rows[1], short(load.Percentile(took[n], 50)))
		rows[2] = append(rows[2], short(load.Percentile(took[n], 100)))
	}
	return table(w, rows)
}
