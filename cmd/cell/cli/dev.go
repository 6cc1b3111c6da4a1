// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
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
				if replicas < 1 {
					return usagef("--replicas %d: want 1 to 16", replicas)
				}
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
	f.BoolVar(&demo, "demo", false, "do the main job once: place four tenants, use them, move one under load, remove them")
	f.BoolVar(&exit, "exit", false, "with --demo: end after it")
	completeStore(c)
	c.AddCommand(a.devKillCmd())
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
	names := f.Info.Cells
	other := names[len(names)-1]
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
`, f.Info.Name, f.Info.Edge, f.Layout.Logs(), prefix, names[0], other)
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
	step("three more tenants: one that moves under load, and one in each cell that must not notice")
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
	mine := append([]string{first.Tenant}, rep.Tenants...)
	for _, t := range mine {
		if _, err := cl.DeleteTenant(ctx, cells.TenantID(t), "demo"); err != nil {
			step(fmt.Sprintf("tenant %s of the demo stays: %v; remove it with: cell tenants delete %s", t, err, t))
		}
	}
	step(fmt.Sprintf("the demo's %d tenants are removed again", len(mine)))
	return nil
}

func (a *app) devKillCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "kill PROCESS",
		Short: "End one process of the fleet as a crash does, to see what happens",
		Long: `End one process of a running cell dev with SIGKILL. It is started again. The
processes are directory, edge, CELL-N for each process of a cell, and CELL-postgres
for its private database server. Only this fleet's processes are touched.`,
		Example: "  cell dev kill cell-a-1\n  cell dev kill cell-a-postgres",
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			info, err := fleet.ReadInfo(a.stateDir)
			if err != nil || len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			procs, _ := info.Processes()
			return slices.Sorted(maps.Keys(procs)), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			info, err := fleet.ReadInfo(a.stateDir)
			if err != nil {
				return err
			}
			pid, err := info.Kill(args[0])
			if errors.Is(err, fleet.ErrNoProcess) {
				return &usageError{err}
			}
			if err != nil {
				return err
			}
			return a.print(map[string]any{"killed": args[0], "pid": pid}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "killed %s (pid %d); it is started again: cell cells\n", args[0], pid)
				return err
			})
		},
	}
}
