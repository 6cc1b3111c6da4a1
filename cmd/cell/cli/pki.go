// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
)

func (a *app) pkiCmd() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "pki",
		Short: "The fleet's own certificate authority",
		Long: `The processes of a fleet talk to each other over mutual TLS 1.3 with certificates
of the fleet's own CA. Each certificate names exactly one cell, edge, directory, provisioner or
operator, as cell://<fleet>/<role>/<name>.

The CA's folder holds its private key: keep it where you operate the fleet from,
not on the cells.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.PersistentFlags().StringVar(&dir, "dir", "", "the CA's folder; default: pki in the fleet's state folder")
	folder := func() string {
		if dir == "" {
			return a.statePath("pki")
		}
		return dir
	}
	c.AddCommand(a.pkiInit(folder), a.pkiIssue(folder), a.pkiRenew(folder), a.pkiRevoke(folder), a.pkiList(folder), a.pkiShow(folder), a.pkiReceiptKey(folder))
	return c
}

func (a *app) pkiInit(folder func() string) *cobra.Command {
	var fleet string
	c := &cobra.Command{
		Use: "init", Short: "Make a new CA for a fleet", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ca, err := pki.NewAuthority(folder(), fleet, pki.Options{})
			if err != nil {
				return err
			}
			return a.print(map[string]string{"fleet": ca.Fleet(), "ca": ca.CAFile(), "revoked": ca.RevokedFile()}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "made the CA of fleet %s in %s\nnext: cell pki issue cell <name>\n", ca.Fleet(), folder())
				return err
			})
		},
	}
	c.Flags().StringVar(&fleet, "name", "dev", "the fleet's name, [a-z0-9-]{1,32}")
	return c
}

func (a *app) pkiIssue(folder func() string) *cobra.Command {
	var out string
	var lifetime time.Duration
	c := &cobra.Command{
		Use:   "issue ROLE NAME",
		Short: "Issue a key and certificate for a cell, edge, directory, operator or provisioner",
		Args:  cobra.ExactArgs(2), ValidArgs: []string{"cell", "edge", "directory", "operator"},
		RunE: func(_ *cobra.Command, args []string) error {
			id, err := identityArg(args)
			if err != nil {
				return err
			}
			ca, err := pki.LoadAuthority(folder(), pki.Options{})
			if err != nil {
				return err
			}
			is, err := ca.Issue(id, pki.IssueOptions{Dir: out, Lifetime: lifetime})
			if err != nil {
				return err
			}
			return a.printIssued(is)
		},
	}
	c.Flags().StringVar(&out, "out", ".", "folder for the key and the certificate")
	c.Flags().DurationVar(&lifetime, "lifetime", pki.DefaultLifetime, "how long the certificate is valid")
	return c
}

func identityArg(args []string) (channel.Identity, error) {
	id := channel.Identity{Role: channel.Role(args[0]), Name: args[1]}
	if !id.Role.Valid() {
		return id, usagef("role %q; want cell, edge, directory, operator or provisioner", args[0])
	}
	if err := cells.CellID(id.Name).Validate(); err != nil {
		return id, &usageError{err}
	}
	return id, nil
}

func (a *app) printIssued(is pki.Issued) error {
	return a.print(is, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s\n  certificate %s\n  key         %s\n  valid until %s\n", is.Identity, is.CertFile, is.KeyFile, is.NotAfter.Format(time.RFC3339))
		return err
	})
}

func (a *app) pkiRenew(folder func() string) *cobra.Command {
	var lifetime time.Duration
	c := &cobra.Command{
		Use:   "renew CERT KEY",
		Short: "Replace a certificate by a new one for the same identity and key; no restart needed",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			ca, err := pki.LoadAuthority(folder(), pki.Options{})
			if err != nil {
				return err
			}
			is, err := ca.Renew(args[0], args[1], channel.Identity{}, lifetime)
			if err != nil {
				return err
			}
			return a.printIssued(is)
		},
	}
	c.Flags().DurationVar(&lifetime, "lifetime", pki.DefaultLifetime, "how long the certificate is valid")
	return c
}

func (a *app) pkiRevoke(folder func() string) *cobra.Command {
	var why string
	var yes bool
	c := &cobra.Command{
		Use:   "revoke SERIAL",
		Short: "Stop a certificate from counting, at once, also for open connections",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			ca, err := pki.LoadAuthority(folder(), pki.Options{})
			if err != nil {
				return err
			}
			if err := a.confirm(yes, "Revoking "+args[0]+" cuts its holder off from the fleet."); err != nil {
				return err
			}
			if err := ca.Revoke(args[0], why); err != nil {
				return err
			}
			return a.print(map[string]string{"revoked": args[0]}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "revoked %s; give %s to every process (--channel-revoked)\n", args[0], ca.RevokedFile())
				return err
			})
		},
	}
	c.Flags().StringVar(&why, "reason", "", "why; kept as a comment in the list")
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}

func (a *app) pkiList(folder func() string) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List what was issued", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ca, err := pki.LoadAuthority(folder(), pki.Options{})
			if err != nil {
				return err
			}
			list, err := ca.List()
			if err != nil {
				return err
			}
			return a.print(list, func(w io.Writer) error {
				rows := [][]string{{"IDENTITY", "SERIAL", "VALID UNTIL", "CERTIFICATE"}}
				for _, is := range list {
					rows = append(rows, []string{is.Identity.String(), is.Serial, is.NotAfter.Format(time.DateOnly), is.CertFile})
				}
				return table(w, rows)
			})
		},
	}
}

func (a *app) pkiShow(folder func() string) *cobra.Command {
	return &cobra.Command{
		Use:   "show CERT",
		Short: "Show a certificate, and why the channel would refuse it",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			info, err := pki.Inspect(args[0], filepath.Join(folder(), pki.CACertFile), filepath.Join(folder(), pki.RevokedFile), time.Now())
			if err != nil {
				return err
			}
			err = a.print(info, func(w io.Writer) error {
				fmt.Fprintf(w, "identity     %s\nserial       %s\nissuer       %s\nvalid        %s to %s\nclient       %t\nserver       %t\nsha256       %s\n",
					dash(info.Identity), info.Serial, info.Issuer, info.NotBefore.Format(time.RFC3339), info.NotAfter.Format(time.RFC3339), info.Client, info.Server, info.SHA256)
				for _, p := range info.Problems {
					fmt.Fprintf(w, "PROBLEM      %s\n", p)
				}
				return nil
			})
			if err == nil && len(info.Problems) > 0 {
				err = fmt.Errorf("%s would be refused: %s", args[0], strings.Join(info.Problems, "; "))
			}
			return err
		},
	}
}
