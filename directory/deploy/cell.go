// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Kind is what a directory is; it is settled once.
type Kind string

const (
	// Pinned: placements never change.
	Pinned Kind = "pinned"
	// Movable: tenants move between cells, and placements follow.
	Movable Kind = "movable"
)

// State is how far a cell is.
type State string

const (
	// Attaching: registered, and not serving yet.
	Attaching State = "attaching"
	// Serving: it takes placements, and requests by its issuers.
	Serving State = "serving"
)

// Stores are a cell's stores, by what never changes: no address is among it.
type Stores struct {
	DeploymentID string `json:"deployment_id"`
	// Bucket and Prefix; "" for a cell without a bucket, which shares none.
	Bucket string `json:"bucket,omitempty"`
	Prefix string `json:"prefix,omitempty"`
}

// Bot is a break-glass bot: its name, and the thumbprint of its key.
type Bot struct {
	Name       string `json:"name"`
	Thumbprint string `json:"thumbprint"`
}

// ModeChange is a mode that was raised, or tried.
type ModeChange struct {
	Mode tenancy.Mode `json:"mode"`
	At   time.Time    `json:"at"`
}

// Cell is the directory's row of one cell. Its zero fields are absent.
type Cell struct {
	Name cells.CellID `json:"name"`
	// Host is the cell's own, normalised; the first cell's is the shared host. Aliases
	// are the shared host's, hence the first cell's.
	Host    string   `json:"host"`
	Aliases []string `json:"aliases,omitempty"`
	// Upstream is where the router reaches the cell, http(s)://host[:port]; "" before a
	// later cell's attach. ProbeURL is the address of its probe listener.
	Upstream string `json:"upstream,omitempty"`
	ProbeURL string `json:"probe_url"`
	Stores
	State State `json:"state"`
	First bool  `json:"first"`
	// Mode is the highest that was raised or tried; Modes are all, in order.
	Mode  tenancy.Mode `json:"mode"`
	Modes []ModeChange `json:"modes"`
	// CredentialHash, and during a rotation NextHash, are the SHA-256 of the credentials
	// that the cell calls the router with.
	CredentialHash string `json:"credential_sha256"`
	NextHash       string `json:"next_credential_sha256,omitempty"`
	// KeysFP is the fingerprint of the cell's root secret; "" before attach.
	KeysFP string `json:"keys_fp,omitempty"`
	// Current is the configuration that the cell's processes may have, nil before attach;
	// Next a second one, while a change rolls out.
	Current *tenancy.Fingerprint `json:"current,omitempty"`
	Next    *tenancy.Fingerprint `json:"next,omitempty"`
	// AttachStartedAt is when attach's first transaction was made.
	AttachStartedAt time.Time `json:"attach_started_at,omitzero"`
	// Closed cells take no new tenants. PlacementsMax bounds their number; nil is none.
	Closed        bool   `json:"closed,omitempty"`
	PlacementsMax *int64 `json:"placements_max,omitempty"`
	// Placements is how many tenants are placed in the cell, those included for which it
	// keeps a place while they are moved here. Kept by the store.
	Placements int64     `json:"placements"`
	Bots       []Bot     `json:"bots,omitempty"`
	Revision   int64     `json:"revision"`
	CreatedAt  time.Time `json:"created_at"`
	UpdatedAt  time.Time `json:"updated_at"`
}

// Values are the fingerprints of the cell that count: current, and next.
func (c *Cell) Values() []tenancy.Fingerprint {
	var out []tenancy.Fingerprint
	for _, f := range []*tenancy.Fingerprint{c.Current, c.Next} {
		if f != nil {
			out = append(out, *f)
		}
	}
	return out
}

// Get is the union of a field over both values, sorted.
func (c *Cell) Get(f tenancy.Field) []string {
	var out []string
	for _, v := range c.Values() {
		out = append(out, v.Get(f)...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Hosts are the cell's host and aliases.
func (c *Cell) Hosts() []string { return append([]string{c.Host}, c.Aliases...) }

// Issuers are the bearer issuers that the cell accepts, by both values. A registered
// cell that was not attached has none.
func (c *Cell) Issuers() []string { return c.Get(tenancy.FieldIssuers) }

// Hashes are the SHA-256 of the credentials that the cell may call with.
func (c *Cell) Hashes() []string {
	if c.NextHash == "" {
		return []string{c.CredentialHash}
	}
	return []string{c.CredentialHash, c.NextHash}
}

// Accepts reports whether a process with the fingerprint runs one of the cell's
// values.
func (c *Cell) Accepts(f tenancy.Fingerprint) bool {
	return slices.ContainsFunc(c.Values(), f.Matches)
}

// Placement is where a tenant was placed.
type Placement struct {
	Tenant cells.TenantID `json:"tenant"`
	Cell   cells.CellID   `json:"cell"`
	// DeploymentID is the one that the directory records for the cell.
	DeploymentID string `json:"deployment_id"`
	// By says who placed it; Actor for whom.
	By    By        `json:"by"`
	Actor string    `json:"actor,omitempty"`
	At    time.Time `json:"at"`
	// Epoch and Move are those of the move that the placement followed last, in a movable
	// directory; 0 and "" before the first.
	Epoch cells.Epoch  `json:"epoch,omitempty"`
	Move  cells.MoveID `json:"move,omitempty"`
	// MovingTo is the cell that has a place for the tenant while the move MovingBy is
	// under way; both "" otherwise.
	MovingTo cells.CellID `json:"moving_to,omitempty"`
	MovingBy cells.MoveID `json:"moving_by,omitempty"`
}

// By says who placed a tenant.
type By string

const (
	// ByCell: the cell's process, for a verified request.
	ByCell By = "cell"
	// ByOperator: an operator's command.
	ByOperator By = "operator"
	// ByAttach: the cell's attach, or a change of its configured tenants.
	ByAttach By = "attach"
)

// View is all cells at one moment.
type View struct {
	Kind Kind `json:"kind"`
	// Revision grows with every change of a cell, placements apart.
	Revision int64 `json:"revision"`
	// Cells are in order of their names.
	Cells []Cell `json:"cells"`
}

// First returns the first cell, nil when none is registered.
func (v *View) First() *Cell {
	for i := range v.Cells {
		if v.Cells[i].First {
			return &v.Cells[i]
		}
	}
	return nil
}

// Cell returns a cell by name, nil when it is not registered.
func (v *View) Cell(name cells.CellID) *Cell {
	for i := range v.Cells {
		if v.Cells[i].Name == name {
			return &v.Cells[i]
		}
	}
	return nil
}
