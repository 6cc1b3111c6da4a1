// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	deployclient "github.com/cloister-dev/cloister/directory/deploy/client"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	directoryopen "github.com/cloister-dev/cloister/directory/open"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
)

// routerFlag adds --router: a router in front of whole deployments.
func routerFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "router", os.Getenv("CELL_ROUTER_URL"), "the router in front of whole deployments, http(s)://host[:port] ($CELL_ROUTER_URL)")
}

// routerOperator returns an operator's client of a router. The credential is in
// --credential-file, or in $CELL_ROUTER_OPERATOR_TOKEN.
func (a *app) routerOperator(router string) (*deployclient.Operator, error) {
	if router == "" {
		return nil, usagef("--router is needed")
	}
	cred := os.Getenv("CELL_ROUTER_OPERATOR_TOKEN")
	if a.credential != "" {
		b, err := os.ReadFile(a.credential)
		if err != nil {
			return nil, fmt.Errorf("operator credential: %w", err)
		}
		cred = strings.TrimSpace(string(b))
	}
	if cred == "" {
		return nil, usagef("an operator credential is needed: --credential-file or $CELL_ROUTER_OPERATOR_TOKEN")
	}
	cl, err := deployclient.New(router, cred)
	if err != nil {
		return nil, &usageError{err}
	}
	return cl, nil
}

// whichRouter asks a router for a tenant's cell.
func (a *app) whichRouter(ctx context.Context, router string, tenant cells.TenantID, wait time.Duration) error {
	l, err := deployclient.Lookup(ctx, router, tenant, wait)
	if errors.Is(err, cells.ErrInvalid) && cells.AnswerOf(err) == nil {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	return a.print(l, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s: %s at %s\n", l.Tenant, l.Cell, l.Host)
		return err
	})
}

// placeRouter places a tenant in a deployment. fingerprint is the file with the cell's
// configuration; a tenant that is placed already needs none.
func (a *app) placeRouter(ctx context.Context, router string, tenant cells.TenantID, cell cells.CellID, fingerprint string) error {
	if err := cell.Validate(); err != nil {
		return usagef("--cell: %w", err)
	}
	req := wire.Place{Tenant: tenant, Cell: cell, Actor: actor()}
	if fingerprint != "" {
		b, err := os.ReadFile(fingerprint)
		if err != nil {
			return err
		}
		f, err := tenancy.DecodeFingerprint(b)
		if err != nil {
			return usagef("--fingerprint-file: %w", err)
		}
		req.Fingerprint = &f
	}
	cl, err := a.routerOperator(router)
	if err != nil {
		return err
	}
	defer cl.CloseIdleConnections()
	won, err := cl.Place(ctx, req)
	if err != nil {
		return err
	}
	if err := a.print(won, func(w io.Writer) error {
		verb := "is in"
		if won.Created {
			verb = "placed in"
		}
		_, err := fmt.Fprintf(w, "%s %s %s (deployment %s)\n", won.Tenant, verb, won.Cell, won.DeploymentID)
		return err
	}); err != nil {
		return err
	}
	if won.Cell != cell {
		return &cells.Answer{Code: cells.CodeWrongCell, Tenant: tenant, Detail: fmt.Sprintf("it is in %s already", won.Cell)}
	}
	return nil
}

// printCell prints what a change made of a cell.
func (a *app) printCell(c deploy.Cell) error {
	return a.print(c, func(w io.Writer) error {
		state, quota := string(c.State), "no quota"
		if c.Closed {
			state += ", closed"
		}
		if c.PlacementsMax != nil {
			quota = "quota " + strconv.FormatInt(*c.PlacementsMax, 10)
		}
		next := ""
		if c.NextHash != "" {
			next = ", a next credential is recorded"
		}
		_, err := fmt.Fprintf(w, "%s: %s, %d tenants, %s%s\n", c.Name, state, c.Placements, quota, next)
		return err
	})
}

func (a *app) limitCmd() *cobra.Command {
	var router, cell, max string
	var closed, open bool
	c := &cobra.Command{
		Use:   "limit --cell CELL [--closed | --open] [--placements-max (N | none)]",
		Short: "Close a deployment to new tenants, open it, or bound their number",
		Long: `Change whether a deployment takes new tenants. Only the directory is written, through
the router, so it works while the cell is down; the next placement is judged by it.
Tenants that are placed stay.`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	routerFlag(c, &router)
	f.StringVar(&cell, "cell", "", "the cell")
	f.BoolVar(&closed, "closed", false, "take no new tenants")
	f.BoolVar(&open, "open", false, "take new tenants again")
	f.StringVar(&max, "placements-max", "", "how many tenants may be placed in the cell, or none for no bound")
	_ = c.MarkFlagRequired("cell")
	c.MarkFlagsMutuallyExclusive("closed", "open")
	c.MarkFlagsOneRequired("closed", "open", "placements-max")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		req := wire.Limit{Actor: actor()}
		if closed || open {
			req.Closed = &closed
		}
		if f.Changed("placements-max") {
			n := int64(-1)
			if max != "none" {
				var err error
				if n, err = strconv.ParseInt(max, 10, 64); err != nil || n < 0 {
					return usagef("--placements-max is a number or none")
				}
			}
			req.PlacementsMax = &n
		}
		cl, err := a.routerOperator(router)
		if err != nil {
			return err
		}
		defer cl.CloseIdleConnections()
		out, err := cl.Limit(cmd.Context(), cells.CellID(cell), req)
		if err != nil {
			return err
		}
		return a.printCell(out)
	}
	return c
}

func (a *app) credentialCmd() *cobra.Command {
	var router, cell, next string
	var finish, revert bool
	c := &cobra.Command{
		Use:   "credential --cell CELL (--next SHA256 | --finish | --revert)",
		Short: "Rotate the credential that a deployment calls the router with",
		Long: `Rotate a deployment's router credential. --next records the SHA-256 of a new one
beside the present one; every router replica accepts both within its directory cache's
time. Then the new credential goes to the cell's processes, then --finish drops the old
one. --revert drops a pending one. A cell that was finished too early gets its old
credential back with --next and --finish.

"cell credential new" makes a credential, offline.`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	routerFlag(c, &router)
	f.StringVar(&cell, "cell", "", "the cell")
	f.StringVar(&next, "next", "", "SHA-256 of the new credential, 64 lowercase hex digits; never the credential itself")
	f.BoolVar(&finish, "finish", false, "the next credential becomes the only one")
	f.BoolVar(&revert, "revert", false, "drop the next credential")
	_ = c.MarkFlagRequired("cell")
	c.MarkFlagsMutuallyExclusive("next", "finish", "revert")
	c.MarkFlagsOneRequired("next", "finish", "revert")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		req := wire.Credential{Action: wire.Next, SHA256: next, Actor: actor()}
		switch {
		case finish:
			req.Action = wire.Finish
		case revert:
			req.Action = wire.Revert
		default:
			if _, err := credential.ParseHash(next); err != nil {
				return usagef("--next: %w; make both with: cell credential new", err)
			}
		}
		cl, err := a.routerOperator(router)
		if err != nil {
			return err
		}
		defer cl.CloseIdleConnections()
		out, err := cl.Credential(cmd.Context(), cells.CellID(cell), req)
		if err != nil {
			return err
		}
		return a.printCell(out)
	}
	var operator bool
	made := &cobra.Command{
		Use: "new", Short: "Make a credential, offline; prints it once, with its SHA-256", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			kind := credential.Router
			if operator {
				kind = credential.Operator
			}
			cred, sum := kind.New()
			return a.print(map[string]string{"credential": cred, "sha256": sum.String()}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "credential %s\nsha256     %s\n", cred, sum)
				return err
			})
		},
	}
	made.Flags().BoolVar(&operator, "operator", false, "an operator's, for a router or a directory; default: a deployment's")
	c.AddCommand(made)
	return c
}

func (a *app) routerMigrate() *cobra.Command {
	var address string
	var movable, asynchronous bool
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Bring the directory of deployments to this build's schema, and settle what it is",
		Long: `Create or migrate the directory, before routers of this build start. Routers of the
build before run on. The first run settles whether placements never change (pinned, the
default) or follow moves (--movable); that cannot be changed later.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			store, err := directoryopen.Open(cmd.Context(), address, directoryopen.Options{AllowAsynchronous: asynchronous, Logger: a.log})
			if err != nil {
				if errors.Is(err, cells.ErrInvalid) {
					return usagef("--directory: %w", err)
				}
				return err
			}
			defer func() { err = errors.Join(err, store.Close()) }()
			kind := deploy.Pinned
			if movable {
				kind = deploy.Movable
			}
			if err := store.Deployments().Settle(cmd.Context(), kind, api.AuditEntry{At: time.Now().UTC(), Peer: "operator", Actor: actor(),
				RequestID: "migrate", Action: "directory.settle"}); err != nil {
				return err
			}
			return a.print(map[string]string{"kind": string(kind)}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "the directory is %s and has this build's schema\n", kind)
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&address, "directory", os.Getenv("CELL_ROUTER_DIRECTORY"), "the directory: "+directoryopen.Help+" ($CELL_ROUTER_DIRECTORY)")
	f.BoolVar(&movable, "movable", false, "placements follow moves")
	f.BoolVar(&asynchronous, "allow-asynchronous", false, "use a database that has no synchronous standby")
	return c
}
