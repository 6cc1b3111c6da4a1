// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/open"
)

// difference is how two tables differ, their revisions left out.
type difference struct {
	Same    int              `json:"same"`
	Missing []cells.TenantID `json:"missing"` // in the other
	Extra   []cells.TenantID `json:"extra"`   // only in the other
	Changed []cells.TenantID `json:"changed"`
}

func (d *difference) equal() bool { return len(d.Missing)+len(d.Extra)+len(d.Changed) == 0 }

func (d *difference) print(w io.Writer) error {
	fmt.Fprintf(w, "same      %d\nmissing   %d\nextra     %d\ndifferent %d\n", d.Same, len(d.Missing), len(d.Extra), len(d.Changed))
	const most = 20
	n := 0
	for _, x := range []struct {
		what string
		ids  []cells.TenantID
	}{{"missing", d.Missing}, {"extra", d.Extra}, {"different", d.Changed}} {
		for _, id := range x.ids {
			if n++; n > most {
				_, err := fmt.Fprintln(w, "  and more; --json lists all")
				return err
			}
			fmt.Fprintf(w, "  %s: %s\n", x.what, id)
		}
	}
	return nil
}

// sameRow compares two rows in everything but their revisions.
func sameRow(a, b cells.TenantRoute) bool {
	a.Revision, b.Revision = 0, 0
	x, errX := cells.EncodeRoute(cells.CanonicalRoute(a))
	y, errY := cells.EncodeRoute(cells.CanonicalRoute(b))
	return errX == nil && errY == nil && string(x) == string(y)
}

// compare says what other lacks and has beyond v.
func compare(v, other *view) *difference {
	d := &difference{Missing: []cells.TenantID{}, Extra: []cells.TenantID{}, Changed: []cells.TenantID{}}
	for _, id := range v.order {
		switch r, ok := other.rows[id]; {
		case !ok:
			d.Missing = append(d.Missing, id)
		case sameRow(v.rows[id], r):
			d.Same++
		default:
			d.Changed = append(d.Changed, id)
		}
	}
	for _, id := range other.order {
		if _, ok := v.rows[id]; !ok {
			d.Extra = append(d.Extra, id)
		}
	}
	return d
}

func (a *app) tableCopy() *cobra.Command {
	flags := tableFlags{a: a}
	var yes, dry bool
	var workers int
	c := &cobra.Command{
		Use:   "copy FROM TO",
		Short: "Copy every row of one table into another, and compare them",
		Long: `Copy every row of one table into another: rows that are missing there are made,
rows that differ are replaced if the table's rules allow it (an epoch never falls),
rows that are equal are left. A row that only the target has is an error. Then both
tables are read again and compared.

Stop whatever decides (directories, controllers) first: a change of the source
during the copy makes the comparison fail, and a table that two of them write to is
two tables. Revisions are the target's own: restart edges and members, which
remember the source's, when the directory uses the target.

The command can be repeated, and interrupted.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runTableCopy(cmd.Context(), &flags, args[0], args[1], yes, dry, workers)
		},
	}
	flags.register(c)
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.Flags().BoolVar(&dry, "dry-run", false, "only say what would be done")
	c.Flags().IntVar(&workers, "workers", 8, "how many rows to write at once, 1 to 64")
	return c
}

// copied is what a copy did.
type copied struct {
	Made     int         `json:"made"`
	Replaced int         `json:"replaced"`
	Same     int         `json:"same"`
	Moving   int         `json:"moving"`
	Seconds  float64     `json:"seconds"`
	DryRun   bool        `json:"dry_run,omitempty"`
	After    *difference `json:"after,omitempty"`
}

func (a *app) runTableCopy(ctx context.Context, flags *tableFlags, fromURL, toURL string, yes, dry bool, workers int) error {
	if workers < 1 || workers > 64 {
		return usagef("--workers is 1 to 64")
	}
	var opts []open.Option
	if dry {
		opts = append(opts, open.MustExist())
	}
	from, err := flags.open(ctx, fromURL, open.MustExist())
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	to, err := flags.open(ctx, toURL, opts...)
	if err != nil {
		return err
	}
	defer func() { _ = to.Close() }()
	src, err := loadView(ctx, from)
	if err != nil {
		return fmt.Errorf("reading FROM: %w", err)
	}
	dst, err := loadView(ctx, to)
	if err != nil {
		return fmt.Errorf("reading TO: %w", err)
	}
	d := compare(src, dst)
	c := copied{Made: len(d.Missing), Replaced: len(d.Changed), Same: d.Same, DryRun: dry}
	if len(d.Extra) > 0 {
		return fmt.Errorf("TO has %d tenants that FROM has not, %s the first: it is another fleet's, or the newer one; nothing was done", len(d.Extra), d.Extra[0])
	}
	for _, id := range d.Changed {
		if err := cells.ValidateChange(dst.rows[id], src.rows[id]); err != nil {
			return fmt.Errorf("TO is not behind FROM, nothing was done: %w", err)
		}
	}
	for _, id := range src.order {
		if r := src.rows[id]; r.Moving() {
			c.Moving++
		}
	}
	if !dry && c.Made+c.Replaced > 0 {
		if err := a.confirm(yes, fmt.Sprintf("Make %d rows and replace %d, %d of all in the middle of a move? Nothing may decide meanwhile.", c.Made, c.Replaced, c.Moving)); err != nil {
			return err
		}
		begun := time.Now()
		if err := a.copyRows(ctx, src, dst, d, to, workers); err != nil {
			return fmt.Errorf("%w; what was copied stays, repeat the command to go on", err)
		}
		c.Seconds = time.Since(begun).Seconds()
	}
	if !dry {
		if src, err = loadView(ctx, from); err != nil {
			return err
		}
		if dst, err = loadView(ctx, to); err != nil {
			return err
		}
		c.After = compare(src, dst)
	}
	err = a.print(c, func(w io.Writer) error {
		what := "copied"
		if dry {
			what = "would copy"
		}
		fmt.Fprintf(w, "%s: %d rows made, %d replaced, %d the same; %d in the middle of a move\n", what, c.Made, c.Replaced, c.Same, c.Moving)
		if c.After != nil {
			return c.After.print(w)
		}
		return nil
	})
	if err == nil && c.After != nil && !c.After.equal() {
		err = errors.New("the tables differ after the copy: something has changed one of them meanwhile")
	}
	return err
}

// copyRows writes the rows that are missing or different.
func (a *app) copyRows(ctx context.Context, src, dst *view, d *difference, to cells.RoutingTable, workers int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for _, ids := range [][]cells.TenantID{d.Missing, d.Changed} {
		for _, id := range ids {
			if ctx.Err() != nil {
				break
			}
			g.Go(func() error {
				if _, err := to.CompareAndSet(ctx, dst.rows[id].Revision, src.rows[id]); err != nil {
					return fmt.Errorf("writing %s: %w", id, err)
				}
				return nil
			})
		}
	}
	return g.Wait()
}
