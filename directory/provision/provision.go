// SPDX-License-Identifier: Apache-2.0

package provision

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Desired is what becomes of a cell, as its operator wants it.
type Desired string

const (
	// DesiredServing: the cell runs Spec.Version in Spec.Replicas processes.
	DesiredServing Desired = "serving"
	// DesiredDrained: the cell takes no tenants and gives away those that it has. It goes
	// on running, in the version that it has, since its own processes hand over the rows.
	DesiredDrained Desired = "drained"
	// DesiredRetired: nothing of the cell is left. Only a drained cell without a
	// tenant gets here, and it never leaves: a new cell of the name begins anew.
	DesiredRetired Desired = "retired"
)

// Valid reports whether d is one of the above.
func (d Desired) Valid() bool {
	return d == DesiredServing || d == DesiredDrained || d == DesiredRetired
}

// Phase says in one word how far a provisioner is with a cell.
type Phase string

const (
	// PhasePending: nothing was reported yet.
	PhasePending Phase = "pending"
	// PhaseProvisioning: processes or their stores are being started.
	PhaseProvisioning Phase = "provisioning"
	// PhaseUpgrading: processes of two versions run.
	PhaseUpgrading Phase = "upgrading"
	// PhaseRunning: every process runs the version and is ready.
	PhaseRunning Phase = "running"
	// PhaseDraining: the cell runs and is being emptied, or is empty.
	PhaseDraining Phase = "draining"
	// PhaseRetiring: processes, stores and secrets are being removed.
	PhaseRetiring Phase = "retiring"
	// PhaseRetired: nothing is left.
	PhaseRetired Phase = "retired"
	// PhaseFailed: the last attempt failed, for the reason in Message. It is repeated.
	PhaseFailed Phase = "failed"
)

// Valid reports whether p is one of the above.
func (p Phase) Valid() bool {
	switch p {
	case PhasePending, PhaseProvisioning, PhaseUpgrading, PhaseRunning, PhaseDraining, PhaseRetiring, PhaseRetired, PhaseFailed:
		return true
	}
	return false
}

// Version is an entry of the catalogue: how the processes of a version are run.
type Version struct {
	// Name is what cells are pinned to: 1 to 63 bytes of [A-Za-z0-9._-].
	Name string `json:"name"`
	// Image is the container image, for Kubernetes; best with its digest.
	Image string `json:"image,omitempty"`
	// Command is the program and its arguments. These words are replaced: {listen},
	// {store}, {dsn}, {cell}, {version}, {state}. On Kubernetes none keeps the image's own.
	Command []string `json:"command,omitempty"`
	// CreatedAt and Actor are of who added it. Read-only.
	CreatedAt time.Time `json:"created_at,omitzero"`
	Actor     string    `json:"actor,omitempty"`
}

// Engines of a cell's store.
const (
	EngineNone     = "none" // the service keeps no state
	EngineSQLite   = "sqlite"
	EnginePostgres = "postgres"
)

// StoreSpec is the store of a cell.
type StoreSpec struct {
	// Engine is none, sqlite or postgres; "" is what the provisioner gives by itself.
	Engine string `json:"engine,omitempty"`
	// Size is how much room an SQLite store gets where that has to be said, as
	// Kubernetes writes quantities: "10Gi".
	Size string `json:"size,omitempty"`
	// DSN refers to the connection string of a Postgres database that exists already.
	// The zero value has the provisioner make one, if it can.
	DSN SecretRef `json:"dsn,omitzero"`
}

// SecretRef refers to a value that no spec contains: an entry of a Kubernetes Secret,
// or the file secrets/<name>/<key> of a fleet's state folder.
type SecretRef struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

// IsZero reports whether nothing is referred to.
func (r SecretRef) IsZero() bool { return r == SecretRef{} }

// Spec is the desired state of a cell. The directory is authoritative for it.
type Spec struct {
	Cell cells.CellID `json:"cell"`
	// Version, Image and Command are those of the catalogue when the version was set:
	// a later change of the catalogue changes no cell.
	Version string   `json:"version"`
	Image   string   `json:"image,omitempty"`
	Command []string `json:"command,omitempty"`
	// Replicas is the number of processes, 1 to 64.
	Replicas int       `json:"replicas"`
	Store    StoreSpec `json:"store,omitzero"`
	// Jurisdiction, Geography and Host are the cell's labels and its public host name.
	Jurisdiction string `json:"jurisdiction,omitempty"`
	Geography    string `json:"geography,omitempty"`
	Host         string `json:"host,omitempty"`
	// Env is given to every process. It is stored and shown in clear: what is secret is
	// named in Secrets.
	Env map[string]string `json:"env,omitempty"`
	// Secrets gives environment variables their values by reference.
	Secrets map[string]SecretRef `json:"secrets,omitempty"`
	// Generation grows by one with every change of the above and of Desired, also
	// from a retired cell to the next one of its name.
	Generation int64   `json:"generation"`
	Desired    Desired `json:"desired"`
	// KeepStore, when retired: the store's files are put aside instead of removed,
	// because nobody could say that they are empty.
	KeepStore bool `json:"keep_store,omitempty"`
}

// Clone returns a copy that shares nothing with s.
func (s Spec) Clone() Spec {
	s.Command = slices.Clone(s.Command)
	s.Env = maps.Clone(s.Env)
	s.Secrets = maps.Clone(s.Secrets)
	return s
}

// Status is what a provisioner says of a cell.
type Status struct {
	Cell cells.CellID `json:"cell"`
	// ObservedGeneration is the generation of the spec that the status is about: what
	// it says of older ones than the spec's says nothing of the present wish.
	ObservedGeneration int64 `json:"observed_generation"`
	// Version is the version that every process of the cell runs: the old one until an
	// upgrade is complete, "" when there is none.
	Version string `json:"version"`
	// Replicas are the processes that exist, Ready those that take requests, Updated
	// those that run the spec's version and are ready.
	Replicas int   `json:"replicas"`
	Ready    int   `json:"ready"`
	Updated  int   `json:"updated"`
	Phase    Phase `json:"phase"`
	// Message says why, for people; it names no secret.
	Message string    `json:"message,omitempty"`
	At      time.Time `json:"at,omitzero"`
	// Since is when this phase of this generation began; the directory sets it.
	Since time.Time `json:"since,omitzero"`
}

// Reached reports whether the status says that the spec is as it is wished to be.
// A drained cell is reached while it runs; whether it is empty is the directory's to say.
func (s *Status) Reached(spec *Spec) bool {
	if s.ObservedGeneration != spec.Generation {
		return false
	}
	switch spec.Desired {
	case DesiredServing:
		return s.Phase == PhaseRunning && s.Version == spec.Version
	case DesiredDrained:
		return s.Phase == PhaseDraining
	case DesiredRetired:
		return s.Phase == PhaseRetired
	}
	return false
}

// What provisioners refuse.
var (
	// ErrConflict: objects are held by somebody else; the error names the fields.
	ErrConflict = errors.New("provision: fields belong to another owner")
	// ErrUnsupported: the provisioner cannot make what the spec asks for.
	ErrUnsupported = errors.New("provision: not supported here")
)

// Provisioner makes cells as their specs want them. Every method is idempotent and
// may be killed anywhere: the same call again, in this process or another, goes on.
// A call with an older generation than the last is harmless, since the next
// reconciliation brings the newer one. Calls for one cell do not overlap; calls for
// different cells may.
//
// Errors wrap [cells.ErrInvalid] for what will not do however often it is repeated,
// [ErrConflict], [ErrUnsupported], or anything else for what may pass.
// Implementations pass the suite of package provisiontest.
type Provisioner interface {
	// Provision makes the cell run, with its stores and certificates, and returns once
	// every process is ready. Processes of another version that run are left to Upgrade.
	Provision(ctx context.Context, s Spec) error
	// Upgrade brings every process to the spec's version, command, environment and
	// number, and refuses no request: a new process joins and is ready before an old one
	// is told to leave, and that one ends what it has begun.
	Upgrade(ctx context.Context, s Spec) error
	// Status says what is there; a cell of which there is nothing has the phase retired
	// and no replicas. ObservedGeneration is that of the last call that was
	// completed, 0 when this is not known.
	Status(ctx context.Context, cell cells.CellID) (Status, error)
	// Drain keeps the cell running as it is and marks it as one to be emptied: it
	// is not upgraded, and not made smaller, until it serves again or is retired.
	Drain(ctx context.Context, s Spec) error
	// Retire ends the cell's processes and removes everything of it: stores (unless
	// KeepStore), certificates, keys, objects. Nothing is an answer too.
	Retire(ctx context.Context, s Spec) error
}

// Live is a process of a cell as the directory hears it.
type Live struct {
	Cell       cells.CellID `json:"cell"`
	Instance   string       `json:"instance"`
	Version    string       `json:"version"`
	PID        int          `json:"pid"`
	ServiceURL string       `json:"service_url"`
	Ready      bool         `json:"ready"`
	Reason     string       `json:"reason,omitempty"`
}

// Record is what the directory keeps of a cell that is provisioned.
type Record struct {
	Spec   Spec   `json:"spec"`
	Status Status `json:"status"`
	// Campaign is that which empties the cell, once it was planned; Drains counts
	// them.
	Campaign string `json:"campaign,omitempty"`
	Drains   int64  `json:"drains,omitempty"`
	// DrainOptions are the directory's own: how that campaign is to be made.
	DrainOptions json.RawMessage `json:"drain_options,omitempty"`
	// Actor made the last change of the spec, for Reason.
	Actor  string `json:"actor"`
	Reason string `json:"reason,omitempty"`
	// ForcedBy is who had the cell retired although its stores could not be asked.
	ForcedBy  string    `json:"forced_by,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
}
