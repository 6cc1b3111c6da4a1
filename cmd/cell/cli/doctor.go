// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory/doctor"
	directoryopen "github.com/cloister-dev/cloister/directory/open"
)

// unwell is how the doctor ends when there is something to say: code is 1 or 2.
type unwell struct {
	code int
	text string
}

func (u *unwell) Error() string { return u.text }

// doctorFlags say where everything is.
type doctorFlags struct {
	options     doctor.Options
	routers     []string
	stores      []string
	certs       []string
	ca, revoked string
	deployments string
	list        bool
}

func (a *app) doctorCmd() *cobra.Command {
	var d doctorFlags
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Examine a fleet, or deployments that are cells, and say what is wrong",
		Long:  doctorHelp(),
		Example: "  cell doctor\n  cell doctor --only fences,watch-lag --json\n" +
			"  cell doctor --deployments postgres://router@db/directory --store a=@/run/secrets/a.dsn --store b=@/run/secrets/b.dsn --router http://10.0.0.5:8081",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.doctor(cmd.Context(), d) },
	}
	f := c.Flags()
	f.StringSliceVar(&d.options.Only, "only", nil, "run these checks alone")
	f.DurationVar(&d.options.Grace, "grace", 5*time.Minute, "for how long what moves leave may lie around; 0 is none")
	f.DurationVar(&d.options.Lag, "lag", 5*time.Second, "how long a router or a process may take to see a change of the routes")
	f.DurationVar(&d.options.Expiry, "expiry", 14*24*time.Hour, "how long before its end a certificate is a finding")
	f.Float64Var(&d.options.DefaultShare, "default-share", 0.5, "which share of all tenants may be in the default cell without a route, 0 to 1")
	f.DurationVar(&d.options.Timeout, "timeout", 30*time.Second, "bounds each check")
	f.StringArrayVar(&d.routers, "router", nil, "a router's admin listener, http(s)://host[:port]; repeat for each replica; default: the fleet's own")
	f.StringArrayVar(&d.stores, "store", nil, "a cell's database, CELL=sqlite:PATH, CELL=postgres://… or CELL=@FILE with one of them in the file; repeat; default: those of the fleet's own cells")
	f.StringArrayVar(&d.certs, "certs", nil, "a certificate file, or a folder with such; repeat; default: the fleet's own")
	f.StringVar(&d.ca, "ca", "", "the CA's certificate; default: the fleet's own")
	f.StringVar(&d.revoked, "revoked", "", "the list of revoked certificates; default: the fleet's own")
	f.StringVar(&d.deployments, "deployments", os.Getenv("CELL_DOCTOR_DEPLOYMENTS"), "the directory of deployments, "+directoryopen.Help+" ($CELL_DOCTOR_DEPLOYMENTS)")
	f.BoolVar(&d.list, "list", false, "list the checks and run none")
	_ = c.RegisterFlagCompletionFunc("only", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var ids []string
		for _, k := range doctor.Checks() {
			ids = append(ids, k.ID)
		}
		return ids, cobra.ShellCompDirectiveNoFileComp
	})
	return c
}

// doctorHelp is the help text; the checks say of themselves what they look at.
func doctorHelp() string {
	var b strings.Builder
	b.WriteString(`Run a list of checks. Each is ok, has findings, or was not run, with the reason: a check
is never ok for what it could not read. Nothing is changed, except that the directory of
deployments gets the tables of this build, as it would from a router of it.

What there is to look at is found in the state folder of a fleet that cell dev started, or
given by flags. Checks whose scope has nothing to look at are left out. The directory may
be down: the checks that need it are not run, the others are.

Exit code: 0 when all is well (notes do not count), 1 when there is an error or a warning,
2 when there is none and a check was not run, or the command line is wrong.

Checks:
`)
	for _, c := range doctor.Checks() {
		fmt.Fprintf(&b, "\n  %s (%s, %s)\n%s%s", c.ID, c.Scope, c.Worst, indented(c.Looks), indented("To do: "+c.Fix+"."))
	}
	return b.String()
}

// indented breaks a text into lines of at most about 90 characters.
func indented(text string) string {
	var b strings.Builder
	line := "     "
	for w := range strings.FieldsSeq(text) {
		if len(line)+1+len(w) > 90 {
			b.WriteString(line + "\n")
			line = "     "
		}
		line += " " + w
	}
	return b.String() + line + "\n"
}

func (a *app) doctor(ctx context.Context, d doctorFlags) error {
	if d.list {
		return a.listChecks()
	}
	if d.options.DefaultShare <= 0 || d.options.DefaultShare > 1 || d.options.Lag <= 0 || d.options.Timeout <= 0 || d.options.Grace < 0 || d.options.Expiry < 0 {
		return usagef("--default-share is above 0 and at most 1, the durations are positive")
	}
	if d.options.Grace == 0 {
		d.options.Grace = -1
	}
	src, closing, err := a.doctorSources(ctx, d)
	if err != nil {
		return err
	}
	defer closing()
	rep, err := doctor.Examine(ctx, src, d.options)
	if errors.Is(err, cells.ErrInvalid) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	if err := a.print(rep, func(w io.Writer) error { return printReport(w, rep) }); err != nil {
		return err
	}
	found, left := 0, 0
	for _, r := range rep.Results {
		for _, f := range r.Findings {
			if f.Severity != doctor.Note {
				found++
			}
		}
		found += r.More
		if r.Outcome == doctor.NotRun {
			left++
		}
	}
	if code := rep.Exit(); code != 0 {
		return &unwell{code, fmt.Sprintf("%d findings, %d of %d checks not run", found, left, len(rep.Results))}
	}
	return nil
}

func (a *app) listChecks() error {
	type row struct {
		ID    string          `json:"id"`
		Scope doctor.Scope    `json:"scope"`
		Worst doctor.Severity `json:"severity"`
		Looks string          `json:"looks"`
		Fix   string          `json:"fix"`
	}
	var list []row
	for _, c := range doctor.Checks() {
		list = append(list, row{c.ID, c.Scope, c.Worst, c.Looks, c.Fix})
	}
	return a.print(list, func(w io.Writer) error {
		rows := [][]string{{"CHECK", "SCOPE", "SEVERITY"}}
		for _, r := range list {
			rows = append(rows, []string{r.ID, string(r.Scope), string(r.Worst)})
		}
		return table(w, rows)
	})
}

func printReport(w io.Writer, rep doctor.Report) error {
	for _, r := range rep.Results {
		fmt.Fprintf(w, "%-8s %s\n", r.Outcome, r.Check)
		if r.Reason != "" && r.Outcome == doctor.NotRun {
			fmt.Fprintf(w, "         %s\n", r.Reason)
		} else if r.Reason != "" {
			fmt.Fprintf(w, "         not all of it was seen: %s\n", r.Reason)
		}
		for _, f := range r.Findings {
			about := strings.TrimSpace(string(f.Cell) + " " + string(f.Tenant))
			if about != "" {
				about += ": "
			}
			fmt.Fprintf(w, "         %-7s  %s%s\n                  %s\n", f.Severity, about, f.Message, f.Fix)
		}
		if r.More > 0 {
			fmt.Fprintf(w, "         and %d more\n", r.More)
		}
	}
	return nil
}

// doctorSources finds what there is to look at. What it returns is to be called at the end.
func (a *app) doctorSources(ctx context.Context, d doctorFlags) (src doctor.Sources, closing func(), err error) {
	closing = func() {}
	src.CA, src.Revoked, src.RouterToken = d.ca, d.revoked, os.Getenv("CELL_ROUTER_TOKEN")
	if err := a.fleetSources(&src, d); err != nil {
		return src, closing, err
	}
	for _, r := range d.routers {
		u, err := url.Parse(r)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return src, closing, usagef("--router %s: want http(s)://host[:port]", r)
		}
		src.Routers = append(src.Routers, doctor.Router{Name: u.Host, Admin: u.Scheme + "://" + u.Host})
	}
	for _, s := range d.stores {
		cell, address, ok := strings.Cut(s, "=")
		if !ok || cells.CellID(cell).Validate() != nil {
			return src, closing, usagef("--store: want CELL=ADDRESS") // the address may have a password in it
		}
		if file, ok := strings.CutPrefix(address, "@"); ok {
			b, err := os.ReadFile(file)
			if err != nil {
				return src, closing, err
			}
			address = strings.TrimSpace(string(b))
		}
		src.Stores = slices.DeleteFunc(src.Stores, func(o doctor.Store) bool { return o.Cell == cells.CellID(cell) })
		src.Stores = append(src.Stores, doctor.Store{Cell: cells.CellID(cell), Address: address})
	}
	for _, c := range d.certs {
		files, err := certFiles(c)
		if err != nil {
			return src, closing, err
		}
		src.Certificates = append(src.Certificates, files...)
	}
	if d.deployments != "" {
		if path, ok := strings.CutPrefix(d.deployments, "sqlite:"); ok {
			if _, err := os.Stat(path); err != nil { // it would be made
				return src, closing, fmt.Errorf("the directory of deployments: %w", err)
			}
		}
		l, err := directoryopen.Deployments(ctx, d.deployments, directoryopen.Options{AllowAsynchronous: true, Logger: slog.New(slog.DiscardHandler)})
		if errors.Is(err, cells.ErrInvalid) {
			return src, closing, usagef("--deployments: %s", wording(err))
		}
		if err != nil {
			return src, closing, err
		}
		src.Deployments, closing = l, func() { _ = l.Close() }
	}
	return src, closing, nil
}

// fleetSources fills in a fleet's: of the state folder, unless another directory is named.
func (a *app) fleetSources(src *doctor.Sources, d doctorFlags) error {
	if a.operator != "" {
		cl, err := a.client()
		src.Fleet = cl
		return err
	}
	info, err := fleet.ReadInfo(a.stateDir)
	switch {
	case errors.Is(err, fleet.ErrNoFleet) && (d.deployments != "" || len(d.certs) > 0 || d.ca != ""):
		return nil // it is not about a fleet
	case errors.Is(err, fleet.ErrStopped):
		src.FleetErr = err
	case err != nil:
		return err
	default:
		if src.Fleet, err = a.client(); err != nil {
			return err
		}
		if len(d.routers) == 0 {
			src.Routers = []doctor.Router{{Name: "edge", Admin: info.EdgeAdmin}}
		}
	}
	l := fleet.Layout{Dir: a.stateDir}
	if d.ca == "" {
		src.CA, src.Revoked = filepath.Join(l.PKI(), pki.CACertFile), filepath.Join(l.PKI(), pki.RevokedFile)
	}
	if len(d.certs) == 0 {
		if src.Certificates, err = certFiles(filepath.Dir(l.Certs("x"))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	stores, err := l.Stores()
	for _, cell := range slices.Sorted(maps.Keys(stores)) {
		src.Stores = append(src.Stores, doctor.Store{Cell: cell, Address: stores[cell]})
	}
	return err
}

// certFiles are the certificates of a file, or of a folder and those below it.
func certFiles(path string) (out []string, _ error) {
	err := filepath.WalkDir(path, func(p string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && (p == path || strings.HasSuffix(p, ".crt")) {
			out = append(out, p)
		}
		return err
	})
	return out, err
}
