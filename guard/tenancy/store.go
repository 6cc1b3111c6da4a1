// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// SQLState is the SQLSTATE with which Postgres refuses a row of a tenant that the
// cell does not hold. (The fence's own are LT001 and LT002.)
const SQLState = "LT010"

// MarkerSetting is the part of the session setting's name behind the guard's
// schema: <schema>.tenancy_checked = 'on' says that the session's process has run
// the tenancy check. It is no privilege: it tells writers that know of the check
// from those that do not.
const MarkerSetting = "tenancy_checked"

var (
	// ErrRefused: the stores refused a row of a tenant that the cell does not hold;
	// nothing was written. Clients get TENANCY_REFUSED.
	ErrRefused = errors.New("tenancy: the cell does not hold the tenant")
	// ErrOtherRow: a row that is never changed is there and says something else.
	// Returned by [Store.Prepare].
	ErrOtherRow = fmt.Errorf("%w: tenancy: a row is there and differs", cells.ErrConflict)
	// ErrMoved: the tenant's fence is closed here. Returned by [Store.HoldPlaced].
	ErrMoved = fmt.Errorf("%w: tenancy: the tenant's fence is closed here", cells.ErrUnavailable)
	// ErrNotMoved: the tenant's fence is not closed here. Returned by [Store.Unhold].
	ErrNotMoved = fmt.Errorf("%w: tenancy: the tenant's fence is not closed here", cells.ErrConflict)
	// ErrModeUnknown: the mode was perhaps written and cannot be read back. Returned
	// by [Store.SetMode].
	ErrModeUnknown = fmt.Errorf("%w: tenancy: the mode may have been written or not", cells.ErrUnavailable)
)

// Heartbeat is what a live process reports about itself, in the cell's database.
type Heartbeat struct {
	// Instance names this start of the process, unique for ever.
	Instance string `json:"instance"`
	// Cell is its CELL; "" when that is not set.
	Cell cells.CellID `json:"cell,omitempty"`
	// Mode is the last one that it read, as [Rows.EffectiveMode]; "" before a read
	// and in an open deployment.
	Mode Mode `json:"mode,omitempty"`
	// Fingerprint of its configuration; nil when CELL is not set.
	Fingerprint *Fingerprint `json:"fingerprint,omitempty"`
	// Build is its version. A build before the check reports nothing at all.
	Build string `json:"build,omitempty"`
	// Gated says why it serves nothing; "" when it serves.
	Gated string `json:"gated,omitempty"`
	// Workers says that it counts as running workers, and Lease which lease it holds.
	// A gated process has neither.
	Workers bool   `json:"workers"`
	Lease   string `json:"lease,omitempty"`
	// CacheFor is how long it uses what it has read of the cell's rows; 0 when its build
	// is older than version 2 and does not say.
	CacheFor time.Duration `json:"cache_for,omitempty"`
	// Settings are its run-time settings, as [Settings.Validate] allows them: what is meant
	// to be equal in all cells and is no part of the fingerprint. Nil when its build is
	// older than version 3.
	Settings Settings `json:"settings,omitempty"`
	// At is when it was written, by the database's clock; set by the store.
	At time.Time `json:"at"`
}

// Preparation is what prepare and restore write.
type Preparation struct {
	First First
	// Mode is written when there is no mode row; a present one is never lowered or
	// raised here.
	Mode Mode
	// Self, if set, is written when there is no own row, and over a present one when
	// ReplaceSelf is set.
	Self        *Self
	ReplaceSelf bool
}

// Report is what [Store.EnsureTriggers] did.
type Report struct {
	// Created and Repaired name table and trigger.
	Created, Repaired []Trigger
	// Skipped are tables that stay unguarded until a later run.
	Skipped []Skipped
}

// Trigger names one trigger.
type Trigger struct {
	Table string `json:"table"`
	Name  string `json:"name"`
}

// Skipped is a table whose triggers could not be put in order.
type Skipped struct {
	Table string `json:"table"`
	// Why is "locked", or what the server said.
	Why string `json:"why"`
	// Holders are the sessions that have locks on the table, if it was locked.
	Holders []string `json:"holders,omitempty"`
}

// Defect is something wrong with the triggers.
type Defect struct {
	Table   string `json:"table"`
	Trigger string `json:"trigger,omitempty"`
	// What is one of the constants.
	What string `json:"what"`
}

// What can be wrong.
const (
	DefectMissing     = "missing"     // on an enforced or partial cell
	DefectDisabled    = "disabled"    // in any state
	DefectNotOrigin   = "not-origin"  // enabled for replicas only, or always; in any state
	DefectNotAlways   = "not-always"  // a trigger of the first row
	DefectAltered     = "altered"     // another definition; in any state
	DefectUnsupported = "unsupported" // a partitioned or foreign table: it gets no trigger itself
)

// Unheld is a tenant with rows and without a tenancy row.
type Unheld struct {
	Tenant string   `json:"tenant"`
	Tables []string `json:"tables"`
}

// Blocker is a transaction that may have read the mode before a snapshot.
type Blocker struct {
	PID  int    `json:"pid,omitempty"`
	Kind string `json:"kind"` // the backend's type, or "prepared transaction"
	// Database is set when it is another one's: its transaction holds back every
	// snapshot's horizon.
	Database string `json:"database,omitempty"`
	User     string `json:"user,omitempty"`
	Name     string `json:"name,omitempty"` // application, or the prepared transaction's id
	// Prepared: it does not end by itself, so nobody waits for it.
	Prepared bool `json:"prepared,omitempty"`
	// Unreadable: the role may not see its state, so it counts as open.
	Unreadable bool `json:"unreadable,omitempty"`
}

// String names it for a refusal.
func (b Blocker) String() string {
	s := b.Kind
	if b.PID != 0 {
		s += fmt.Sprintf(" pid %d", b.PID)
	}
	if b.Name != "" {
		s += " " + b.Name
	}
	if b.User != "" {
		s += " of " + b.User
	}
	if b.Database != "" {
		s += " in database " + b.Database
	}
	if b.Unreadable {
		s += " (its state cannot be read)"
	}
	return s
}

// ModeWrite bounds [Store.SetMode].
type ModeWrite struct {
	// Deadline: no try begins that could commit after it. The zero value is a minute
	// from the call.
	Deadline time.Time
	// Tried, if set, is called before each try, with its number from 1. An error ends
	// SetMode before that try.
	Tried func(n int) error
}

// Store keeps the rows. Every implementation passes the suite of package
// tenancytest. Safe for concurrent use, by several processes. Errors of a database
// that cannot be reached wrap [cells.ErrUnavailable].
type Store interface {
	// Install makes the tables, the function and the first row's triggers; idempotent,
	// by several processes at once. It changes nothing that a newer build installed.
	Install(ctx context.Context) error
	// Read reads the state in one statement that takes no row lock.
	Read(ctx context.Context) (Rows, error)
	// Held reports whether the cell has a row for the tenant.
	Held(ctx context.Context, tenant cells.TenantID) (bool, error)
	// Record writes the tenant's row if the state is recording: one statement, at READ
	// COMMITTED in a transaction of its own that has committed when it returns. It
	// waits a bounded time for a write of the mode. The mode is the one it found
	// ([Rows.EffectiveMode]); held says that the tenant has a row now. Where the mode
	// is not Recording nothing was written and held is false, whatever is there.
	Record(ctx context.Context, tenant cells.TenantID) (mode Mode, held bool, err error)
	// Hold writes rows of tenants that the directory has placed here; idempotent. It
	// looks at no state.
	Hold(ctx context.Context, tenants ...cells.TenantID) error
	// HoldPlaced is Hold for the answer to a placement call, which may be as old as the
	// call: a tenant that was moved away meanwhile, whose fence is closed here, is not
	// held. [ErrMoved] then.
	HoldPlaced(ctx context.Context, tenant cells.TenantID) error
	// Unhold removes the row of a tenant that was moved away, and only while its fence is
	// closed here, at no higher epoch than upto (0: at any): [ErrNotMoved] otherwise.
	// Above it is a move that brings the tenant back. Idempotent.
	Unhold(ctx context.Context, tenant cells.TenantID, upto cells.Epoch) error
	// Tenants lists the tenancy rows in the order of the ids.
	Tenants(ctx context.Context) ([]cells.TenantID, error)
	// Prepare writes whichever rows are missing, in one transaction, and returns the
	// rows as they are then. A present first row that differs is [ErrOtherRow], and
	// nothing is written.
	Prepare(ctx context.Context, p Preparation) (Rows, error)
	// SetSelf writes the own row. The caller holds the directory's lock.
	SetSelf(ctx context.Context, s Self) error
	// SetMode writes the mode over a present mode row, under a lock that no running
	// Record crosses, in short tries. It returns the mode as it reads it back: when
	// the error is nil that is the wanted one, and its commit has waited for whatever
	// the server's settings have it wait for. [ErrModeUnknown] when it cannot be read.
	SetMode(ctx context.Context, mode Mode, w ModeWrite) (Mode, error)
	// Beat writes a process's heartbeat; Leave removes it.
	Beat(ctx context.Context, h Heartbeat) error
	Leave(ctx context.Context, instance string) error
	// Heartbeats lists those that are not older than the given age, by the database's
	// clock, in the order of the instances.
	Heartbeats(ctx context.Context, within time.Duration) ([]Heartbeat, error)
	// EnsureTriggers puts the first row's triggers in order, and on an enforced cell
	// creates and repairs the tenant triggers of every table with a tenant column. It
	// does not fail for a table that it cannot lock or alter; the report says so.
	EnsureTriggers(ctx context.Context) (Report, error)
	// TriggerDefects lists what is wrong; a missing tenant trigger counts only on an
	// enforced or partial cell.
	TriggerDefects(ctx context.Context) ([]Defect, error)
	// TenantsOfEveryTable lists, from one snapshot, every tenant that has a tenancy
	// row or a row in any table with a tenant column, without those of [Everybody].
	TenantsOfEveryTable(ctx context.Context) ([]string, error)
	// Unheld lists the tenants with rows and without a tenancy row, and Empty those
	// with a tenancy row and no other, both from one snapshot.
	Unheld(ctx context.Context) ([]Unheld, error)
	Empty(ctx context.Context) ([]cells.TenantID, error)
	// Snapshot names the present moment, and OpenBefore lists the transactions that
	// may have begun before it and are still open.
	Snapshot(ctx context.Context) (string, error)
	OpenBefore(ctx context.Context, snapshot string) ([]Blocker, error)
	// WaitAbility says why this role or server cannot judge OpenBefore, or nil: it may
	// not read every session's state, or prepared transactions are allowed.
	WaitAbility(ctx context.Context) error
}
