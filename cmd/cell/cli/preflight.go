// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) preflightCmd() *cobra.Command {
	var to string
	c := &cobra.Command{
		Use:   "preflight TENANT --to CELL",
		Short: "Show what a move would lose or break, before it starts",
		Long: `Look at the databases of both cells, and at the directory, and show everything that
a move of the tenant would lose or break, with what to do about it. Nothing is
changed. BLOCKED findings refuse the move, a warning says what may be lost or break
unless its fix is made, a note asks for nothing. The command fails if the move would
be refused. It is the same as cell move --dry-run.`,
		Example: "  cell preflight acme --to cell-b\n  cell preflight acme --to cell-b --json",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			return a.dryRun(ctx, cl, api.MoveRequest{Tenant: cells.TenantID(args[0]), To: cells.CellID(to), Actor: actor()})
		}),
	}
	c.Flags().StringVar(&to, "to", "", "the cell to move to")
	_ = c.MarkFlagRequired("to")
	_ = c.RegisterFlagCompletionFunc("to", a.completeCells)
	return c
}

// throttle are the flags that bound what a move may cost its cells.
type throttle struct {
	rows     int
	retained byteSize
	lag      time.Duration
}

func throttleFlags(f *pflag.FlagSet, t *throttle) {
	f.IntVar(&t.rows, "rows-per-second", 0, "copy and remove no faster; 0 is as the directory is configured, which is unlimited by default")
	f.Var(&t.retained, "max-retained", "roll back before the source keeps more changes for the move, as 8GiB, 500MiB or unlimited; 0 is as the directory is configured, which is 8GiB by default")
	f.DurationVar(&t.lag, "max-replica-lag", 0, "copy nothing while a standby of one of the databases is further behind; 0 is as the directory is configured, which is no bound by default")
}

// get returns nil if no flag was given.
func (t *throttle) get() *api.Throttle {
	if *t == (throttle{}) {
		return nil
	}
	return &api.Throttle{RowsPerSecond: t.rows, MaxRetained: int64(t.retained), MaxReplicaLag: t.lag}
}

// byteSize is a flag with a number of bytes; -1 is unlimited.
type byteSize int64

var byteUnits = []struct {
	name string
	n    int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}, {"", 1}}

func (b *byteSize) Type() string { return "bytes" }

func (b *byteSize) String() string {
	switch n := int64(*b); {
	case n < 0:
		return "unlimited"
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%dGiB", n>>30)
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%dMiB", n>>20)
	default:
		return strconv.FormatInt(n, 10)
	}
}

func (b *byteSize) Set(s string) error {
	if s == "unlimited" {
		*b = -1
		return nil
	}
	for _, u := range byteUnits {
		digits, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || n < 0 || n > (1<<62)/u.n {
			break
		}
		*b = byteSize(n * u.n)
		return nil
	}
	return fmt.Errorf("%q is no size; write it as 8GiB, 500MiB, 1000000 or unlimited", s)
}
