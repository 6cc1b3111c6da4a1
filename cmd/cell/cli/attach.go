// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/internal/credential"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// cellHelp ends the help of each command on a cell's stores.
const cellHelp = `

The command runs with the cell's settings (CELL, CELL_PUBLIC_BASE_URL and the others,
CELL_DSN, CELL_S3_URL, CELL_CLICKHOUSE_URL) in its environment or in --env-file, and the
operator credential; it does not use CELL_ROUTER_TOKEN. One that was ended is run again:
it goes on where it was.`

func (a *app) prepareCmd() *cobra.Command {
	var fl cellFlags
	var p attach.Preparation
	var bots []string
	c := &cobra.Command{
		Use:   "prepare --host HOST --credential-sha256 SHA256 [--probe-url URL]",
		Short: "Register a deployment as a cell and write the rows that its processes read",
		Long: `Register a whole deployment with the router, and write its first row, its mode and its
own row. The router registers it only when the deployment's probe listener answers nonces
that this command has just written to every store; it waits for the listener within --wait.

The deployment behind the router's shared host is prepared first, before CELL is rolled
out to its processes; any other one afterwards, with CELL set from its first start. The
accepted configuration is the one that live processes report, and where none does (a
first cell before CELL) the one of this command.` + cellHelp,
		Args: cobra.NoArgs,
	}
	fl.add(c)
	f := c.Flags()
	f.StringVar(&p.Host, "host", "", "the cell's own public host; the shared host for the first cell")
	f.StringVar(&p.CredentialSHA256, "credential-sha256", "", "SHA-256 of the cell's router credential, 64 lowercase hex digits (cell credential new); never the credential itself")
	f.StringVar(&p.ProbeURL, "probe-url", "", "where a later cell's probe listener is reached; the first one's is the router's configuration")
	f.StringSliceVar(&bots, "bot", nil, "break-glass bot, NAME=THUMBPRINT of its key; may be given more than once")
	_ = c.MarkFlagRequired("host")
	_ = c.MarkFlagRequired("credential-sha256")
	c.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if _, err := credential.ParseHash(p.CredentialSHA256); err != nil {
			return usagef("--credential-sha256: %w; make both with: cell credential new", err)
		}
		if p.Bots, err = readBots(bots); err != nil {
			return err
		}
		cell, end, err := a.openCell(cmd.Context(), &fl)
		if err != nil {
			return err
		}
		defer end()
		out, err := cell.Prepare(cmd.Context(), p)
		if err != nil {
			return err
		}
		return a.print(out, func(w io.Writer) error {
			if out.Odd != "" {
				fmt.Fprintln(w, out.Odd)
			}
			_, err := fmt.Fprintf(w, "%s: %s at %s, first: %t; its rows are %s\n", out.Cell.Name, out.Cell.State, out.Cell.Host, out.Cell.First, out.Rows.State())
			return err
		})
	}
	return c
}

func readBots(list []string) (out []deploy.Bot, err error) {
	for _, b := range list {
		name, print, ok := strings.Cut(b, "=")
		if !ok || name == "" || print == "" {
			return nil, usagef("--bot is NAME=THUMBPRINT")
		}
		out = append(out, deploy.Bot{Name: name, Thumbprint: print})
	}
	return out, nil
}

func (a *app) attachCmd() *cobra.Command {
	var fl cellFlags
	var at attach.Attachment
	var bots []string
	var dir, secret string
	c := &cobra.Command{
		Use:   "attach [--upstream URL] [--cells DIR]",
		Short: "Make a prepared deployment serve as a cell",
		Long: `Attach a prepared cell, after CELL is rolled out to all of its processes. Every refusal
names what it found and leaves nothing behind.

The first cell goes from recording to enforced: every tenant that it holds is placed, the
mode is set in short tries, and the cell serves once every live process follows it, every
transaction that could have read recording is over, and what was written meanwhile is
placed. A refusal while processes follow sets recording back; a later one leaves enforced.

A later cell has to be empty. --cells is a folder with the settings of the other cells,
<cell>.env each, with which their stores and processes are looked at; --upstream is where
the router reaches it.` + cellHelp,
		Args: cobra.NoArgs,
	}
	fl.add(c)
	f := c.Flags()
	f.StringVar(&at.Upstream, "upstream", "", "where the router reaches a later cell, http(s)://host[:port]")
	f.StringVar(&dir, "cells", "", "folder with the settings of the other cells, <cell>.env each, which have CELL_DSN")
	f.StringVar(&secret, "root-secret-file", "", "file with the cell's root secret, of which the directory keeps a fingerprint; none for a service without")
	f.StringSliceVar(&bots, "bot", nil, "break-glass bot, NAME=THUMBPRINT of its key; may be given more than once")
	f.BoolVar(&at.RevokeUnprovisioned, "revoke-unprovisioned", false, "with SCIM on: end the tokens of accounts that have no active SCIM row, instead of refusing")
	f.BoolVar(&at.AllowAsynchronous, "allow-asynchronous", false, "attach a cell whose database has no synchronous standby")
	c.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if at.Bots, err = readBots(bots); err != nil {
			return err
		}
		if at.KeysFP, err = keysFingerprint(secret); err != nil {
			return err
		}
		cell, end, err := a.openCell(cmd.Context(), &fl)
		if err != nil {
			return err
		}
		defer end()
		var endPeers func()
		if cell.Peers, endPeers, err = openPeers(cmd.Context(), dir, cell.Name, fl.columns); err != nil {
			return err
		}
		defer endPeers()
		out, err := cell.Attach(cmd.Context(), at)
		if err != nil {
			return err
		}
		return a.printCell(out)
	}
	return c
}

func (a *app) updateCmd() *cobra.Command {
	var fl cellFlags
	var config, probeURL string
	var finish, revert, addresses, revoke bool
	c := &cobra.Command{
		Use:   "update (--config FILE | --finish | --revert | --probe-url URL | --addresses)",
		Short: "Change what a cell accepts, or where it is probed",
		Long: `Change the configuration of a prepared or attached cell. --config takes the settings of
a file as the next configuration, beside the present one: the directory reserves what it
accepts, and processes of both serve while it is rolled out. --finish waits until every
live process runs it and the longest request is over, and drops the old one. --revert
waits until no live process runs it alone, and drops it; tenants that it placed stay.

--probe-url gives a later cell another probe address, --addresses brings the first cell's
addresses to the router's configuration, once every replica has it; both after the same
nonces as cell prepare.` + cellHelp,
		Args: cobra.NoArgs,
	}
	fl.add(c)
	f := c.Flags()
	f.StringVar(&config, "config", "", "file with the cell's next settings, NAME=value a line")
	f.BoolVar(&finish, "finish", false, "the next configuration becomes the only one")
	f.BoolVar(&revert, "revert", false, "drop the next configuration")
	f.StringVar(&probeURL, "probe-url", "", "a later cell's new probe address")
	f.BoolVar(&addresses, "addresses", false, "the first cell's addresses become the router's")
	f.BoolVar(&revoke, "revoke-unprovisioned", false, "with --finish, when SCIM is turned on: end the tokens of accounts that have no active SCIM row, instead of refusing")
	c.MarkFlagsMutuallyExclusive("config", "finish", "revert", "probe-url", "addresses")
	c.MarkFlagsOneRequired("config", "finish", "revert", "probe-url", "addresses")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		cell, end, err := a.openCell(ctx, &fl)
		if err != nil {
			return err
		}
		defer end()
		if probeURL != "" || addresses {
			row, err := cell.Addresses(ctx, probeURL)
			if err != nil {
				return err
			}
			return a.print(row, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s: probe %s, upstream %s\n", row.Name, row.ProbeURL, dash(row.Upstream))
				return err
			})
		}
		var out attach.Updated
		switch {
		case finish:
			out, err = cell.Finish(ctx, revoke)
		case revert:
			out, err = cell.Revert(ctx)
		default:
			get, rerr := readEnvFile(config)
			if rerr != nil {
				return usagef("--config: %w", rerr)
			}
			next, serr := checks.From(get)
			if serr != nil {
				return usagef("--config: %w", serr)
			}
			if next.Cell != "" && next.Cell != cell.Name {
				return usagef("--config: CELL is %s there and %s here", next.Cell, cell.Name)
			}
			cell.Config = next.Configuration
			out, err = cell.Next(ctx)
		}
		if err != nil {
			return err
		}
		return a.print(out, func(w io.Writer) error {
			next := "none"
			if out.Next != nil {
				next = out.Next.Sum()[:12]
			}
			_, err := fmt.Fprintf(w, "%s: configuration %s, next %s, reserved: %t\n", cell.Name, out.Current.Sum()[:12], next, out.Reserved)
			return err
		})
	}
	return c
}

func (a *app) restoreCmd() *cobra.Command {
	var fl cellFlags
	c := &cobra.Command{
		Use:   "restore",
		Short: "Write back from the directory what a restore of a cell's stores has taken",
		Long: `Run it after any restore of a cell's stores, with the cell stopped, before anything else
writes. It raises the fences of tenants that have moved, then writes the tenancy row of
every tenant that the directory places in the cell, whichever of the first and mode rows
is missing, the directory's mode over the cell's (only upward), and, once the cell's
attach has begun, its own row.` + cellHelp,
		Args: cobra.NoArgs,
	}
	fl.add(c)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		cell, end, err := a.openCell(cmd.Context(), &fl)
		if err != nil {
			return err
		}
		defer end()
		out, err := cell.Restore(cmd.Context())
		if err != nil {
			return err
		}
		return a.print(out, func(w io.Writer) error {
			fmt.Fprintf(w, "%s: %d tenants, %d fences, rows were %s and are %s\n", cell.Name, out.Tenants, out.Fences, out.Before.State(), out.Rows.State())
			if out.Prepare {
				fmt.Fprintln(w, "the directory has no configuration of the cell yet: start it and run cell prepare again")
			}
			return nil
		})
	}
	return c
}

// placeInCell places a tenant and writes its row in the cell's own database.
func (a *app) placeInCell(cmd *cobra.Command, fl *cellFlags, tenant cells.TenantID, want cells.CellID) error {
	fl.columns = []string{"tenant"}
	cell, end, err := a.openCell(cmd.Context(), fl)
	if err != nil {
		return err
	}
	defer end()
	if want != "" && want != cell.Name {
		return usagef("--cell is %s and CELL is %s", want, cell.Name)
	}
	won, err := cell.Place(cmd.Context(), tenant)
	if err != nil {
		return err
	}
	return a.print(won, func(w io.Writer) error {
		verb := "is in"
		if won.Created {
			verb = "placed in"
		}
		_, err := fmt.Fprintf(w, "%s %s %s, which holds it\n", won.Tenant, verb, won.Cell)
		return err
	})
}

func (a *app) scimTokenCmd() *cobra.Command {
	c := &cobra.Command{Use: "scim-token", Short: "Tokens of identity providers that provision people", Args: cobra.NoArgs}
	var cell string
	made := &cobra.Command{
		Use: "new --cell CELL", Short: "Make a SCIM token that names its cell, offline; prints it once, with its SHA-256", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			token, sum, err := checks.NewSCIMToken(cells.CellID(cell))
			if err != nil {
				return usagef("--cell: %w", err)
			}
			return a.print(map[string]string{"token": token, "sha256": sum.String()}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "token  %s\nsha256 %s\n", token, sum)
				return err
			})
		},
	}
	made.Flags().StringVar(&cell, "cell", "", "the cell that accepts it, and no other does")
	_ = made.MarkFlagRequired("cell")
	c.AddCommand(made)
	return c
}
