// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	deployclient "github.com/cloister-dev/cloister/directory/deploy/client"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member"
	checks "github.com/cloister-dev/cloister/member/tenancy"
	"github.com/cloister-dev/cloister/services/memory"
)

// cellRows is what the process is of a deployment that is one cell, or could be: the
// cell's own rows, and the check. A service on SQLite has none.
type cellRows struct {
	issuers bearers
	people  *people
	rows    *tenancypg.Store
	config  checks.Config
}

// boot is what has to be so before the stores are opened. With CELL set that is
// Postgres and verified credentials; anything else would serve without the check.
func (o *options) boot(log *slog.Logger) (s checks.Settings, b bearers, err error) {
	if s, err = checks.FromEnv(); err != nil {
		return s, b, err
	}
	if s.Cell == "" {
		if o.issuers != "" {
			return s, b, fmt.Errorf("%w: --issuers is for a process with CELL set", cells.ErrInvalid)
		}
		return s, b, nil
	}
	if o.store != "postgres" {
		return s, b, fmt.Errorf("%w: CELL is %s and the store is %s; a cell needs --store postgres", cells.ErrInvalid, s.Cell, o.store)
	}
	if o.issuers == "" {
		return s, b, fmt.Errorf("%w: CELL is %s and nothing verifies credentials; set --issuers", cells.ErrInvalid, s.Cell)
	}
	if s.Configuration.SCIM && s.SCIMTokensFile == "" {
		return s, b, fmt.Errorf("%w: CELL_SCIM is on and CELL_SCIM_TOKENS_FILE is not set; nobody could be provisioned", cells.ErrInvalid)
	}
	if b, err = readIssuers(o.issuers, log); err != nil {
		return s, b, err
	}
	if err := b.Issuers().Configure(&s.Configuration); err != nil {
		b.close()
		return s, bearers{}, err
	}
	return s, b, nil
}

// openCell makes the rows' tables where they are missing. The stores say which
// deployment they are and where its objects lie. Nil for SQLite.
func (o *options) openCell(ctx context.Context, s checks.Settings, is bearers, dep *deployment, log *slog.Logger) (_ *cellRows, err error) {
	if dep == nil {
		return nil, nil
	}
	rows, err := tenancypg.Open(o.dsn, tenancypg.WithLogger(log))
	if err != nil {
		return nil, err
	}
	d := &cellRows{issuers: is, rows: rows}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	if err := rows.Install(ctx); err != nil {
		return nil, err
	}
	d.config = checks.Config{Cell: s.Cell, Store: rows, CacheFor: s.CacheFor, MaxStale: s.MaxStale, RouterTimeout: s.RouterTimeout, Build: o.build,
		Settings: o.runtime(), Log: log}
	if s.Cell == "" {
		return d, nil
	}
	at := dep.stores.Location()
	s.Configuration.DeploymentID, s.Configuration.Bucket, s.Configuration.Prefix = string(dep.id), at.Bucket, at.Prefix
	if d.config.Fingerprint, err = s.Configuration.Fingerprint(); err != nil {
		return nil, err
	}
	if d.people, err = openPeople(ctx, o.dsn, s, is, log); err != nil {
		return nil, err
	}
	d.config.Router = nobody{}
	if s.RouterURL != "" || s.RouterToken != "" {
		c, err := deployclient.NewCell(s.Cell, s.RouterURL, s.RouterToken)
		if err != nil {
			return nil, fmt.Errorf("CELL_ROUTER_URL, CELL_ROUTER_TOKEN: %w", err)
		}
		d.config.Router = c.Router()
	}
	return d, nil
}

// runtime are the settings that the cells of one service are meant to share and that no
// fingerprint has. Of where events go there is only the kind: an address may hold a
// password.
func (o *options) runtime() tenancy.Settings {
	kind, _, _ := strings.Cut(o.publish.target, ":")
	return tenancy.Settings{
		"publish": kind, "publish-public-only": strconv.FormatBool(o.publish.publicOnly), "drain": o.drain.String(),
		"fault-percent": strconv.FormatFloat(o.fault.percent, 'g', -1, 64), "fault-delay": o.fault.delay.String(), "verbose": strconv.FormatBool(o.verbose),
	}
}

func (d *cellRows) close() {
	if d != nil {
		d.people.close()
		d.rows.Close()
	}
}

// nobody is the directory of a process that was not told where it is: it serves
// what the cell holds, and places nothing.
type nobody struct{}

var errNobody = fmt.Errorf("%w: CELL_ROUTER_URL and CELL_ROUTER_TOKEN are not set", cells.ErrUnavailable)

func (nobody) Place(context.Context, checks.PlaceCall) (checks.Winner, error) {
	return checks.Winner{}, errNobody
}
func (nobody) Attaching(context.Context, cells.CellID) (bool, error) { return false, errNobody }

// start puts the triggers in order (a table that cannot be locked now is logged, and
// left until the next start) and starts the check. A nil deployment checks nothing.
func (d *cellRows) start(ctx context.Context) (*checks.Process, error) {
	if d == nil {
		return nil, nil
	}
	if _, err := d.rows.EnsureTriggers(ctx); err != nil {
		return nil, err
	}
	p, err := checks.New(d.config)
	if err != nil {
		return nil, err
	}
	if err := p.Start(ctx); err != nil {
		return nil, errors.Join(err, leave(ctx, p))
	}
	d.people.begin(p)
	return p, nil
}

func leave(ctx context.Context, p *checks.Process) error {
	if p == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	return p.Close(ctx)
}

// guard puts the check around a handler: the tenant's check in a cell, the gate alone
// without CELL, nothing for a store that no cell can have.
func (d *cellRows) guard(p *checks.Process, next http.Handler) http.Handler {
	if p == nil {
		return next
	}
	if p.Cell() == "" {
		return p.Handler(next, checks.HTTP{Classify: func(*http.Request) checks.Class { return checks.Free }})
	}
	return d.people.beside(p, p.Handler(next, checks.HTTP{Classify: memory.Classify, Resolve: d.people.resolve}))
}

// guardMember puts the check outside of a member's gate: the gate on the process and
// the credential come before whatever the edge says. Health is the member's, whose
// readiness has the check's in it.
func (d *cellRows) guardMember(p *checks.Process, m *member.Member, api http.Handler) http.Handler {
	inner := m.Handler(api)
	if p == nil {
		return inner
	}
	outer := d.guard(p, inner)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, routed := r.Header[http.CanonicalHeaderKey(cells.HeaderTenant)]
		if !routed && (r.URL.Path == member.PathLive || r.URL.Path == member.PathReady) {
			m.HealthHandler().ServeHTTP(w, r)
			return
		}
		outer.ServeHTTP(w, r)
	})
}

// aside runs a worker, which stands aside while the process is gated.
func aside(ctx context.Context, p *checks.Process, run func(context.Context) error) error {
	if p == nil {
		return run(ctx)
	}
	return p.RunWorkers(ctx, run)
}

// standsAside is a member's relay that stands aside.
type standsAside struct {
	member.Runner
	p *checks.Process
}

func (s standsAside) Run(ctx context.Context) error { return aside(ctx, s.p, s.Runner.Run) }

// checkedTenant is the tenant that the check let through.
func checkedTenant(r *http.Request) (cells.TenantID, error) {
	c, ok := checks.FromContext(r.Context())
	if !ok {
		return "", &cells.Answer{Code: cells.CodeTenancyRefused, Detail: "the request was not checked"}
	}
	return c.Tenant, nil
}
