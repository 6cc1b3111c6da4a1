// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) moveUndoCmd() *cobra.Command {
	var req api.MoveRequest
	var yes, noWait bool
	var window time.Duration
	var c *cobra.Command
	c = &cobra.Command{
		Use:   "undo TENANT",
		Short: "Take a tenant's last move back, with everything written since",
		Long: `Move a tenant back to the cell that it came from, while the undo window of its last
move is open. That cell still has the rows and has received what was written since,
so nothing is copied but the last changes. It is a move with the same guarantees:
nothing is refused and nothing is lost. If it is rolled back the tenant stays where it
is, and the offer is over.`,
		Example: "  cell move undo acme\n  cell move undo acme --dry-run",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			req.Tenant, req.Undo, req.Actor = cells.TenantID(args[0]), true, actor()
			if c.Flags().Changed("undo-window") {
				req.UndoWindow = &window
			}
			if req.DryRun {
				return a.dryRun(ctx, cl, req)
			}
			if err := a.confirm(yes, "Take the last move of "+args[0]+" back?"); err != nil {
				return err
			}
			return a.runMove(ctx, cl, req, noWait)
		}),
	}
	f := c.Flags()
	f.BoolVar(&req.DryRun, "dry-run", false, "show the preflight, change nothing")
	f.BoolVar(&req.Force, "force", false, "undo although the tenant's unavailability budget would be exceeded; recorded with your name")
	f.BoolVar(&noWait, "no-wait", false, "start the undo and return")
	f.DurationVar(&window, "undo-window", 0, "for how long the undo itself can be undone; 0 is not at all")
	f.StringVar(&req.OperationID, "operation-id", "", "makes a retry from a script safe: the same id answers the same move")
	f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}

func (a *app) moveCloseWindowCmd() *cobra.Command {
	var req api.CloseWindowRequest
	var yes bool
	c := &cobra.Command{
		Use:   "close-window TENANT",
		Short: "End the time in which a tenant's last move can be undone",
		Long: `Close the undo window of a tenant's last move. What the cell that the tenant came from
has kept is removed, and the removal is verified. Without an open window nothing happens.`,
		Example: "  cell move close-window acme",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if err := a.confirm(yes, "The last move of "+args[0]+" cannot be undone afterwards."); err != nil {
				return err
			}
			req.Actor = actor()
			r, err := cl.CloseWindow(ctx, cells.TenantID(args[0]), req)
			if err != nil {
				return err
			}
			return a.print(r, func(w io.Writer) error {
				for _, e := range r.Residue {
					fmt.Fprintf(w, "%s: rows in %s are being removed\n", r.TenantID, e.Cell)
				}
				if len(r.Residue) == 0 {
					fmt.Fprintf(w, "%s: no window is open\n", r.TenantID)
				}
				return nil
			})
		}),
	}
	c.Flags().StringVar(&req.Reason, "reason", "", "why; kept in the route and the audit")
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}
