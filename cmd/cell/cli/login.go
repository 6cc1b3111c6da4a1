// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy/login"
	"github.com/cloister-dev/cloister/internal/files"
)

func (a *app) loginCmd() *cobra.Command {
	var cfg login.Config
	var tenant, file string
	var noBrowser bool
	var wait, within time.Duration
	c := &cobra.Command{
		Use:   "login --host URL [--tenant TENANT]",
		Short: "Sign in at the cell that holds a tenant",
		Long: `Sign in at the provider of the cell that holds a tenant. The router at the host is asked
which cell that is; where it has no cells yet, or where there is no router, the host
itself is the one. While it refuses for its pace it is asked again for --wait; whatever
else it answers, no sign-in is begun.

The flow begins freshly at the cell's own host: the authorization code with PKCE, to a
listener on a loopback address, or with --device the device flow. The token is kept in a
file that only its owner can read, and is not printed.`,
		Args: cobra.NoArgs,
	}
	f := c.Flags()
	f.StringVar(&cfg.Host, "host", os.Getenv("CELL_HOST"), "address of the deployment, https://HOST[:PORT]; default: $CELL_HOST")
	f.StringVar(&tenant, "tenant", "", "the tenant to sign in to")
	f.BoolVar(&cfg.Device, "device", false, "use the device flow: sign in with a browser on another machine")
	f.StringVar(&cfg.Client, "client-id", "", "client at the provider; default: what the cell says")
	f.BoolVar(&noBrowser, "no-browser", false, "print the address, and open no browser")
	f.DurationVar(&wait, "wait", login.DefaultWait, "how long a router that is busy is asked again; 0 asks once")
	f.DurationVar(&within, "within", 5*time.Minute, "how long the sign-in may take")
	f.StringVar(&file, "token-file", "", "where the token is kept; default: cloister/tokens/HOST.json in the user's configuration folder")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if cfg.Host == "" {
			return usagef("--host is needed")
		}
		cfg.Tenant, cfg.Wait = cells.TenantID(tenant), wait
		if wait <= 0 {
			cfg.Wait = -1
		}
		cfg.Tell = func(s string) { a.log.Info(s) }
		cfg.Show = func(address, code string) {
			if code != "" {
				fmt.Fprintf(a.err, "Open %s\nand enter the code %s\n", address, code)
				return
			}
			fmt.Fprintf(a.err, "Sign in at %s\n", address)
			if !noBrowser {
				openBrowser(address)
			}
		}
		ctx, cancel := context.WithTimeoutCause(cmd.Context(), within, errors.New("nobody signed in in time (--within)"))
		defer cancel()
		return a.login(ctx, cfg, file)
	}
	return c
}

func (a *app) login(ctx context.Context, cfg login.Config, file string) error {
	t, err := login.Run(ctx, cfg)
	if err != nil {
		return err
	}
	if file == "" {
		dir, err := os.UserConfigDir()
		if err != nil {
			return usagef("--token-file is needed: %w", err)
		}
		host := strings.NewReplacer(":", "_", "/", "_").Replace(strings.SplitN(t.Host, "//", 2)[1])
		file = filepath.Join(dir, "cloister", "tokens", host+".json")
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			return err
		}
	}
	b, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return err
	}
	if err := files.Write(file, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("the token could not be kept: %w", err)
	}
	t.Access, t.Refresh = "", ""
	return a.print(struct {
		login.Token
		File string `json:"file"`
	}{t, file}, func(w io.Writer) error {
		who := t.Email
		if who == "" {
			who = t.Subject
		}
		_, err := fmt.Fprintf(w, "signed in at %s as %s; the token is in %s\n", t.Host, login.Printable(who), file)
		return err
	})
}

// openBrowser opens an address, where there is something to open it with.
func openBrowser(address string) {
	if x := opener(address); x != nil && x.Start() == nil {
		go func() { _ = x.Wait() }()
	}
}

// opener is what opens an address; nil for one that [login.CheckAddress] refuses, which
// is handed to nothing.
func opener(address string) *exec.Cmd {
	if login.CheckAddress(address) != nil {
		return nil
	}
	name, args := "xdg-open", []string{address}
	switch runtime.GOOS {
	case "darwin":
		name = "open"
	case "windows":
		name, args = "rundll32", []string{"url.dll,FileProtocolHandler", address}
	}
	return exec.Command(name, args...)
}
