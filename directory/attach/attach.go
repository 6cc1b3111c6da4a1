// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/stores"
)

// Directory is a router's operator API; a [*client.Operator] of directory/deploy/client
// is one.
type Directory interface {
	Directory(ctx context.Context) (deploy.View, error)
	Register(ctx context.Context, cell cells.CellID, r wire.Register) (deploy.Cell, error)
	Attach(ctx context.Context, cell cells.CellID, r wire.Attach) (deploy.Cell, error)
	Held(ctx context.Context, cell cells.CellID, r wire.Held) (deploy.Cell, error)
	RaiseMode(ctx context.Context, cell cells.CellID, r wire.Mode) (deploy.Cell, error)
	Serve(ctx context.Context, cell cells.CellID, r wire.Serve) (deploy.Cell, error)
	Config(ctx context.Context, cell cells.CellID, r wire.Config) (deploy.Cell, error)
	Addresses(ctx context.Context, cell cells.CellID, r wire.Addresses) (deploy.Cell, error)
	Place(ctx context.Context, r wire.Place) (wire.Winner, error)
	Placements(ctx context.Context, cell cells.CellID, after cells.TenantID, limit int) (wire.Placements, error)
}

// Prober asks a process which deployment it is; a [*probe.Client] does.
type Prober interface {
	DeploymentID(ctx context.Context, address string) (stores.DeploymentID, error)
}

// Account is a person's account for which the cell's SCIM holds no active row, or one
// that ends in nobody.
type Account struct {
	ID string `json:"id"`
	// Why says what is missing.
	Why string `json:"why"`
}

// People is a cell's sign-in. A cell without one has none; a cell with SCIM on cannot
// be attached without it.
type People interface {
	// Tokens says what is wrong with the SCIM tokens and rows that the cell holds: a
	// token that does not name the cell (on the first cell one may name none), or on a
	// later cell that is new a user's row. Nil when nothing is.
	Tokens(ctx context.Context, first, fresh bool) ([]string, error)
	// Unprovisioned lists the live accounts that SCIM would refuse.
	Unprovisioned(ctx context.Context) ([]Account, error)
	// Revoke ends the tokens of accounts that were issued before the given time.
	Revoke(ctx context.Context, accounts []Account, before time.Time) error
}

// Fences are the fences of the cell's stores, where it has any; a guard's keeper is one.
type Fences interface {
	OpenFence(ctx context.Context, o cells.FenceOrder) error
	CloseFence(ctx context.Context, o cells.FenceOrder) error
}

// Peer is another cell: its rows and its stores.
type Peer struct {
	Cell   cells.CellID
	Rows   tenancy.Store
	Stores *stores.Set
}

// Cell is the cell that a command is about. Name, Directory, Rows and Stores are
// required.
type Cell struct {
	Name      cells.CellID
	Directory Directory
	Rows      tenancy.Store
	Stores    *stores.Set
	// Prober is needed by Attach.
	Prober Prober
	// Config is the command's own configuration of the cell; its stores are filled in.
	Config tenancy.Config
	People People // nil without sign-in
	Fences Fences // nil for stores without fences
	// Peers are the other cells, for the attach of a later one.
	Peers []Peer

	// Wait is the time for all that a command waits for; 10 min by default.
	Wait time.Duration
	// ModeCache is how long the processes use the mode that they read (their
	// CELL_TENANCY_MODE_CACHE_S), RequestDeadline how long their longest request lasts;
	// 5 s and 60 s by default.
	ModeCache, RequestDeadline time.Duration
	// Alive is how old the heartbeat of a live process may be; 15 s by default.
	Alive time.Duration
	// Poll is the pause between looks; 500 ms by default.
	Poll time.Duration

	// Actor is recorded in the audit.
	Actor string
	// Tell, if set, hears of each step, before a wait of what is waited for.
	Tell func(step Step, detail string)
	// Done, if set, is called when a step is persisted. An error ends the command there,
	// as a crash would.
	Done func(ctx context.Context, step Step) error
}

// Step names a step of a command.
type Step string

// The steps.
const (
	StepChecked    Step = "checked"    // every refusal has passed
	StepNonces     Step = "nonces"     // the stores hold nonces
	StepRegistered Step = "registered" // the directory has the cell
	StepRows       Step = "rows"       // first, mode and own row are written
	StepDirectory  Step = "directory"  // the directory's transaction is made
	StepHeld       Step = "held"       // the tenancy rows are written
	StepRecorded   Step = "recorded"   // the directory records enforced
	StepEnforced   Step = "enforced"   // the cell's mode is enforced
	StepReported   Step = "reported"   // every process has had time to follow
	StepPeople     Step = "people"     // everybody is provisioned
	StepTriggers   Step = "triggers"   // every table is guarded
	StepQuiet      Step = "quiet"      // no transaction could have read recording
	StepPlaced     Step = "placed"     // what was written meanwhile is placed
	StepServing    Step = "serving"    // the cell serves
	StepNext       Step = "next"       // the directory has the next configuration
	StepSelf       Step = "self"       // the own row is written
	StepFences     Step = "fences"     // the fences are raised
	StepMode       Step = "mode"       // the mode is raised
	StepEnded      Step = "ended"      // one of two configurations is left
)

func (c *Cell) check() error {
	if err := c.Name.Validate(); err != nil {
		return fmt.Errorf("CELL: %w", err)
	}
	if c.Directory == nil || c.Rows == nil || c.Stores == nil {
		return fmt.Errorf("%w: attach: directory, rows and stores are needed", cells.ErrInvalid)
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&c.Wait, 10 * time.Minute}, {&c.ModeCache, 5 * time.Second}, {&c.RequestDeadline, time.Minute}, {&c.Alive, 15 * time.Second}, {&c.Poll, 500 * time.Millisecond}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 {
			return fmt.Errorf("%w: attach: a duration is negative", cells.ErrInvalid)
		}
	}
	return nil
}

// refuse is a refusal that no repetition changes.
func refuse(format string, args ...any) error {
	return &cells.Answer{Code: cells.CodeConflict, Detail: fmt.Sprintf(format, args...)}
}

func (c *Cell) tell(s Step, format string, args ...any) {
	if c.Tell != nil {
		c.Tell(s, fmt.Sprintf(format, args...))
	}
}

// done says that a step is persisted.
func (c *Cell) done(ctx context.Context, s Step, format string, args ...any) error {
	c.tell(s, format, args...)
	if c.Done != nil {
		return c.Done(ctx, s)
	}
	return nil
}

// known is what every command on stores begins with: the cell's row, nil when it is
// not registered, and the deployment id of the stores, which must be the row's.
func (c *Cell) known(ctx context.Context) (v deploy.View, row *deploy.Cell, id string, err error) {
	if err := c.check(); err != nil {
		return v, nil, "", err
	}
	got, err := c.Stores.Deployment(ctx)
	if err != nil {
		return v, nil, "", fmt.Errorf("which deployment the stores are: %w", err)
	}
	if v, err = c.Directory.Directory(ctx); err != nil {
		return v, nil, "", err
	}
	id = string(got)
	if row = v.Cell(c.Name); row != nil && row.DeploymentID != id {
		return v, nil, "", refuse("the stores are of deployment %s, and cell %s is deployment %s; look at CELL and at the stores' addresses", id, c.Name, row.DeploymentID)
	}
	at := c.Stores.Location()
	c.Config.DeploymentID, c.Config.Bucket, c.Config.Prefix = id, at.Bucket, at.Prefix
	if row != nil && (row.Bucket != at.Bucket || row.Prefix != at.Prefix) {
		return v, nil, "", refuse("the command stores at %s, and cell %s at bucket %q prefix %q; that never changes", at, c.Name, row.Bucket, row.Prefix)
	}
	return v, row, id, nil
}

func (c *Cell) registered(ctx context.Context) (deploy.View, *deploy.Cell, error) {
	v, row, _, err := c.known(ctx)
	if err == nil && row == nil {
		err = refuse("cell %s is not registered; run cell prepare", c.Name)
	}
	return v, row, err
}

// live lists the live processes, as their heartbeats say.
func (c *Cell) live(ctx context.Context) ([]tenancy.Heartbeat, error) {
	return c.Rows.Heartbeats(ctx, c.Alive)
}

// matching refuses live processes whose configuration is neither value of the own row.
// Those that report none are passed over.
func matching(live []tenancy.Heartbeat, self *tenancy.Self, what string) error {
	var bad []string
	for _, h := range live {
		if h.Fingerprint != nil && self.Match(*h.Fingerprint) == tenancy.MatchNone {
			bad = append(bad, fmt.Sprintf("%s (%s)", h.Instance, strings.Join(h.Fingerprint.Differs(*self.Current), ", ")))
		}
	}
	if bad != nil {
		return refuse("%s runs another configuration than its cell's row says: %s; restart it with the cell's, or see cell update", what, strings.Join(bad, ", "))
	}
	return nil
}

// named refuses live processes that do not run with the cell's name.
func (c *Cell) named(live []tenancy.Heartbeat) error {
	var bad []string
	for _, h := range live {
		switch h.Cell {
		case c.Name:
		case "":
			bad = append(bad, h.Instance+" (CELL is not set)")
		default:
			bad = append(bad, fmt.Sprintf("%s (CELL is %s)", h.Instance, h.Cell))
		}
	}
	if bad != nil {
		return refuse("live processes do not run with CELL=%s: %s; roll it out to all of them", c.Name, strings.Join(bad, ", "))
	}
	return nil
}

// pause waits for the time between two looks, at most until the deadline.
func (c *Cell) pause(ctx context.Context, until time.Time) error {
	t := time.NewTimer(max(0, min(c.Poll, time.Until(until))))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// every tenant that any store names, and the configured ones of the own row.
func (c *Cell) everyTenant(ctx context.Context, self *tenancy.Self) ([]cells.TenantID, error) {
	names, err := c.Rows.TenantsOfEveryTable(ctx)
	if err != nil {
		return nil, err
	}
	more, err := c.Stores.Tenants(ctx)
	if err != nil {
		return nil, err
	}
	names = append(names, more...)
	for _, f := range []*tenancy.Fingerprint{self.Current, self.Next} {
		if f != nil {
			names = append(names, f.Get(tenancy.FieldTenants)...)
		}
	}
	slices.Sort(names)
	var out []cells.TenantID
	for _, n := range slices.Compact(names) {
		if tenancy.Everybody(n) {
			continue
		}
		if err := deploy.CheckTenant(cells.TenantID(n)); err != nil {
			return nil, refuse("the stores hold rows of %q, which is no tenant's id and can be placed nowhere (%v); rename or remove them", n, err)
		}
		out = append(out, cells.TenantID(n))
	}
	return out, nil
}

// configured are the configured tenants of both values.
func configured(self *tenancy.Self) []cells.TenantID {
	var out []cells.TenantID
	for _, f := range []*tenancy.Fingerprint{self.Current, self.Next} {
		if f == nil {
			continue
		}
		for _, t := range f.Get(tenancy.FieldTenants) {
			out = append(out, cells.TenantID(t))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
