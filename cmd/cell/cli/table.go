// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/table/kube"
	"github.com/cloister-dev/cloister/table/open"
)

// tableFlags are what every command on a table at an address takes.
type tableFlags struct {
	a  *app
	ch channel.Config
}

func (f *tableFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.ch.CAFile, "channel-ca", "", "for https: the fleet's CA certificate (PEM)")
	fl.StringVar(&f.ch.CertFile, "channel-cert", "", "for https: a certificate of the fleet (cell pki issue)")
	fl.StringVar(&f.ch.KeyFile, "channel-key", "", "for https: its key")
	cmd.MarkFlagsRequiredTogether("channel-ca", "channel-cert", "channel-key")
}

// open opens a table; close what it returns.
func (f *tableFlags) open(ctx context.Context, address string, opts ...open.Option) (open.Table, error) {
	if f.ch.CertFile != "" {
		f.ch.Log = f.a.log
		ch, err := channel.Open(f.ch)
		if err != nil {
			return nil, err
		}
		opts = append(opts, open.WithHTTPClient(ch.Client(channel.Identity{Role: channel.RoleDirectory})))
	}
	t, err := open.Open(ctx, address, opts...)
	if errors.Is(err, cells.ErrInvalid) {
		return nil, &usageError{err}
	}
	return t, err
}

func (a *app) tableCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "table", Short: "Routing tables, wherever they are stored", Args: cobra.NoArgs,
		Long: `Look at a routing table itself, compare two, or copy one into another. No fleet is
needed; a table is named by its address:

  file:PATH                                        one file
  sqlite:PATH                                      an SQLite database
  postgres://user@host/db[?cells_schema=NAME]      a Postgres database
  etcd://[user@]host:port[,host:port][/prefix][?ca=FILE&cert=FILE&key=FILE&password_file=FILE]
  kube:[NAMESPACE][?kubeconfig=FILE&context=NAME]  TenantRoute objects
  https://host:port                                what a directory serves (--channel-*)`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.tableCheck(), a.tableCopy(), a.tableWatch(), a.tableWishes(), a.tableCRD(), a.tableName())
	return c
}

// view is everything that a table holds.
type view struct {
	rows     map[cells.TenantID]cells.TenantRoute
	order    []cells.TenantID
	revision cells.Revision // of the first page: watching from it misses nothing
}

// loadView lists a whole table and checks what can be seen from the list.
func loadView(ctx context.Context, t cells.RoutingTable) (*view, error) {
	v := &view{rows: map[cells.TenantID]cells.TenantRoute{}}
	for after := cells.TenantID(""); ; {
		page, err := t.List(ctx, cells.ListOptions{After: after})
		if err != nil {
			return nil, err
		}
		if after == "" {
			v.revision = page.Revision
		}
		for _, r := range page.Routes {
			if n := len(v.order); n > 0 && r.TenantID <= v.order[n-1] {
				return nil, fmt.Errorf("%w: the list has %s behind %s", cells.ErrInvalid, r.TenantID, v.order[n-1])
			}
			if err := cells.ValidateRoute(r); err != nil {
				return nil, err
			}
			if r.Revision == 0 {
				return nil, fmt.Errorf("%w: %s has no revision", cells.ErrInvalid, r.TenantID)
			}
			v.rows[r.TenantID], v.order = r, append(v.order, r.TenantID)
		}
		if after = page.Next; after == "" {
			return v, nil
		}
	}
}

// checked is what a check found.
type checked struct {
	Rows     int                  `json:"rows"`
	Revision cells.Revision       `json:"revision"`
	States   map[string]int       `json:"states"`
	Cells    map[cells.CellID]int `json:"cells"`
	Moving   int                  `json:"moving"`  // cuts that are under way
	Overdue  []cells.TenantID     `json:"overdue"` // cuts past their deadline
	Residue  int                  `json:"residue"` // rows with something left to remove
	Alive    float64              `json:"alive_ms"`
	Against  *difference          `json:"against,omitempty"`
}

func (a *app) tableCheck() *cobra.Command {
	flags := tableFlags{a: a}
	var wait time.Duration
	c := &cobra.Command{
		Use:   "check TABLE [OTHER]",
		Short: "Read a whole table, watch it for a moment, and compare it with another",
		Long: `Read every row of a table and check it, see that a watch of the table is alive,
and say what the table holds. With a second table, compare the rows of both:
everything but their revisions. It changes nothing.

It fails if a row is malformed, the watch does not come alive, or the tables differ.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runTableCheck(cmd.Context(), &flags, wait, args)
		},
	}
	flags.register(c)
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long the watch may take to come alive")
	return c
}

func (a *app) runTableCheck(ctx context.Context, flags *tableFlags, wait time.Duration, args []string) error {
	t, err := flags.open(ctx, args[0], open.MustExist())
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	v, err := loadView(ctx, t)
	if err != nil {
		return err
	}
	c := checked{Rows: len(v.order), Revision: v.revision, States: map[string]int{}, Cells: map[cells.CellID]int{}, Overdue: []cells.TenantID{}}
	for _, id := range v.order {
		r := v.rows[id]
		c.States[r.State.String()]++
		if r.Exists() {
			c.Cells[r.CellID]++
		}
		if r.Moving() {
			c.Moving++
			if !r.Deadline.IsZero() && time.Now().After(r.Deadline) {
				c.Overdue = append(c.Overdue, id)
			}
		}
		if len(r.Residue) > 0 {
			c.Residue++
		}
	}
	begun := time.Now()
	if err := alive(ctx, t, v.revision, wait); err != nil {
		return err
	}
	c.Alive = float64(time.Since(begun).Microseconds()) / 1000
	if len(args) == 2 {
		other, err := flags.open(ctx, args[1], open.MustExist())
		if err != nil {
			return err
		}
		defer func() { _ = other.Close() }()
		w, err := loadView(ctx, other)
		if err != nil {
			return err
		}
		c.Against = compare(v, w)
	}
	err = a.print(c, func(w io.Writer) error {
		fmt.Fprintf(w, "rows      %d\nrevision  %d\n", c.Rows, c.Revision)
		for _, s := range slices.Sorted(maps.Keys(c.States)) {
			fmt.Fprintf(w, "%-9s %d\n", s, c.States[s])
		}
		for _, id := range slices.Sorted(maps.Keys(c.Cells)) {
			fmt.Fprintf(w, "in %-6s %d\n", id, c.Cells[id])
		}
		fmt.Fprintf(w, "moving    %d\noverdue   %d\nresidue   %d\nwatch     alive after %s\n", c.Moving, len(c.Overdue), c.Residue,
			short(time.Duration(c.Alive*float64(time.Millisecond))))
		if c.Against != nil {
			return c.Against.print(w)
		}
		return nil
	})
	if err == nil && c.Against != nil && !c.Against.equal() {
		err = errors.New("the tables differ")
	}
	return err
}

// alive requires that a watch from a revision says something.
func alive(ctx context.Context, t cells.RoutingTable, from cells.Revision, wait time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, wait, fmt.Errorf("the watch was not alive within %s", wait))
	defer cancel()
	w, err := t.Watch(ctx, from)
	if err != nil {
		return fmt.Errorf("watching: %w", err)
	}
	defer func() { _ = w.Close() }()
	if _, err := w.Next(ctx); err != nil {
		return fmt.Errorf("watching: %w", err)
	}
	return nil
}

func (a *app) tableWatch() *cobra.Command {
	flags := tableFlags{a: a}
	var from uint64
	var count int
	var signs bool
	c := &cobra.Command{
		Use:   "watch TABLE",
		Short: "Print each change of a table, until interrupted",
		Long: `Print each change of a table: a line, or with --json a JSON document, for each.
Without --from it begins with what changes from now on. Where the table no longer
knows what changed since --from the command fails; so it does when the watch
breaks.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := flags.open(cmd.Context(), args[0], open.MustExist())
			if err != nil {
				return err
			}
			defer func() { _ = t.Close() }()
			if !cmd.Flags().Changed("from") {
				page, err := t.List(cmd.Context(), cells.ListOptions{Limit: 1})
				if err != nil {
					return err
				}
				from = uint64(page.Revision)
			}
			return a.runTableWatch(cmd.Context(), t, cells.Revision(from), count, signs)
		},
	}
	flags.register(c)
	c.Flags().Uint64Var(&from, "from", 0, "begin behind this revision; 0 is everything the table knows")
	c.Flags().IntVar(&count, "count", 0, "end after so many changes; 0 is never")
	c.Flags().BoolVar(&signs, "signs", false, "print signs of life too")
	return c
}

func (a *app) runTableWatch(ctx context.Context, t cells.RoutingTable, from cells.Revision, count int, signs bool) error {
	w, err := t.Watch(ctx, from)
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }()
	for n := 0; ; {
		up, err := w.Next(ctx)
		if ctx.Err() != nil {
			return nil // interrupted, as it was meant to be
		}
		if err != nil {
			return err
		}
		if len(up.Routes) == 0 && signs {
			if err := a.print(map[string]any{"alive": true, "revision": up.Revision}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%d alive\n", up.Revision)
				return err
			}); err != nil {
				return err
			}
		}
		for _, r := range up.Routes {
			if err := a.print(r, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%d %s %s %s epoch %d move %s\n", r.Revision, r.TenantID, r.State, r.CellID, r.Epoch, dash(string(r.MoveID)))
				return err
			}); err != nil {
				return err
			}
			if n++; n == count {
				return nil
			}
		}
	}
}

func (a *app) tableWishes() *cobra.Command {
	flags := tableFlags{a: a}
	c := &cobra.Command{
		Use:   "wishes TABLE",
		Short: "List the TenantRoute objects whose spec.cell is not where the tenant is",
		Long: `List the wishes of people or of GitOps that are not fulfilled: objects whose spec
names another cell than the one where the tenant is. Nothing moves by itself
because of one: place the tenant, or move it.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := flags.open(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer func() { _ = t.Close() }()
			k, ok := t.(*kube.Table)
			if !ok {
				return usagef("only a kube: table has wishes")
			}
			wishes, err := k.Wishes(cmd.Context())
			if err != nil {
				return err
			}
			if wishes == nil {
				wishes = []kube.Wish{}
			}
			return a.print(wishes, func(w io.Writer) error {
				rows := [][]string{{"TENANT", "WISH", "IS", "STATE"}}
				for _, x := range wishes {
					rows = append(rows, []string{string(x.Tenant), string(x.Cell), dash(string(x.Route.CellID)), x.Route.State.String()})
				}
				return table(w, rows)
			})
		},
	}
	flags.register(c)
	return c
}

func (a *app) tableCRD() *cobra.Command {
	return &cobra.Command{
		Use: "crd", Short: "Print the custom resource definition of kube: tables", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return a.print(map[string]string{"yaml": string(kube.CRD())}, func(w io.Writer) error {
				_, err := w.Write(kube.CRD())
				return err
			})
		},
	}
}

func (a *app) tableName() *cobra.Command {
	return &cobra.Command{
		Use: "name TENANT", Short: "Print the name of a tenant's TenantRoute object", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			name, err := kube.Name(cells.TenantID(args[0]))
			if err != nil {
				return &usageError{err}
			}
			return a.print(map[string]string{"tenant": args[0], "name": name}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, name)
				return err
			})
		},
	}
}
