// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// client returns an operator's client, from the flags or from the fleet's folder.
func (a *app) client() (*client.Client, error) {
	operator, credential := a.operator, a.credential
	if operator == "" {
		info, err := fleet.ReadInfo(a.stateDir)
		if err != nil {
			return nil, err
		}
		operator = info.Operator
	}
	if credential == "" {
		credential = fleet.Layout{Dir: a.stateDir}.Credential()
	}
	return fleet.NewClient(operator, credential)
}

// with runs a command that needs the directory.
func (a *app) with(f func(ctx context.Context, cl *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		cl, err := a.client()
		if err != nil {
			return err
		}
		return f(cmd.Context(), cl, args)
	}
}

// complete offers what the directory lists, for shell completion.
func (a *app) complete(cmd *cobra.Command, prefix string, list func(context.Context, *client.Client) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
	defer cancel()
	var out []string
	if cl, err := a.client(); err == nil {
		if names, err := list(ctx, cl); err == nil {
			for _, n := range names {
				if strings.HasPrefix(n, prefix) {
					out = append(out, n)
				}
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// namesOf returns the name of each of list; for complete.
func namesOf[T any, N ~string](list []T, err error, name func(*T) N) ([]string, error) {
	out := make([]string, len(list))
	for i := range list {
		out[i] = string(name(&list[i]))
	}
	return out, err
}

func (a *app) completeCells(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd, prefix, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, err := cl.Cells(ctx)
		return namesOf(list, err, func(c *api.Cell) cells.CellID { return c.ID })
	})
}

func (a *app) completeTenants(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(cmd, prefix, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, err := cl.Tenants(ctx, client.TenantQuery{Limit: 200})
		return namesOf(list.Routes, err, func(r *cells.TenantRoute) cells.TenantID { return r.TenantID })
	})
}

func (a *app) cellsCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "cells", Short: "List the cells, their processes and how full they are", Args: cobra.NoArgs,
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			list, err := cl.Cells(ctx)
			if err != nil {
				return err
			}
			members, err := cl.Members(ctx)
			if err != nil {
				return err
			}
			type row struct {
				api.Cell
				Members []api.Member `json:"members"`
			}
			rows := make([]row, 0, len(list))
			for _, c := range list {
				r := row{Cell: c, Members: []api.Member{}}
				for _, m := range members {
					if m.Cell == c.ID {
						r.Members = append(r.Members, m)
					}
				}
				rows = append(rows, r)
			}
			return a.print(rows, func(w io.Writer) error {
				lines := [][]string{{"CELL", "STATE", "VERSION", "TENANTS", "QUOTA", "READY", "PID", "SINCE", "JURISDICTION", "NOTES"}}
				for _, r := range rows {
					ready, there := 0, 0
					var notes, pids []string
					var since time.Time // the youngest: a restart shows
					for _, m := range r.Members {
						if m.Replaced {
							continue
						}
						there++
						pids = append(pids, strconv.Itoa(m.PID))
						if m.Since.After(since) {
							since = m.Since
						}
						if m.Ready && m.Live {
							ready++
						} else if m.Reason != "" {
							notes = append(notes, m.Reason)
						}
					}
					quota, state := "-", string(r.State)
					if r.PlacementsMax != nil {
						quota = strconv.FormatInt(*r.PlacementsMax, 10)
					}
					if r.Closed {
						state += ", closed"
					}
					if r.Default {
						notes = append(notes, "default cell")
					}
					lines = append(lines, []string{string(r.ID), state, dash(r.Version), strconv.FormatInt(r.Tenants, 10), quota,
						fmt.Sprintf("%d/%d", ready, there), dash(strings.Join(pids, ",")), ago(since), dash(r.Jurisdiction), dash(strings.Join(notes, "; "))})
				}
				return table(w, lines)
			})
		}),
	}
	c.AddCommand(a.cellSetCmd(), a.cellProvisionCmd(), a.cellUpgradeCmd(), a.cellDrainCmd(), a.cellRetireCmd(), a.cellStatusCmd())
	return c
}

func (a *app) cellSetCmd() *cobra.Command {
	var spec api.CellSpec
	var closed, open bool
	var max, rowsMax, bytesMax, loadMax string
	c := &cobra.Command{
		Use:   "set CELL",
		Short: "Register a cell, or change its labels, quota and whether it takes new tenants",
		Args:  cobra.ExactArgs(1), ValidArgsFunction: a.completeCells,
	}
	f := c.Flags()
	f.StringVar(&spec.Host, "host", "", "the cell's own public host name")
	f.StringVar(&spec.Jurisdiction, "jurisdiction", "", "where the cell's data is, legally")
	f.StringVar(&spec.Geography, "geography", "", "where the cell is")
	f.StringVar(&spec.Version, "version", "", "the version that the cell is pinned to")
	f.StringVar(&spec.Upstream, "upstream", "", "one address for edges to reach the cell at; default: its processes' own")
	f.StringVar(&max, "placements-max", "", "quota of tenants, or none")
	f.StringVar(&rowsMax, "rows-max", "", "how many rows plans, moves and placements may put into the cell, or none")
	f.StringVar(&bytesMax, "bytes-max", "", "how many bytes, or none")
	f.StringVar(&loadMax, "load-max", "", "how many requests a second, or none")
	f.BoolVar(&closed, "closed", false, "take no new tenants")
	f.BoolVar(&open, "open", false, "take new tenants again")
	c.MarkFlagsMutuallyExclusive("closed", "open")
	c.RunE = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		id := cells.CellID(args[0])
		if err := id.Validate(); err != nil {
			return &usageError{err}
		}
		list, err := cl.Cells(ctx)
		if err != nil {
			return err
		}
		var next api.CellSpec
		for _, have := range list {
			if have.ID == id {
				next = have.CellSpec
			}
		}
		for name, set := range map[string]func(){
			"host": func() { next.Host = spec.Host }, "jurisdiction": func() { next.Jurisdiction = spec.Jurisdiction },
			"geography": func() { next.Geography = spec.Geography }, "version": func() { next.Version = spec.Version },
			"upstream": func() { next.Upstream = spec.Upstream }, "closed": func() { next.Closed = closed }, "open": func() { next.Closed = !open },
		} {
			if f.Changed(name) {
				set()
			}
		}
		if f.Changed("placements-max") {
			next.PlacementsMax = nil
			if max != "none" {
				n, err := strconv.ParseInt(max, 10, 64)
				if err != nil || n < 0 {
					return usagef("--placements-max is a number or none")
				}
				next.PlacementsMax = &n
			}
		}
		for name, to := range map[string]struct {
			text string
			into **int64
		}{"rows-max": {rowsMax, &next.RowsMax}, "bytes-max": {bytesMax, &next.BytesMax}} {
			if !f.Changed(name) {
				continue
			}
			if *to.into = nil; to.text != "none" {
				n, err := strconv.ParseInt(to.text, 10, 64)
				if err != nil || n < 0 {
					return usagef("--%s is a number or none", name)
				}
				*to.into = &n
			}
		}
		if f.Changed("load-max") {
			if next.LoadMax = nil; loadMax != "none" {
				n, err := strconv.ParseFloat(loadMax, 64)
				if err != nil || !(n >= 0) {
					return usagef("--load-max is a number or none")
				}
				next.LoadMax = &n
			}
		}
		got, err := cl.PutCell(ctx, id, next)
		if err != nil {
			return err
		}
		return a.print(got, func(w io.Writer) error {
			takes := "takes new tenants"
			if !got.Open() {
				takes = "closed to new tenants"
			}
			_, err := fmt.Fprintf(w, "cell %s is %s, %s\n", got.ID, got.State, takes)
			return err
		})
	})
	return c
}

func (a *app) placeCmd() *cobra.Command {
	var cell, op, router, fingerprint string
	var fl cellFlags
	var inFleet func(*cobra.Command, []string) error
	c := &cobra.Command{
		Use:   "place TENANT",
		Short: "Place a new tenant in a cell",
		Long: `Place a tenant that has no cell yet. Without --cell the open cell with the fewest
tenants is taken. The first placement wins: repeating the command answers the same
cell, and a tenant that is placed already stays where it is (use cell move).

With --router the tenant is placed in a whole deployment, which --cell names: it has to
be open, below its quota, and its configuration that of --fingerprint-file, unless the
tenant is placed already. With --dsn, or --env-file, the command runs with the cell's own
settings instead, and writes the tenant's row in the cell, too: then it serves the tenant.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if router == "" {
				return inFleet(cmd, args)
			}
			id, err := tenantArg(args[0])
			if err != nil {
				return err
			}
			if fl.dsn != "" || fl.env != "" {
				if fingerprint != "" {
					return usagef("--fingerprint-file is for a command without the cell's settings")
				}
				fl.router = router
				return a.placeInCell(cmd, &fl, id, cells.CellID(cell))
			}
			return a.placeRouter(cmd.Context(), router, id, cells.CellID(cell), fingerprint)
		},
	}
	inFleet = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		p, err := cl.Place(ctx, api.PlacementRequest{Tenant: cells.TenantID(args[0]), Cell: cells.CellID(cell), OperationID: op, Actor: actor()})
		if err != nil {
			return err
		}
		if err := a.print(p, func(w io.Writer) error {
			verb := "is in"
			if p.Created {
				verb = "placed in"
			}
			_, err := fmt.Fprintf(w, "%s %s %s (epoch %d)\n", p.Tenant, verb, p.Cell, p.Route.Epoch)
			return err
		}); err != nil {
			return err
		}
		if cell != "" && p.Cell != cells.CellID(cell) {
			return &cells.Answer{Code: cells.CodeWrongCell, Tenant: p.Tenant, Detail: fmt.Sprintf("it is in %s already; to move it: cell move %s --to %s", p.Cell, p.Tenant, cell)}
		}
		return nil
	})
	c.Flags().StringVar(&cell, "cell", "", "the cell; default: the open one with the fewest tenants")
	routerFlag(c, &router)
	c.Flags().StringVar(&fl.env, "env-file", "", "with --router: file with the cell's settings, NAME=value a line, instead of the environment")
	c.Flags().StringVar(&fl.dsn, "dsn", "", "with --router: the cell's Postgres")
	c.Flags().StringVar(&fingerprint, "fingerprint-file", "", "with --router: the configuration that the cell's processes run, as their fingerprint (JSON)")
	c.Flags().StringVar(&op, "operation-id", "", "makes a retry from a script safe: the same id gets the first answer")
	_ = c.RegisterFlagCompletionFunc("cell", a.completeCells)
	return c
}

func (a *app) whichCmd() *cobra.Command {
	var router string
	var wait time.Duration
	inFleet := a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		id, err := tenantArg(args[0])
		if err != nil {
			return err
		}
		t, err := cl.Tenant(ctx, id)
		if err != nil {
			return err
		}
		if (t.Route == nil || !t.Route.Exists()) && t.DefaultCell == "" {
			return &cells.Answer{Code: cells.CodeUnknownTenant, Tenant: t.Tenant, Detail: "place it with: cell place " + args[0]}
		}
		return a.print(t, func(w io.Writer) error {
			if t.Route == nil {
				_, err := fmt.Fprintf(w, "%s: %s, the default cell (no route)\n", t.Tenant, t.DefaultCell)
				return err
			}
			r := t.Route
			_, err := fmt.Fprintf(w, "%s: %s (%s, epoch %d, revision %d)%s\n", t.Tenant, r.CellID, r.State, r.Epoch, r.Revision, movingTo(*r))
			return err
		})
	})
	c := &cobra.Command{
		Use: "which TENANT", Short: "Say which cell a tenant is in", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
		Long: `Say which cell a tenant is in. With --router it is the deployment that the router's
lookup answers, which wants no credential: for a tenant that is placed nowhere, the
first one, which the lookup does not tell apart.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if router == "" {
				return inFleet(cmd, args)
			}
			id, err := tenantArg(args[0])
			if err != nil {
				return err
			}
			return a.whichRouter(cmd.Context(), router, id, wait)
		},
	}
	routerFlag(c, &router)
	c.Flags().DurationVar(&wait, "wait", 2*time.Minute, "with --router: for how long to ask again while it refuses for its pace")
	return c
}

func movingTo(r cells.TenantRoute) string {
	if r.MoveID == "" {
		return ""
	}
	return fmt.Sprintf(", moving from %s to %s as %s", r.SourceCell, r.TargetCell, r.MoveID)
}

func (a *app) tenantsCmd() *cobra.Command {
	var cell string
	var deleted bool
	c := &cobra.Command{
		Use: "tenants", Short: "List the tenants and their cells", Args: cobra.NoArgs,
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			if cell != "" {
				list, err := cl.Cells(ctx)
				if err != nil {
					return err
				}
				if !slices.ContainsFunc(list, func(c api.Cell) bool { return string(c.ID) == cell }) {
					return &cells.Answer{Code: cells.CodeNotFound, Detail: "there is no cell " + cell}
				}
			}
			q := client.TenantQuery{Cell: cells.CellID(cell), Deleted: deleted}
			routes := []cells.TenantRoute{}
			for {
				p, err := cl.Tenants(ctx, q)
				if err != nil {
					return err
				}
				routes = append(routes, p.Routes...)
				if p.Next == "" {
					break
				}
				q.After = p.Next
			}
			return a.print(routes, func(w io.Writer) error {
				rows := [][]string{{"TENANT", "CELL", "STATE", "EPOCH", "MOVE", "CAN GO BACK TO", "LEFT TO REMOVE IN"}}
				for _, r := range routes {
					var residue []string
					back := ""
					for _, x := range r.Residue {
						if x.Held() {
							back = fmt.Sprintf("%s for %s", x.Cell, short(max(0, time.Until(x.Until).Round(time.Minute))))
						} else {
							residue = append(residue, string(x.Cell))
						}
					}
					rows = append(rows, []string{string(r.TenantID), string(r.CellID), r.State.String(), fmt.Sprint(r.Epoch), dash(string(r.MoveID)), dash(back), dash(strings.Join(residue, ", "))})
				}
				return table(w, rows)
			})
		}),
	}
	c.Flags().StringVar(&cell, "cell", "", "only those that this cell holds, gives or gets")
	c.Flags().BoolVar(&deleted, "deleted", false, "tombstones too")
	_ = c.RegisterFlagCompletionFunc("cell", a.completeCells)
	c.AddCommand(a.tenantDeleteCmd(), a.tenantSetCmd(), a.tenantMeasureCmd())
	return c
}

func (a *app) tenantDeleteCmd() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use: "delete TENANT", Short: "Delete a tenant: its fence is closed, its rows are removed, its epoch is kept",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if err := a.confirm(yes, "Deleting "+args[0]+" removes its rows for good."); err != nil {
				return err
			}
			id, err := tenantArg(args[0])
			if err != nil {
				return err
			}
			d, err := cl.DeleteTenant(ctx, id, actor())
			if err != nil {
				return err
			}
			return a.print(d, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s is %s at epoch %d\n", d.Route.TenantID, d.Route.State, d.Route.Epoch)
				return err
			})
		}),
	}
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}

// explainCmd asks an edge, which is the only one who knows what it does.
func (a *app) explainCmd() *cobra.Command {
	var router, host, path, header string
	c := &cobra.Command{
		Use:   "explain [TENANT]",
		Short: "Say which cell a request goes to, by which rule, from which revision, on which router",
		Long: `Ask an edge what it would do with a request: of a tenant, or of a host, path and
header as a client would send them. The answer is from the edge's own view, so it
also shows an edge that is behind.`,
		Example: "  cell explain acme\n  cell explain --path /t/acme/v1/x\n  cell explain --header 'X-Tenant: acme'",
		Args:    cobra.MaximumNArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: func(cmd *cobra.Command, args []string) error {
			q := url.Values{}
			if len(args) == 1 {
				q.Set("tenant", args[0])
			}
			for k, v := range map[string]string{"host": host, "path": path, "header": header} {
				if v != "" {
					q.Set(k, v)
				}
			}
			if len(q) == 0 {
				return usagef("name a tenant, or a --host, --path or --header")
			}
			if router == "" {
				info, err := fleet.ReadInfo(a.stateDir)
				if err != nil {
					return err
				}
				router = info.EdgeAdmin
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, router+"/cells/v1/explain?"+q.Encode(), nil)
			if err != nil {
				return &usageError{err}
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return fmt.Errorf("the edge's admin listener: %w", err)
			}
			defer resp.Body.Close()
			if ans, ok := cells.ReadProblem(resp); ok {
				return ans
			}
			body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			if err != nil {
				return err
			}
			var doc map[string]any
			if err := json.Unmarshal(body, &doc); err != nil {
				return fmt.Errorf("the edge's answer: %w", err)
			}
			return a.print(doc, func(w io.Writer) error { return printPairs(w, doc) })
		},
	}
	f := c.Flags()
	f.StringVar(&router, "router", "", "an edge's admin listener; default: the fleet's own")
	f.StringVar(&host, "host", "", "Host of the request")
	f.StringVar(&path, "path", "", "path of the request")
	f.StringVar(&header, "header", "", "one header of the request, as Name: value")
	return c
}
