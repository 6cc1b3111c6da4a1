// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
)

func (a *app) completeVersions(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, prefix, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, err := cl.Versions(ctx)
		return namesOf(list, err, func(v *provision.Version) string { return v.Name })
	})
}

func (a *app) completeProvisioned(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(cmd, prefix, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, err := cl.ProvisionedCells(ctx)
		return namesOf(list, err, func(p *api.Provisioned) cells.CellID { return p.Spec.Cell })
	})
}

// cellArg checks a cell's id as the directory does.
func cellArg(s string) (cells.CellID, error) {
	id := cells.CellID(s)
	if err := id.Validate(); err != nil {
		return "", &usageError{err}
	}
	return id, nil
}

// secretRefs reads NAME=secret/key.
func secretRefs(list map[string]string) (map[string]provision.SecretRef, error) {
	out := map[string]provision.SecretRef{}
	for name, text := range list {
		secret, key, ok := strings.Cut(text, "/")
		if !ok {
			return nil, usagef("--secret %s=%s: want VARIABLE=SECRET/KEY", name, text)
		}
		out[name] = provision.SecretRef{Name: secret, Key: key}
	}
	return out, nil
}

// wishFlags are those of a spec.
type wishFlags struct {
	version, store, size, dsn, jurisdiction, geography, host string
	replicas                                                 int
	env, secrets                                             map[string]string
}

func (w *wishFlags) add(a *app, c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&w.version, "version", "", "the version of the catalogue to pin the cell to (cell versions)")
	f.IntVar(&w.replicas, "replicas", 1, "processes of the cell, 1 to 64")
	f.StringVar(&w.store, "store", "", "none, sqlite or postgres; default: what the fleet's cells have")
	f.StringVar(&w.size, "store-size", "", "how much room an SQLite store gets where that has to be said, as 10Gi")
	f.StringVar(&w.dsn, "dsn-secret", "", "SECRET/KEY with the connection string of a Postgres database that exists; default: one is made, where the provisioner can")
	f.StringVar(&w.jurisdiction, "jurisdiction", "", "where the cell's data is, legally")
	f.StringVar(&w.geography, "geography", "", "where the cell is")
	f.StringVar(&w.host, "host", "", "the cell's own public host name")
	f.StringToStringVar(&w.env, "env", nil, "variables of its processes, stored and shown in clear")
	f.StringToStringVar(&w.secrets, "secret", nil, "variables by reference, as VARIABLE=SECRET/KEY: an entry of a Kubernetes Secret, or the file secrets/SECRET/KEY of the fleet's folder")
	_ = c.RegisterFlagCompletionFunc("version", a.completeVersions)
	_ = c.RegisterFlagCompletionFunc("store", cobra.FixedCompletions([]string{"none", "sqlite", "postgres"}, cobra.ShellCompDirectiveNoFileComp))
}

// request is what the flags ask for, on top of what the cell is.
func (w *wishFlags) request(c *cobra.Command, have *provision.Spec) (api.ProvisionRequest, error) {
	r := api.ProvisionRequest{Replicas: 1, Env: map[string]string{}}
	if have != nil {
		r = api.ProvisionRequest{Version: have.Version, Image: have.Image, Command: have.Command, Replicas: have.Replicas, Store: have.Store,
			Jurisdiction: have.Jurisdiction, Geography: have.Geography, Host: have.Host, Env: have.Env, Secrets: have.Secrets}
	}
	set := c.Flags().Changed
	if set("version") {
		r.Version, r.Image, r.Command = w.version, "", nil
	}
	if set("replicas") {
		r.Replicas = w.replicas
	}
	for name, to := range map[string]struct {
		into *string
		v    string
	}{"store": {&r.Store.Engine, w.store}, "store-size": {&r.Store.Size, w.size}, "jurisdiction": {&r.Jurisdiction, w.jurisdiction},
		"geography": {&r.Geography, w.geography}, "host": {&r.Host, w.host}} {
		if set(name) {
			*to.into = to.v
		}
	}
	if set("dsn-secret") {
		refs, err := secretRefs(map[string]string{"dsn": w.dsn})
		if err != nil {
			return r, err
		}
		r.Store.DSN = refs["dsn"]
		if r.Store.Engine == "" {
			r.Store.Engine = provision.EnginePostgres
		}
	}
	if set("env") {
		r.Env = w.env
	}
	if set("secret") {
		refs, err := secretRefs(w.secrets)
		if err != nil {
			return r, err
		}
		r.Secrets = refs
	}
	if r.Version == "" {
		return r, usagef("--version is required: which version of the catalogue? (cell versions)")
	}
	return r, nil
}

func (a *app) cellProvisionCmd() *cobra.Command {
	var w wishFlags
	var detach bool
	var reason string
	c := &cobra.Command{
		Use:   "provision CELL --version VERSION",
		Short: "Make a cell of a version, with its own store and certificate, or change what it should be",
		Long: `Say what a cell should be. The fleet's provisioner makes it so: cell dev of processes
on this machine, cell provisioner of Kubernetes objects. The cell takes tenants from
when its first process is ready.

On a cell that exists, flags that are not given keep what it has. A drained cell
serves again. A retired name begins anew, with an empty store.`,
		Example: "  cell versions add v2 -- /opt/memory-v2 --listen {listen} --store {store} --dsn {dsn}\n  cell cells provision c3 --version v2 --jurisdiction eu",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeProvisioned,
	}
	w.add(a, c)
	c.Flags().BoolVar(&detach, "detach", false, "do not wait until it is done")
	c.Flags().StringVar(&reason, "reason", "", "kept in the record and the audit")
	c.RunE = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		id, err := cellArg(args[0])
		if err != nil {
			return err
		}
		var have *provision.Spec
		p, err := cl.ProvisionedCell(ctx, id, false)
		if ans := cells.AnswerOf(err); ans != nil && ans.Code == cells.CodeNotFound {
			err = nil
		} else if err == nil && p.Spec.Desired != provision.DesiredRetired {
			have = &p.Spec
		}
		if err != nil {
			return err
		}
		req, err := w.request(c, have)
		if err != nil {
			return err
		}
		req.Reason, req.Actor = reason, actor()
		if p, err = cl.ProvisionCell(ctx, id, req); err != nil {
			return err
		}
		return a.follow(ctx, cl, p, detach)
	})
	return c
}

func (a *app) cellUpgradeCmd() *cobra.Command {
	var req api.UpgradeRequest
	var detach bool
	c := &cobra.Command{
		Use:   "upgrade CELL",
		Short: "Pin a cell to another version, process by process, without a refused request",
		Long: `Pin a serving cell to another version of the catalogue, or give it another number of
processes. A process of the new version joins and is ready before one of the old is
told to leave. A version that does not become ready is stopped again, and the old
one serves on. Going back is an upgrade to the old version.`,
		Example: "  cell cells upgrade c3 --version v2\n  cell cells upgrade c3 --replicas 3",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeProvisioned,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id, err := cellArg(args[0])
			if err != nil {
				return err
			}
			if req.Version == "" && req.Replicas == 0 {
				return usagef("name a --version, or a number of --replicas")
			}
			req.Actor = actor()
			p, err := cl.UpgradeCell(ctx, id, req)
			if err != nil {
				return err
			}
			return a.follow(ctx, cl, p, detach)
		}),
	}
	f := c.Flags()
	f.StringVar(&req.Version, "version", "", "the version of the catalogue; default: the cell's own")
	f.IntVar(&req.Replicas, "replicas", 0, "processes of the cell; default: as many as it has")
	f.StringVar(&req.Reason, "reason", "", "kept in the record and the audit")
	f.BoolVar(&detach, "detach", false, "do not wait until it is done")
	_ = c.RegisterFlagCompletionFunc("version", a.completeVersions)
	return c
}

func (a *app) cellDrainCmd() *cobra.Command {
	var req api.DrainRequest
	var into []string
	var detach, yes bool
	c := &cobra.Command{
		Use:   "drain CELL",
		Short: "Close a cell to new tenants, and move those that it has elsewhere",
		Long: `Close a cell to new tenants and empty it by a campaign, with jurisdictions and the
other cells' quotas as constraints. The campaign is shown, paused and resumed as every
other (cell campaign). Drain again when it is over and tenants are left.

A drained cell serves again with cell cells provision.`,
		Example: "  cell cells drain c3 --yes\n  cell cells drain c3 --into c1,c2 --undo-window 0s --yes",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeProvisioned,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id, err := cellArg(args[0])
			if err != nil {
				return err
			}
			if err := a.confirm(yes, "Draining "+args[0]+" moves all of its tenants to other cells."); err != nil {
				return err
			}
			for _, c := range into {
				req.Into = append(req.Into, cells.CellID(c))
			}
			req.Actor = actor()
			p, err := cl.DrainCell(ctx, id, req)
			if err != nil {
				return err
			}
			return a.follow(ctx, cl, p, detach)
		}),
	}
	f := c.Flags()
	f.StringSliceVar(&into, "into", nil, "cells to move the tenants to; default: all that are open")
	f.IntVar(&req.Settings.Concurrency, "concurrency", 0, "how many moves run at once; default 4")
	f.IntVar(&req.Settings.PerPair, "per-pair", 0, "how many between the same two cells; 0 is no bound")
	f.StringVar(&req.Settings.StopAfter, "stop-after", "", "pause after so many failures, as 3 or 5%, or none; default 1")
	f.StringVar(&req.Settings.UndoWindow, "undo-window", "", "for how long each move can be undone, as 24h or 0s; the cell is not retired before; default: the directory's own")
	f.BoolVar(&req.Settings.Force, "force", false, "let moves exceed their tenants' budgets")
	f.StringVar(&req.Reason, "reason", "", "kept in the record and the audit")
	f.BoolVar(&detach, "detach", false, "do not wait until it is empty")
	f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	_ = c.RegisterFlagCompletionFunc("into", a.completeCells)
	return c
}

func (a *app) cellRetireCmd() *cobra.Command {
	var req api.RetireRequest
	var detach, yes bool
	c := &cobra.Command{
		Use:   "retire CELL",
		Short: "Remove a drained cell: its processes, store, certificate and keys",
		Long: `Remove a drained cell in which nobody is left. It is refused while the directory knows a
tenant there (routes, rows to remove, undo windows, moves, claims), or the cell's own
store does (open fences, rows in tenant tables), and says which.

With --force a cell that does not answer is retired although its store could not be
asked. Who forced it is kept, and on this machine the store is put aside in the folder
retired instead of removed. --force retires no cell of which a tenant is known.`,
		Example: "  cell cells status c3 --left\n  cell cells retire c3 --yes",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeProvisioned,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id, err := cellArg(args[0])
			if err != nil {
				return err
			}
			if err := a.confirm(yes, "Retiring "+args[0]+" removes the cell and its store for good."); err != nil {
				return err
			}
			req.Actor = actor()
			p, err := cl.RetireCell(ctx, id, req)
			if err != nil {
				return err
			}
			return a.follow(ctx, cl, p, detach)
		}),
	}
	f := c.Flags()
	f.BoolVar(&req.Force, "force", false, "also if the cell's store cannot be asked")
	f.StringVar(&req.Reason, "reason", "", "kept in the record and the audit")
	f.BoolVar(&detach, "detach", false, "do not wait until nothing is left")
	f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}

func (a *app) cellStatusCmd() *cobra.Command {
	var left, follow bool
	c := &cobra.Command{
		Use:   "status [CELL]",
		Short: "Show what provisioned cells should be, what they are, and how far they are",
		Args:  cobra.MaximumNArgs(1), ValidArgsFunction: a.completeProvisioned,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if len(args) == 0 {
				if left || follow {
					return usagef("--left and --follow want a cell")
				}
				list, err := cl.ProvisionedCells(ctx)
				if err != nil {
					return err
				}
				if list == nil {
					list = []api.Provisioned{}
				}
				return a.print(list, func(w io.Writer) error { return provisionedTable(w, list) })
			}
			id, err := cellArg(args[0])
			if err != nil {
				return err
			}
			if follow { // also while the directory is away
				p := api.Provisioned{}
				p.Spec.Cell = id
				return a.follow(ctx, cl, p, false)
			}
			p, err := cl.ProvisionedCell(ctx, id, left)
			if err != nil {
				return err
			}
			return a.print(p, func(w io.Writer) error { return provisionedText(w, &p) })
		}),
	}
	c.Flags().BoolVar(&left, "left", false, "say what keeps the cell from being retired; asks the cell's own processes")
	c.Flags().BoolVar(&follow, "follow", false, "wait until the cell is as it should be, and show progress")
	c.MarkFlagsMutuallyExclusive("left", "follow")
	return c
}

// follow shows how a wish comes about, and prints the cell in the end.
func (a *app) follow(ctx context.Context, cl *client.Client, p api.Provisioned, detach bool) error {
	if !detach {
		last := ""
		err := cl.WatchProvisioned(ctx, p.Spec.Cell, func(now api.Provisioned) error {
			p = now
			if line := progressLine(&now); !a.json && line != last {
				last = line
				fmt.Fprintln(a.err, line)
			}
			if c := now.Drain; c != nil && now.Spec.Desired == provision.DesiredDrained && !now.Progress.Reached &&
				(c.State.Final() || c.State == api.CampaignPaused && c.Counts.Running == 0) {
				return errStays
			}
			return nil
		})
		if errors.Is(err, errStays) {
			if perr := a.print(p, func(w io.Writer) error { return provisionedText(w, &p) }); perr != nil {
				return perr
			}
			return &cells.Answer{Code: cells.CodeConflict, Cell: p.Spec.Cell,
				Detail: fmt.Sprintf("%d tenants stay; campaign %s is %s: cell campaign show %s --items", p.Cell.Tenants, p.Drain.ID, p.Drain.State, p.Drain.ID)}
		}
		if err != nil {
			return err
		}
	}
	return a.print(p, func(w io.Writer) error { return provisionedText(w, &p) })
}

var errStays = errors.New("tenants stay")

func progressLine(p *api.Provisioned) string {
	g := &p.Progress
	s := fmt.Sprintf("%s: %s, %d of %d %s", p.Spec.Cell, p.Status.Phase, g.Done, g.Total, g.What)
	if g.Left > 0 {
		s += fmt.Sprintf(", about %s left", short(g.Left))
	}
	if g.Waiting != "" {
		s += ": " + g.Waiting
	}
	return s
}

func provisionedTable(w io.Writer, list []api.Provisioned) error {
	rows := [][]string{{"CELL", "DESIRED", "PHASE", "VERSION", "RUNS", "READY", "TENANTS", "SINCE", "NOTES"}}
	for i := range list {
		p := &list[i]
		tenants := "-"
		if p.Cell != nil {
			tenants = fmt.Sprint(p.Cell.Tenants)
		}
		notes := p.Progress.Waiting
		if notes == "" {
			notes = p.Status.Message
		}
		rows = append(rows, []string{string(p.Spec.Cell), string(p.Spec.Desired), string(p.Status.Phase), p.Spec.Version, dash(p.Status.Version),
			fmt.Sprintf("%d/%d", p.Status.Ready, p.Spec.Replicas), tenants, ago(p.Status.Since), dash(notes)})
	}
	return table(w, rows)
}

func provisionedText(w io.Writer, p *api.Provisioned) error {
	s, st := &p.Spec, &p.Status
	rows := [][]string{
		{"cell", string(s.Cell)},
		{"should be", fmt.Sprintf("%s, version %s, %d processes (generation %d, by %s)", s.Desired, s.Version, s.Replicas, s.Generation, p.Actor)},
		{"is", fmt.Sprintf("%s, version %s, %d processes, %d ready", st.Phase, dash(st.Version), st.Replicas, st.Ready)},
		{"progress", progressLine(p)},
		{"store", dash(s.Store.Engine)},
	}
	if p.Cell != nil {
		takes := "takes new tenants"
		if !p.Cell.Open() {
			takes = "takes no new tenants"
		}
		rows = append(rows, []string{"tenants", fmt.Sprintf("%d; %s", p.Cell.Tenants, takes)})
	}
	if p.Campaign != "" {
		rows = append(rows, []string{"campaign", p.Campaign})
	}
	if p.Reason != "" {
		rows = append(rows, []string{"reason", p.Reason})
	}
	if p.ForcedBy != "" {
		rows = append(rows, []string{"forced by", p.ForcedBy})
	}
	if l := p.Left; l != nil {
		if l.Unasked != "" {
			rows = append(rows, []string{"store", "not asked: " + l.Unasked})
		}
		if l.Total == 0 && l.Unasked == "" {
			rows = append(rows, []string{"left", "nothing"})
		}
		for _, t := range slices.Concat(l.Directory, l.Store) {
			rows = append(rows, []string{"left", string(t.Tenant) + " " + t.Why})
		}
	}
	return table(w, rows)
}
