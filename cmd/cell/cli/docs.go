// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/cloister-dev/cloister/directory/client"
)

// docsCmd writes the reference of every command; a test compares it with docs/cli.
func (a *app) docsCmd() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use: "docs", Short: "Write the reference of every command as Markdown", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := cmd.Root()
			root.DisableAutoGenTag = true
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			return doc.GenMarkdownTree(root, dir)
		},
	}
	c.Flags().StringVar(&dir, "dir", "docs/cli", "where to")
	return c
}

// isUnknownOutcome reports whether a change may have been made although the
// command failed.
func isUnknownOutcome(err error) bool {
	var u *client.UnknownOutcomeError
	return errors.As(err, &u)
}
