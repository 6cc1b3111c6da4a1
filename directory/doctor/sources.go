// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // driver pgx
	_ "modernc.org/sqlite"             // driver sqlite

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard"
	guardpg "github.com/cloister-dev/cloister/guard/postgres"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/transfer"
	transferpg "github.com/cloister-dev/cloister/transfer/postgres"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"
)

// Sources is what is examined. A nil or empty one is not there: checks of a scope without
// any are left out.
type Sources struct {
	// Fleet is the operator listener of the fleet's directory.
	Fleet *client.Client
	// FleetErr says why Fleet is nil although there is a fleet: its checks are not run.
	FleetErr error
	// Routers are admin listeners, http(s)://host:port.
	Routers []Router
	// Stores are the cells' databases.
	Stores []Store
	// Certificates are files; CA and Revoked are what they are judged by.
	Certificates []string
	CA, Revoked  string
	// Deployments is the directory of deployments.
	Deployments Deployments
	// RouterToken is the credential that a deployment calls its router with; "" is none.
	RouterToken string
}

// Router is one replica.
type Router struct{ Name, Admin string }

// Store is a cell's database: sqlite:PATH or postgres://…
type Store struct {
	Cell    cells.CellID
	Address string
	// Schema is the guard's on Postgres; "" is cell.
	Schema string
}

// Deployments is what the doctor reads of a [deploy.Store].
type Deployments interface {
	deploy.Reader
	Placements(ctx context.Context, f deploy.PlacementFilter) ([]deploy.Placement, error)
}

func (s *Sources) has(scope Scope) bool {
	switch scope {
	case ScopeFleet:
		return s.Fleet != nil || s.FleetErr != nil
	case ScopeDeployments:
		return s.Deployments != nil
	}
	return len(s.Certificates) > 0 || s.CA != "" || s.RouterToken != ""
}

// exam is one examination: what was read is kept, so that the checks see the same.
type exam struct {
	src Sources
	o   Options

	asked    bool
	dirErr   error
	cellList []api.Cell
	members  []api.Member
	opened   map[cells.CellID]*opened
	fences   map[cells.CellID][]guard.Fence
	view     *deploy.View
}

// opened is an open database.
type opened struct {
	err    error
	db     *sql.DB
	pg     bool
	schema string
	// address is where it is; it may have a password in it.
	address string
	keeper  guard.Keeper
	rows    *tenancypg.Store
}

func (x *exam) close() {
	for _, o := range x.opened {
		if o.rows != nil {
			o.rows.Close()
		}
		if c, ok := o.keeper.(interface{ Close() }); ok {
			c.Close()
		} else if c, ok := o.keeper.(interface{ Close() error }); ok {
			_ = c.Close()
		}
		if o.db != nil {
			_ = o.db.Close()
		}
	}
}

// directoryTimeout bounds the first question to the directory. One that does not answer it
// is asked nothing else.
const directoryTimeout = 5 * time.Second

func (x *exam) directory(ctx context.Context) (*client.Client, error) {
	if x.src.Fleet == nil {
		return nil, fmt.Errorf("the directory: %w", x.src.FleetErr)
	}
	if !x.asked {
		ctx, cancel := context.WithTimeout(ctx, directoryTimeout)
		defer cancel()
		x.asked = true
		if x.cellList, x.dirErr = x.src.Fleet.Cells(ctx); x.dirErr != nil {
			x.dirErr = fmt.Errorf("the directory: %w", x.dirErr)
		}
	}
	return x.src.Fleet, x.dirErr
}

func (x *exam) cells(ctx context.Context) ([]api.Cell, error) {
	cl, err := x.directory(ctx)
	if err != nil || x.cellList != nil {
		return x.cellList, err
	}
	list, err := cl.Cells(ctx)
	if err != nil {
		return nil, fmt.Errorf("the directory: %w", err)
	}
	x.cellList = append([]api.Cell{}, list...)
	return x.cellList, nil
}

func (x *exam) processes(ctx context.Context) ([]api.Member, error) {
	if x.members != nil {
		return x.members, nil
	}
	cl, err := x.directory(ctx)
	if err != nil {
		return nil, err
	}
	list, err := cl.Members(ctx)
	if err != nil {
		return nil, fmt.Errorf("the directory: %w", err)
	}
	x.members = list
	return list, nil
}

// routes reads all routes, tombstones included, anew.
func (x *exam) routes(ctx context.Context) (map[cells.TenantID]cells.TenantRoute, error) {
	cl, err := x.directory(ctx)
	if err != nil {
		return nil, err
	}
	out := map[cells.TenantID]cells.TenantRoute{}
	q := client.TenantQuery{Limit: api.MaxPage, Deleted: true}
	for {
		page, err := cl.Tenants(ctx, q)
		if err != nil {
			return nil, fmt.Errorf("the directory: %w", err)
		}
		for _, r := range page.Routes {
			out[r.TenantID] = r
		}
		if page.Next == "" {
			return out, nil
		}
		q.After = page.Next
	}
}

// move returns a move's record; ok is false when the directory has none.
func (x *exam) move(ctx context.Context, id cells.MoveID) (m api.Move, ok bool, _ error) {
	cl, err := x.directory(ctx)
	if err != nil {
		return m, false, err
	}
	m, err = cl.MoveByID(ctx, id)
	if errors.Is(err, cells.ErrNotFound) {
		return m, false, nil
	}
	if a := cells.AnswerOf(err); a != nil && a.Code == cells.CodeNotFound {
		return m, false, nil
	}
	if err != nil {
		return m, false, fmt.Errorf("the directory: %w", err)
	}
	return m, true, nil
}

// store opens a cell's database, for reading only.
func (x *exam) store(ctx context.Context, cell cells.CellID) (*opened, error) {
	if o, ok := x.opened[cell]; ok {
		return o, o.err
	}
	if x.opened == nil {
		x.opened = map[cells.CellID]*opened{}
	}
	o := &opened{err: fmt.Errorf("cell %s: its database is %w", cell, errNotGiven)}
	for _, s := range x.src.Stores {
		if s.Cell == cell {
			o = open(ctx, s)
		}
	}
	x.opened[cell] = o
	return o, o.err
}

func open(ctx context.Context, s Store) *opened {
	o := &opened{schema: s.Schema, address: s.Address}
	if o.schema == "" {
		o.schema = "cell"
	}
	scheme, rest, _ := strings.Cut(s.Address, ":")
	var err error
	switch scheme {
	case "sqlite":
		if o.db, err = sql.Open("sqlite", "file:"+(&url.URL{Path: rest}).EscapedPath()+"?mode=ro&_pragma=busy_timeout(5000)&_pragma=query_only(1)"); err == nil {
			o.keeper, err = guardsqlite.New(o.db)
		}
	case "postgres", "postgresql":
		o.pg = true
		if o.db, err = sql.Open("pgx", s.Address); err == nil {
			o.db.SetMaxOpenConns(3)
			o.keeper, err = guardpg.NewSQL(o.db, guardpg.WithSchema(o.schema))
		}
		if err == nil {
			o.rows, err = tenancypg.Open(s.Address, tenancypg.WithSchema(o.schema))
		}
	default:
		err = fmt.Errorf("%w: the address is neither sqlite:PATH nor postgres://…", cells.ErrInvalid)
	}
	if err == nil {
		c, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		err = o.db.PingContext(c)
	}
	if err != nil {
		o.err = fmt.Errorf("cell %s: its database: %s", s.Cell, hide(err, s.Address))
	}
	return o
}

// hide takes a connection string out of an error's text: it may have a password in it.
func hide(err error, address string) string {
	text := strings.ReplaceAll(err.Error(), address, "(its address)")
	if u, perr := url.Parse(address); perr == nil && u.User != nil {
		if p, ok := u.User.Password(); ok && p != "" {
			text = strings.ReplaceAll(text, p, "xxxxx")
		}
	}
	return strings.Join(strings.Fields(text), " ")
}

// fencesOf reads all fences of a cell.
func (x *exam) fencesOf(ctx context.Context, cell cells.CellID, fresh bool) ([]guard.Fence, error) {
	if f, ok := x.fences[cell]; ok && !fresh {
		return f, nil
	}
	o, err := x.store(ctx, cell)
	if err != nil {
		return nil, err
	}
	const page = 1000
	var out []guard.Fence
	for after := cells.TenantID(""); ; {
		list, err := o.keeper.Fences(ctx, after, page)
		if err != nil {
			return nil, fmt.Errorf("cell %s: its fences: %w", cell, err)
		}
		out = append(out, list...)
		if len(list) < page {
			break
		}
		after = list[len(list)-1].Tenant
	}
	if x.fences == nil {
		x.fences = map[cells.CellID][]guard.Fence{}
	}
	x.fences[cell] = out
	return out, nil
}

func (o *opened) leftovers(ctx context.Context) (transfer.Leftovers, error) {
	if o.pg {
		return transferpg.Leftovers(ctx, o.db, o.schema)
	}
	return transfersqlite.Leftovers(ctx, o.db)
}

// storeCells are the cells of the fleet whose databases are looked at: those that the
// directory knows, and those whose databases were given.
func (x *exam) storeCells(ctx context.Context) (ids []cells.CellID, err error) {
	seen := map[cells.CellID]bool{}
	for _, s := range x.src.Stores {
		ids, seen[s.Cell] = append(ids, s.Cell), true
	}
	list, err := x.cells(ctx)
	for _, c := range list {
		if !seen[c.ID] {
			ids = append(ids, c.ID)
		}
	}
	return ids, err
}
