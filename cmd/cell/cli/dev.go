// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
)

func (a *app) devCmd() *cobra.Command {
	var file, listen, store, defaultCell, service string
	var names []string
	var replicas int
	var demo, exit bool
	c := &cobra.Command{
		Use:   "dev",
		Short: "Start a fleet on this machine",
		Long: `Start a directory, an edge and two or more cells, each with its own store, on this
machine, and keep them running until Ctrl-C. State stays in the folder that
--fleet names, so the next start has the same tenants.

The cells run the memory service unless --service or a fleet file names another
command. In it {listen}, {store}, {dsn}, {cell}, {version} and {state} are replaced.`,
		Example: "  cell dev\n  cell dev --cells eu-1,eu-2,us-1 --store postgres\n  cell dev --file fleet.yaml\n  cell dev --demo",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var cfg fleet.Config
			if file != "" {
				var err error
				if cfg, err = fleet.Load(file); err != nil {
					return &usageError{err}
				}
			}
			fl := cmd.Flags()
			override(fl.Changed("listen"), &cfg.Listen, listen)
			override(fl.Changed("store"), &cfg.Store, store)
			override(fl.Changed("default-cell"), &cfg.DefaultCell, defaultCell)
			if service != "" {
				cfg.Service.Command = strings.Fields(service)
			}
			if len(names) > 0 {
				cfg.Cells = nil
				for _, n := range names {
					cfg.Cells = append(cfg.Cells, fleet.Cell{Name: n})
				}
			}
			if err := cfg.Adopt(a.stateDir); err != nil {
				return &usageError{err}
			}
			if err := cfg.Complete(); err != nil {
				return &usageError{err}
			}
			if fl.Changed("replicas") {
				for i := range cfg.Cells {
					cfg.Cells[i].Replicas = replicas
				}
				if err := cfg.Complete(); err != nil { // the same bounds
					return &usageError{err}
				}
			}
			return a.dev(cmd.Context(), cfg, demo, exit)
		},
	}
	f := c.Flags()
	f.StringVarP(&file, "file", "f", "", "a fleet.yaml; flags override it")
	f.StringVar(&listen, "listen", "127.0.0.1:8080", "the edge's public address; port 0 picks one")
	f.StringVar(&store, "store", "sqlite", "what each cell keeps its tenants in: sqlite or postgres (a private cluster for each cell)")
	f.StringSliceVar(&names, "cells", nil, "names of the cells; default cell-a,cell-b")
	f.IntVar(&replicas, "replicas", 1, "processes of each cell")
	f.StringVar(&defaultCell, "default-cell", "", "cell that serves tenants without a route; default: none does")
	f.StringVar(&service, "service", "", "the command that runs the service in every cell")
	f.BoolVar(&demo, "demo", false, "do the main job once: place two tenants, use them, move one under load")
	f.BoolVar(&exit, "exit", false, "with --demo: end after it")
	return c
}

func override(changed bool, to *string, v string) {
	if changed || *to == "" {
		*to = v
	}
}

func (a *app) dev(ctx context.Context, cfg fleet.Config, demo, exit bool) error {
	begin := time.Now()
	step := func(s string) {
		if !a.json {
			fmt.Fprintf(a.err, "%6.2fs  %s\n", time.Since(begin).Seconds(), s)
		}
	}
	f, err := fleet.Start(ctx, cfg, fleet.Options{Dir: a.stateDir, Log: a.log, OnStep: step})
	if err != nil {
		return err
	}
	defer func() {
		step("stopping")
		f.Close()
		step("stopped; state is kept in " + a.stateDir)
	}()
	step("ready")
	if demo {
		if err := a.demo(ctx, f, step); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		if exit {
			return nil
		}
	}
	if err := a.print(f.Info, func(w io.Writer) error { return a.nextSteps(w, f) }); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (a *app) nextSteps(w io.Writer, f *fleet.Fleet) error {
	cells := f.Info.Cells
	other := cells[len(cells)-1]
	prefix := "cell"
	if a.stateDir != ".cell" {
		prefix = "cell --fleet " + a.stateDir
	}
	_, err := fmt.Fprintf(w, `
The fleet %s runs. Edge: %s   Logs: %s

Try next, in another terminal:
  %[4]s cells
  %[4]s place acme --cell %[5]s
  curl -s %[2]s/v1/memory.set -H 'X-Tenant: acme' -d '{"namespace":"notes","key":"k","value":{"n":1}}'
  curl -sN %[2]s/v1/events -H 'X-Tenant: acme' -H 'Accept: text/event-stream'
  %[4]s move acme --to %[6]s --dry-run
  %[4]s move acme --to %[6]s
  %[4]s explain acme

Ctrl-C stops everything.
`, f.Info.Name, f.Info.Edge, f.Layout.Logs(), prefix, cells[0], other)
	return err
}

// demo is the main job in half a minute.
func (a *app) demo(ctx context.Context, f *fleet.Fleet, step func(string)) error {
	cl, err := f.Client()
	if err != nil {
		return err
	}
	names := f.Info.Cells
	if len(names) < 2 {
		return usagef("--demo needs two cells")
	}
	last := ""
	mover := fleet.Mover{Client: cl, OnUpdate: func(m api.Move) {
		if m.Step != last {
			last = m.Step
			step(fmt.Sprintf("  move %-10s %s", m.State, m.Step))
		}
	}}
	hc := load.NewHTTPClient(32)
	defer hc.CloseIdleConnections()
	first := &load.Client{Base: f.Info.Edge, Tenant: fmt.Sprintf("demo-%d", time.Now().UnixNano()%1e9), HTTP: hc}
	if err := mover.Place(ctx, first.Tenant, names[0]); err != nil {
		return err
	}
	if err := load.WaitServed(ctx, first); err != nil {
		return err
	}
	step(fmt.Sprintf("first request served: tenant %s in %s", first.Tenant, names[0]))
	rep, err := load.MoveRun{Edge: f.Info.Edge, Cells: [2]string{names[0], names[1]}, Rows: 5000, Size: 200, Clients: 8, Moves: 2,
		OtherPerCell: 1, OtherClients: 1, Mover: mover, OnStep: step}.Run(ctx)
	if err != nil {
		return err
	}
	if !a.json {
		fmt.Fprintln(a.out)
		if err := printMoveReport(a.out, f.Config.Store, rep); err != nil {
			return err
		}
	}
	if !rep.Clean() {
		return fmt.Errorf("something failed or was lost")
	}
	return nil
}
