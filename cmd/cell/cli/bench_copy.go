// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/cmd/cell/rows"
)

func (a *app) benchCopyCmd() *cobra.Command {
	b := rows.Bench{}
	c := &cobra.Command{
		Use:   "copy",
		Short: "Copy a tenant's rows between two Postgres databases, beside psql's COPY",
		Long: `Make a Postgres cluster in a folder of its own with two databases, fill a tenant
among others, and get its rows over again and again: by the agents of two cells, which
talk over mutual TLS, and by one psql's binary COPY piped into another's. Both sides
alternate. A move is prepared as far as its cut, both sides compared; nothing else runs.`,
		Example: "  cell bench copy --rows 1000000 --size 200",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := benchFlags(fleet.StorePostgres, map[string]int{"rows": b.Rows, "size": b.Size, "rounds": b.Rounds}); err != nil {
				return err
			}
			b.Log, b.OnStep = a.log, a.benchStep
			rep, err := b.Copy(cmd.Context())
			return benchResult(a, rep, err, rep != nil && len(rep.Moves) > 0, func(w io.Writer) error { return printCopyReport(w, rep) })
		},
	}
	f := c.Flags()
	f.IntVar(&b.Rows, "rows", 1_000_000, "rows of the tenant; two others have a tenth as many each")
	f.IntVar(&b.Size, "size", 200, "bytes of a row's text")
	f.IntVar(&b.Rounds, "rounds", 7, "how often each way is measured")
	return c
}

func printCopyReport(w io.Writer, r *rows.CopyReport) error {
	n := float64(r.Rows)
	line := func(name string, rounds []rows.Round) []string {
		var copied, whole, agents, postgres []time.Duration
		for _, x := range rounds {
			copied, whole, agents, postgres = append(copied, x.Copied), append(whole, x.Whole), append(agents, x.Agents), append(postgres, x.Postgres)
		}
		rate := func(took []time.Duration) string {
			return fmt.Sprintf("%.0f", n/load.Percentile(took, 50).Seconds())
		}
		each := func(took []time.Duration) string {
			return fmt.Sprintf("%.2fµs", float64(load.Percentile(took, 50).Microseconds())/n)
		}
		return []string{name, rate(copied), rate(whole), each(agents), each(postgres)}
	}
	fmt.Fprintf(w, "%d rows of %d bytes, medians of %d rounds, sides alternating; CPU is that of the whole\n", r.Rows, r.Size, len(r.Moves))
	if err := table(w, [][]string{
		{"", "rows/s, rows alone", "rows/s, whole", "CPU a row, agents or psql", "CPU a row, Postgres"},
		line("move, as far as its cut", r.Moves),
		line("psql | psql", r.Peer),
	}); err != nil {
		return err
	}
	ratio := func(of func(rows.Round) time.Duration) float64 {
		var q []time.Duration
		for i, m := range r.Moves {
			q = append(q, time.Duration(float64(r.Peer[i].Whole)/float64(of(m))*1e6))
		}
		return float64(load.Percentile(q, 50)) / 1e6
	}
	fmt.Fprintf(w, "move / psql: %.2f for the rows alone, %.2f with both sides compared\n",
		ratio(func(x rows.Round) time.Duration { return x.Copied }), ratio(func(x rows.Round) time.Duration { return x.Whole }))
	return nil
}

func (a *app) benchCatchUpCmd() *cobra.Command {
	b := rows.Bench{}
	var changes int
	c := &cobra.Command{
		Use:   "catchup",
		Short: "Apply a backlog of changes, beside a native subscription and beside decoding alone",
		Long: `Make a Postgres cluster in a folder of its own, fill a tenant among others, prepare a move of
it, and change its rows one by one, each in a transaction of its own. That backlog is
taken by the target's agent over mutual TLS, by a subscription of the server with a row
filter, and by pg_recvlogical, which throws it away; each way has a slot of its own. They
take turns, and nothing else runs.`,
		Example: "  cell bench catchup --changes 100000",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := benchFlags(fleet.StorePostgres, map[string]int{"rows": b.Rows, "size": b.Size, "rounds": b.Rounds, "changes": changes}); err != nil {
				return err
			}
			b.Log, b.OnStep = a.log, a.benchStep
			rep, err := b.CatchUp(cmd.Context(), changes)
			return benchResult(a, rep, err, rep != nil && len(rep.Move) > 0, func(w io.Writer) error { return printCatchUpReport(w, rep) })
		},
	}
	f := c.Flags()
	f.IntVar(&b.Rows, "rows", 100_000, "rows of the tenant; two others have a tenth as many each")
	f.IntVar(&b.Size, "size", 200, "bytes of a row's text")
	f.IntVar(&b.Rounds, "rounds", 7, "how often each way is measured")
	f.IntVar(&changes, "changes", 100_000, "single-row updates in each round")
	return c
}

func printCatchUpReport(w io.Writer, r *rows.CatchUpReport) error {
	n := float64(r.Changes)
	fmt.Fprintf(w, "%d updates of single rows of %d bytes, medians of %d rounds, taking turns\n", r.Changes, r.Size, len(r.Move))
	lines := [][]string{{"", "changes/s", "CPU a change", "move / this, changes/s"}}
	for _, way := range []struct {
		name string
		took []rows.Catching
	}{{"move", r.Move}, {"native subscription", r.Native}, {"decoding alone", r.Decode}} {
		var took, cpu, ratio []time.Duration
		for i, x := range way.took {
			took, cpu = append(took, x.Took), append(cpu, x.CPU)
			if i < len(r.Move) {
				ratio = append(ratio, time.Duration(float64(x.Took)/float64(r.Move[i].Took)*1e6))
			}
		}
		lines = append(lines, []string{way.name, fmt.Sprintf("%.0f", n/load.Percentile(took, 50).Seconds()), fmt.Sprintf("%.2fµs", float64(load.Percentile(cpu, 50).Microseconds())/n),
			fmt.Sprintf("%.2f", float64(load.Percentile(ratio, 50))/1e6)})
	}
	return table(w, lines)
}
