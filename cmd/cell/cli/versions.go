// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
)

func (a *app) versionsCmd() *cobra.Command {
	list := a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
		list, err := cl.Versions(ctx)
		if err != nil {
			return err
		}
		if list == nil {
			list = []provision.Version{}
		}
		return a.print(list, func(w io.Writer) error {
			rows := [][]string{{"VERSION", "IMAGE", "COMMAND", "ADDED", "BY"}}
			for _, v := range list {
				rows = append(rows, []string{v.Name, dash(v.Image), dash(strings.Join(v.Command, " ")), ago(v.CreatedAt), dash(v.Actor)})
			}
			return table(w, rows)
		})
	})
	c := &cobra.Command{
		Use: "versions", Short: "The catalogue of versions that cells are pinned to", Args: cobra.NoArgs,
		Long: `The catalogue says how the processes of each version are run: by a command on this
machine, by an image on Kubernetes. A version that is there is not changed under the
cells that are pinned to it: they keep what they have until they are upgraded.`,
		RunE: list,
	}
	c.AddCommand(a.versionAddCmd(), &cobra.Command{Use: "list", Short: "List the catalogue", Args: cobra.NoArgs, RunE: list}, a.versionRemoveCmd())
	return c
}

func (a *app) versionAddCmd() *cobra.Command {
	var req api.VersionRequest
	c := &cobra.Command{
		Use:   "add VERSION [-- COMMAND ARG...]",
		Short: "Add a version to the catalogue",
		Long: `Add a version: with the command that runs it, with an image, or both. In the command
{listen}, {store}, {dsn}, {cell}, {version} and {state} are replaced; on Kubernetes no
command keeps the image's own.`,
		Example: "  cell versions add v2 -- /opt/memory-v2 --listen {listen} --store {store} --dsn {dsn}\n  cell versions add v2 --image registry.example/memory@sha256:...",
		Args:    cobra.MinimumNArgs(1),
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			req.Command, req.Actor = args[1:], actor()
			if len(req.Command) == 0 && req.Image == "" {
				return usagef("a version has a command (after --), an --image, or both")
			}
			v, err := cl.PutVersion(ctx, args[0], req)
			if err != nil {
				return err
			}
			return a.print(v, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "version %s is in the catalogue\n", v.Name)
				return err
			})
		}),
	}
	c.Flags().StringVar(&req.Image, "image", "", "container image, best with its digest")
	c.Flags().BoolVar(&req.Replace, "replace", false, "in the place of one of that name that says something else")
	return c
}

func (a *app) versionRemoveCmd() *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use: "remove VERSION", Short: "Remove a version to which no cell is pinned", Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.completeVersions(cmd, args, prefix)
		},
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if err := a.confirm(yes, "Removing version "+args[0]+" from the catalogue."); err != nil {
				return err
			}
			if err := cl.RemoveVersion(ctx, args[0], actor()); err != nil {
				return err
			}
			return a.print(map[string]string{"removed": args[0]}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "version %s is removed\n", args[0])
				return err
			})
		}),
	}
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return c
}
