// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"math/big"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) budgetCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "budget [TENANT]",
		Short: "Show for how long a tenant may go without service because of moves",
		Long: `Each tenant has a budget: by default 99.995 % of a month, which is 129.6 s without
service in any 30 days. A cut reserves what it may take before it begins, is rolled
back when it would take longer, and is charged with what clients saw: requests that
were held and then answered cost nothing, refusals do. If no edge has reported, the
pause that the driver measured is charged.

Without a tenant: everybody's limit, and the tenants that have one of their own.`,
		Example: "  cell budget acme\n  cell budget set acme --availability 99.999\n  cell budget set --everybody --pause 60s",
		Args:    cobra.MaximumNArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if len(args) == 0 {
				list, err := cl.Budgets(ctx)
				if err != nil {
					return err
				}
				return a.print(list, func(w io.Writer) error { return printBudgets(w, list) })
			}
			acc, err := cl.Budget(ctx, cells.TenantID(args[0]))
			if err != nil {
				return err
			}
			return a.print(acc, func(w io.Writer) error { return printAccount(w, acc) })
		}),
	}
	c.AddCommand(a.budgetSet(), a.budgetReset())
	return c
}

// budgetArg is the tenant that a command is about; "" with --everybody.
func budgetArg(args []string, everybody bool) (cells.TenantID, error) {
	if everybody == (len(args) == 1) {
		return "", usagef("name a tenant, or --everybody")
	}
	if everybody {
		return "", nil
	}
	return cells.TenantID(args[0]), nil
}

func (a *app) budgetSet() *cobra.Command {
	var everybody bool
	var availability string
	var pause time.Duration
	c := &cobra.Command{
		Use:   "set [TENANT]",
		Short: "Set the budget of a tenant, or of everybody who has none of their own",
		Args:  cobra.MaximumNArgs(1), ValidArgsFunction: a.completeTenants,
	}
	c.RunE = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		t, err := budgetArg(args, everybody)
		if err != nil {
			return err
		}
		if c.Flags().Changed("pause") == (availability != "") {
			return usagef("give --availability or --pause, not both")
		}
		if availability != "" {
			list, err := cl.Budgets(ctx)
			if err != nil {
				return err
			}
			if pause, err = cells.ParseAvailability(availability, list.Window); err != nil {
				return &usageError{err}
			}
		}
		l, err := cl.SetBudget(ctx, t, api.BudgetSpec{Pause: pause, Actor: actor()})
		if err != nil {
			return err
		}
		return a.print(l, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s: %s\n", everybodyOr(l.Tenant), l.Pause)
			return err
		})
	})
	f := c.Flags()
	f.BoolVar(&everybody, "everybody", false, "the limit of all tenants without one of their own")
	f.StringVar(&availability, "availability", "", "as a percentage of 30 days, such as 99.995")
	f.DurationVar(&pause, "pause", 0, "as a time in 30 days, such as 60s; 0 allows forced moves only")
	return c
}

func (a *app) budgetReset() *cobra.Command {
	var everybody bool
	c := &cobra.Command{
		Use:   "reset [TENANT]",
		Short: "Give a tenant everybody's budget again, or everybody the built-in one",
		Args:  cobra.MaximumNArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			t, err := budgetArg(args, everybody)
			if err != nil {
				return err
			}
			if err := cl.ResetBudget(ctx, t, actor()); err != nil {
				return err
			}
			return a.print(map[string]string{"reset": everybodyOr(t)}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: reset\n", everybodyOr(t))
				return err
			})
		}),
	}
	c.Flags().BoolVar(&everybody, "everybody", false, "the limit of all tenants without one of their own")
	return c
}

func everybodyOr(t cells.TenantID) string {
	if t == "" {
		return "everybody"
	}
	return string(t)
}

// availability is the percentage that a limit leaves.
func availability(pause, window time.Duration) string {
	if window <= 0 {
		return "-"
	}
	up := new(big.Rat).SetFrac64(int64(window-pause), int64(window))
	s := up.Mul(up, big.NewRat(100, 1)).FloatString(6)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".") + "%"
}

func printBudgets(w io.Writer, list api.BudgetList) error {
	rows := [][]string{{"TENANT", "BUDGET", "AVAILABILITY", "SET BY", "SET"}}
	for _, l := range append([]api.BudgetLimit{list.Default}, list.Tenants...) {
		rows = append(rows, []string{everybodyOr(l.Tenant), l.Pause.String(), availability(l.Pause, list.Window), dash(l.Actor), ago(l.At)})
	}
	return table(w, rows)
}

func printAccount(w io.Writer, a cells.BudgetAccount) error {
	whose := "everybody's limit"
	if a.Limit.Own {
		whose = "its own limit"
	}
	fmt.Fprintf(w, "%s: %s left of %s (%s, %s)\n", a.Tenant, a.Left.Round(time.Millisecond), a.Limit.Pause, availability(a.Limit.Pause, a.Window), whose)
	if len(a.Entries) == 0 {
		return nil
	}
	if a.GrowsBy > 0 {
		fmt.Fprintf(w, "  grows      by %s at %s\n", a.GrowsBy.Round(time.Millisecond), a.GrowsAt.Format(time.RFC3339))
	}
	rows := [][]string{{"  MOVE", "CHARGED", "CLIENTS SAW", "DRIVER'S PAUSE", "FORCED BY", "AT"}}
	for _, e := range a.Entries {
		charged, seen, forced := e.Pause.Round(time.Microsecond).String(), "not reported", "-"
		if e.Reserved {
			charged += " reserved"
		}
		if e.Reported {
			seen = e.Seen.Round(time.Millisecond).String()
		}
		if e.Forced {
			forced = dash(e.Actor)
		}
		rows = append(rows, []string{"  " + string(e.Move), charged, seen, short(e.Driver), forced, e.At.Format(time.RFC3339)})
	}
	return table(w, rows)
}
