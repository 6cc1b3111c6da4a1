// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

func (a *app) benchPauseCmd() *cobra.Command {
	var stores []string
	var rates []float64
	var out string
	p := load.PauseRun{}
	c := &cobra.Command{
		Use:   "pause",
		Short: "Measure pauses over tenant sizes and write rates, on both stores",
		Long: `For each store, start a fleet of two cells in a folder of its own, and for each size of a
tenant and each rate of writes move such a tenant back and forth while its clients write,
and nothing else is used. It prints the pauses that clients see: for each cut, the longest
wait of each client that had a request in it. A machine that cannot take a rate shows how
many writes a second there were.`,
		Example: "  cell bench pause --rows 1000,100000 --rates 10,1000,0 --out docs/pause.svg",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			counts := map[string]int{"size": p.Run.Size, "clients": p.Run.Clients, "moves": p.Run.Moves, "rows": slices.Min(append(p.Rows, 1))}
			if len(stores) == 0 || len(p.Rows) == 0 || len(rates) == 0 {
				return usagef("want at least one of --stores, --rows and --rates each")
			}
			for _, r := range rates {
				if r < 0 {
					return usagef("--rates: %g; want 0 or more", r)
				}
			}
			for _, s := range stores {
				if err := benchFlags(s, counts); err != nil {
					return err
				}
			}
			p.Rates = rates
			m := &load.PauseMatrix{}
			err := a.benchPause(cmd, stores, p, m)
			if err == nil && out != "" {
				var b bytes.Buffer
				if err = m.WriteSVG(&b); err == nil {
					err = os.WriteFile(out, b.Bytes(), 0o644)
				}
			}
			return benchResult(a, m, err, len(m.Cells) > 0, func(w io.Writer) error { return printPauses(w, m) })
		},
	}
	f := c.Flags()
	f.StringSliceVar(&stores, "stores", []string{fleet.StoreSQLite, fleet.StorePostgres}, "sqlite, postgres or both")
	f.IntSliceVar(&p.Rows, "rows", []int{1_000, 100_000, 1_000_000}, "rows of the moving tenant")
	f.Float64SliceVar(&rates, "rates", []float64{10, 1_000, 0}, "writes a second of all its clients together; 0 is as many as are answered")
	f.IntVar(&p.Run.Size, "size", 200, "bytes of a row's value")
	f.IntVar(&p.Run.Clients, "clients", 16, "clients of the moving tenant")
	f.IntVar(&p.Run.Moves, "moves", 10, "moves of each, back and forth")
	f.StringVar(&out, "out", "", "file for a plot (SVG)")
	return c
}

func (a *app) benchPause(cmd *cobra.Command, stores []string, p load.PauseRun, m *load.PauseMatrix) error {
	for _, store := range stores {
		f, cl, step, end, err := a.benchFleet(cmd.Context(), store, 1)
		if err != nil {
			return err
		}
		p.Store, p.Run.Edge, p.Run.Cells, p.Run.Mover, p.Run.OnStep = store, f.Info.Edge, [2]string{"cell-a", "cell-b"}, fleet.Mover{Client: cl}, step
		err = p.Into(cmd.Context(), m)
		end()
		if err != nil {
			return err
		}
	}
	return nil
}

func printPauses(w io.Writer, m *load.PauseMatrix) error {
	rows := [][]string{{"store", "rows", "writes/s", "reached", "moves", "p50", "p95", "p99", "max", "driver p50", "p95"}}
	for _, c := range m.Cells {
		line := []string{c.Store, fmt.Sprint(c.Rows), load.RateName(c.Rate), fmt.Sprintf("%.0f", c.Reached), fmt.Sprint(c.Moves)}
		for _, p := range []int{50, 95, 99, 100} {
			line = append(line, short(load.Percentile(c.Clients, p)))
		}
		line = append(line, short(load.Percentile(c.Driver, 50)), short(load.Percentile(c.Driver, 95)))
		rows = append(rows, line)
	}
	fmt.Fprintf(w, "pauses as clients see them, and as the driver does; %s\n", time.Now().UTC().Format(time.DateOnly))
	return table(w, rows)
}
