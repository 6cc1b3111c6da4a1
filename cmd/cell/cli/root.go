// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// Exit codes of every command.
const (
	ExitOK      = 0
	ExitFailed  = 1 // something went wrong
	ExitUsage   = 2 // the command line is wrong; nothing was done
	ExitRefused = 3 // the control plane or a cell refused, with a code of the closed list
	ExitUnknown = 4 // the connection broke: the change may have been made; look before repeating
	ExitRolled  = 5 // the move ended with the source serving again; nothing was lost
	ExitForged  = 6 // a receipt does not verify
	ExitOpen    = 7 // a receipt verifies and does not end where it stops
)

// app carries what every command shares.
type app struct {
	out, err io.Writer
	in       io.Reader

	stateDir   string
	operator   string
	credential string
	json       bool
	verbose    bool
	version    string
	log        *slog.Logger
}

// usageError marks an error of the command line.
type usageError struct{ err error }

func (u *usageError) Error() string { return u.err.Error() }
func (u *usageError) Unwrap() error { return u.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// Main runs the command line and returns the exit code. It ends early, cleanly,
// on SIGINT and SIGTERM.
func Main(ctx context.Context, version string, args []string, in io.Reader, out, errw io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &app{in: in, out: out, err: errw, version: version}
	root := a.root()
	a.json = slices.Contains(args, "--json") // known before the flags are read: an error of theirs is JSON as well
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	return a.report(err)
}

func (a *app) report(err error) int {
	var usage *usageError
	code := ExitFailed
	var ill *unwell
	switch {
	case errors.As(err, &ill):
		code = ill.code
	case errors.As(err, &usage), wrongLine(err):
		code = ExitUsage
	case isUnknownOutcome(err):
		code = ExitUnknown
	case errors.Is(err, receipt.ErrUnverified):
		code = ExitForged
	case errors.Is(err, errOpen):
		code = ExitOpen
	case errors.Is(err, cells.ErrRolledBack):
		code = ExitRolled
	case cells.AnswerOf(err) != nil:
		code = ExitRefused
	}
	if a.json {
		doc := map[string]any{"error": wording(err), "exit": code}
		if ans := cells.AnswerOf(err); ans != nil {
			doc["code"], doc["retry"] = ans.Code, ans.Code.Retry()
		}
		_ = writeJSON(a.err, doc)
		return code
	}
	fmt.Fprintf(a.err, "cell: %s\n", wording(err))
	if code == ExitUsage && ill == nil {
		fmt.Fprintln(a.err, "cell: see --help")
	}
	if code == ExitUnknown {
		fmt.Fprintln(a.err, "cell: the change may have been made; look (cell which, cell moves) before you repeat it")
	}
	return code
}

// wrongLine recognises what cobra itself says of a command line.
func wrongLine(err error) bool {
	for _, begin := range []string{"required flag(s) ", "unknown command ", "unknown flag", "if any flags in the group ", "at least one of the flags in the group "} {
		if strings.HasPrefix(err.Error(), begin) {
			return true
		}
	}
	return false
}

// wording is the error without the names of sentinels, which say nothing to people.
func wording(err error) string {
	return strings.NewReplacer(cells.ErrInvalid.Error()+": ", "", cells.ErrUnavailable.Error()+": ", "").Replace(err.Error())
}

// tenantArg checks a tenant's id as the directory does.
func tenantArg(s string) (cells.TenantID, error) {
	t := cells.TenantID(s)
	if err := t.Validate(); err != nil {
		return "", &cells.Answer{Code: cells.CodeInvalidTenant, Detail: wording(err)}
	}
	return t, nil
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cell",
		Short: "Run a multi-tenant service as a fleet of isolated cells",
		Long: `cell runs a multi-tenant service as a fleet of isolated cells: each tenant lives
in exactly one cell, an edge takes each request there, and a tenant moves to
another cell while it is in use.

Start a fleet on this machine with "cell dev". Every other command finds it
through its state folder (--fleet, $CELL_FLEET_DIR, default .cell).`,
		SilenceUsage: true, SilenceErrors: true,
		Version: a.version,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			level := slog.LevelInfo
			if a.verbose {
				level = slog.LevelDebug
			}
			a.log = slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: level}))
			return nil
		},
	}
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	f := root.PersistentFlags()
	f.StringVar(&a.stateDir, "fleet", envOr("CELL_FLEET_DIR", ".cell"), "state folder of a fleet that cell dev started ($CELL_FLEET_DIR)")
	f.StringVar(&a.operator, "operator-url", os.Getenv("CELL_OPERATOR_URL"), "the directory's operator listener; default: the fleet's own ($CELL_OPERATOR_URL)")
	f.StringVar(&a.credential, "credential-file", os.Getenv("CELL_OPERATOR_CREDENTIAL_FILE"), "file with the operator credential; default: the fleet's own ($CELL_OPERATOR_CREDENTIAL_FILE)")
	f.BoolVar(&a.json, "json", false, "print JSON, errors included")
	f.BoolVarP(&a.verbose, "verbose", "v", false, "log more, to standard error")
	root.AddGroup(
		&cobra.Group{ID: "fleet", Title: "Run a fleet:"},
		&cobra.Group{ID: "tenants", Title: "Tenants and cells:"},
		&cobra.Group{ID: "deployments", Title: "Whole deployments as cells:"},
		&cobra.Group{ID: "moves", Title: "Moves:"},
		&cobra.Group{ID: "servers", Title: "Processes:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("fleet", a.devCmd(), a.doctorCmd(), a.pkiCmd(), a.benchCmd())
	add("tenants", a.cellsCmd(), a.versionsCmd(), a.placeCmd(), a.whichCmd(), a.limitCmd(), a.credentialCmd(), a.tenantsCmd(), a.explainCmd())
	add("deployments", a.prepareCmd(), a.attachCmd(), a.updateCmd(), a.restoreCmd(), a.eachCmd(), a.scimTokenCmd(), a.loginCmd(), a.botCmd())
	add("moves", a.moveCmd(), a.preflightCmd(), a.movesCmd(), a.campaignCmd(), a.rebalanceCmd(), a.rolloutCmd(), a.budgetCmd())
	add("servers", a.directoryCmd(), a.routerCmd(), a.provisionerCmd(), a.renderCmd(), a.sidecarCmd(), a.tableCmd())
	root.AddCommand(a.docsCmd(), a.versionCmd())
	wrapArgs(root)
	return root
}

func (a *app) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return a.print(map[string]string{"version": a.version}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "cell", a.version)
				return err
			})
		},
	}
}

// wrapArgs makes every command's argument errors usage errors.
func wrapArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return &usageError{err}
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
}

// actor names who runs the command, for the audit.
func actor() string {
	for _, k := range []string{"CELL_ACTOR", "SUDO_USER", "USER", "LOGNAME"} {
		if v := os.Getenv(k); v != "" {
			return v
		}
	}
	if u, err := user.Current(); err == nil && u.Username != "" {
		return u.Username
	}
	return fmt.Sprintf("uid-%d", os.Getuid())
}

// confirm asks before something that cannot be taken back. Without a terminal it
// refuses and names --yes.
func (a *app) confirm(yes bool, question string) error {
	if yes {
		return nil
	}
	f, ok := a.in.(*os.File)
	if !ok || !isTerminal(f) {
		return usagef("%s Answer with --yes", question)
	}
	fmt.Fprintf(a.err, "%s [y/N] ", question)
	var line string
	_, _ = fmt.Fscanln(a.in, &line)
	if s := strings.ToLower(line); s != "y" && s != "yes" {
		return errors.New("not confirmed; nothing was done")
	}
	return nil
}

func isTerminal(f *os.File) bool {
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

func (a *app) statePath(elem ...string) string {
	return filepath.Join(append([]string{a.stateDir}, elem...)...)
}
