// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"strings"
	"time"
)

// TenantID names the unit that is placed and moved: an org, a customer, a
// person. 1 to 128 bytes of [A-Za-z0-9._:@-], compared exactly. See
// [TenantID.Validate].
type TenantID string

// CellID names one cell: [a-z0-9-]{1,32}, compared exactly.
type CellID string

// MoveID names one attempt to move a tenant. 1 to 64 bytes of [A-Za-z0-9._-].
type MoveID string

// Epoch is a tenant's route epoch. It only ever grows: through moves,
// rollbacks, deletes and re-creations (tombstones keep it). Epoch 0 belongs to
// tenants that the default cell serves without a route.
type Epoch uint64

// Revision orders the changes of a whole routing table. It is given out by the
// table, starts at 1 and only grows; 0 means "no row" in a compare-and-set and
// "from the start" in a watch.
type Revision uint64

// EventSeq numbers one tenant's events: 1, 2, 3, ... without gaps, across moves.
type EventSeq uint64

const (
	maxTenantLen = 128
	maxCellLen   = 32
	maxMoveLen   = 64
)

// Validate reports whether the identifier is well formed. The error wraps
// [ErrInvalid].
func (t TenantID) Validate() error {
	if len(t) == 0 || len(t) > maxTenantLen {
		return fmt.Errorf("%w: tenant id has %d bytes, want 1 to %d", ErrInvalid, len(t), maxTenantLen)
	}
	for i := range len(t) {
		if !isWordByte(t[i]) && t[i] != ':' && t[i] != '@' {
			return fmt.Errorf("%w: tenant id has byte %q at %d; allowed are letters, digits and . _ : @ -", ErrInvalid, t[i], i)
		}
	}
	return nil
}

// Validate reports whether the cell name matches [a-z0-9-]{1,32}. The error
// wraps [ErrInvalid].
func (c CellID) Validate() error {
	if len(c) == 0 || len(c) > maxCellLen {
		return fmt.Errorf("%w: cell name has %d bytes, want 1 to %d", ErrInvalid, len(c), maxCellLen)
	}
	for i := range len(c) {
		b := c[i]
		if (b < 'a' || b > 'z') && (b < '0' || b > '9') && b != '-' {
			return fmt.Errorf("%w: cell name has byte %q at %d; allowed are a-z, 0-9 and -", ErrInvalid, b, i)
		}
	}
	return nil
}

// Validate reports whether the move id is well formed. The error wraps
// [ErrInvalid].
func (m MoveID) Validate() error {
	if len(m) == 0 || len(m) > maxMoveLen {
		return fmt.Errorf("%w: move id has %d bytes, want 1 to %d", ErrInvalid, len(m), maxMoveLen)
	}
	for i := range len(m) {
		if !isWordByte(m[i]) {
			return fmt.Errorf("%w: move id has byte %q at %d", ErrInvalid, m[i], i)
		}
	}
	return nil
}

func isWordByte(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '.' || b == '_' || b == '-'
}

// RouteState is where a tenant is in its life. The zero value is no state: a
// tenant without a row.
type RouteState uint8

const (
	// StateActive: CellID serves the tenant at Epoch. A non-empty MoveID says
	// that a move is being prepared (snapshot, catch-up) while CellID serves.
	StateActive RouteState = iota + 1
	// StateQuiescing: a cut has begun. Edges hold new requests, gates of CellID
	// close. The fence is still open at Epoch: admitted requests finish.
	StateQuiescing
	// StateDraining: gates are told to be closed; waiting until each live process
	// of CellID reports nothing in flight, or the deadline.
	StateDraining
	// StateCopying: Epoch is one higher than what CellID was served at, and nobody
	// may write at it: CellID's fence is being closed at Epoch, its outbox paused,
	// the last changes applied and both sides verified.
	StateCopying
	// StateCommitting: decided, and only forward from here. Epoch has been given
	// to CellID and to no other cell: the target when the cut was committed, the
	// source when the move was rolled back. CellID's fence is being opened at Epoch.
	StateCommitting
	// StateDeleting: the tenant is being removed from the table; the fence of
	// CellID is being closed at Epoch.
	StateDeleting
	// StateDeleted: a tombstone. It keeps Epoch so that a tenant created again
	// starts higher. CellID is the cell whose fence was closed at Epoch.
	StateDeleted
)

var stateNames = [...]string{
	StateActive: "ACTIVE", StateQuiescing: "QUIESCING", StateDraining: "DRAINING", StateCopying: "COPYING",
	StateCommitting: "COMMITTING", StateDeleting: "DELETING", StateDeleted: "DELETED",
}

// String returns the state's name in capitals, as the design and the CLI write it.
func (s RouteState) String() string {
	if s == 0 {
		return "ABSENT"
	}
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("RouteState(%d)", uint8(s))
}

// MarshalText implements [encoding.TextMarshaler].
func (s RouteState) MarshalText() ([]byte, error) {
	if s == 0 || int(s) >= len(stateNames) {
		return nil, fmt.Errorf("%w: route state %d", ErrInvalid, uint8(s))
	}
	return []byte(stateNames[s]), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler]. Unknown names are refused
// with [ErrInvalid].
func (s *RouteState) UnmarshalText(b []byte) error {
	for i, n := range stateNames {
		if i > 0 && n == string(b) {
			*s = RouteState(i)
			return nil
		}
	}
	return fmt.Errorf("%w: route state %q", ErrInvalid, b)
}

// TenantRoute is the directory's row for one tenant. It is also the recovery
// state of a move: whatever a driver must know after a crash is here.
//
// It is a value: copying it copies everything except Residue's backing array,
// which is never changed in place (replace the slice, see [TenantRoute.Clone]).
type TenantRoute struct {
	TenantID TenantID   `json:"tenant"`
	State    RouteState `json:"state"`
	// CellID is the only cell that Epoch has been given to.
	// Invariant: for one TenantID, one Epoch never appears with two CellIDs.
	CellID CellID `json:"cell"`
	// Epoch never decreases from one revision to the next.
	Epoch Epoch `json:"epoch"`
	// Floor is the lowest epoch at which an admission is still good at CellID:
	// normally Epoch. It is lower only after a move was given up before its
	// fence step, when CellID never stopped being the one writer since Floor.
	// Invariant: Floor <= Epoch.
	Floor Epoch `json:"floor"`

	// MoveID is the move that is being prepared or cut, or "" when none is.
	MoveID MoveID `json:"move,omitempty"`
	// SourceCell and TargetCell are the ends of MoveID; both "" when there is none.
	SourceCell CellID `json:"source,omitempty"`
	TargetCell CellID `json:"target,omitempty"`
	// Base is the epoch at which the source was serving when MoveID began. The
	// cut closes at Base+1 and opens at Base+2, whoever wins.
	Base Epoch `json:"base,omitempty"`
	// UndoWindow is for how long the source keeps its rows, and receives the target's
	// changes, once MoveID is committed; 0: it is not asked to.
	UndoWindow time.Duration `json:"undo_window,omitempty"`
	// Undoes is the earlier move that MoveID takes back, or "". Its way back has
	// become the beginning of MoveID.
	Undoes MoveID `json:"undoes,omitempty"`
	// Deadline bounds the cut (QUIESCING, DRAINING, COPYING): past it a driver
	// rolls back. It never decides safety.
	Deadline time.Time `json:"deadline,omitzero"`

	// EventMark is the last event_seq that the source committed; recorded by the
	// commit. The target numbers on from it.
	EventMark EventSeq `json:"event_mark,omitempty"`
	// DataMark is the position in the source's changes up to which the target has
	// applied and verified everything (an LSN, a change-log number); opaque here.
	DataMark string `json:"data_mark,omitempty"`

	// Residue lists cells that may still hold rows of the tenant from earlier
	// moves, at most one entry a cell. Each entry is removed once its removal was
	// verified. The entry of MoveID itself names the target, and says what is to be
	// removed if the move is rolled back; nothing is removed by it before it is over.
	Residue []Residue `json:"residue,omitempty"`

	// OperationID is the caller's id of the operation that placed the tenant:
	// a repeated claim with the same id gets its first answer.
	OperationID string `json:"operation,omitempty"`
	// Actor is who asked for the last operation; for the audit, never for a decision.
	Actor string `json:"actor,omitempty"`
	// Reason says why the last move was rolled back; for people.
	Reason string `json:"reason,omitempty"`
	// Stamp is a random mark of the compare-and-set that wrote this row. A driver
	// whose write had an unknown outcome recognises its own row by it, and only by it.
	Stamp string `json:"stamp,omitempty"`
	// UpdatedAt is when the row was written, by the writer's clock; for people.
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	// Revision is the table's revision of this row's last change; set by the table.
	Revision Revision `json:"revision"`
}

// deletionPrefix begins the ids that deletions give their residue; moves cannot
// have it.
const deletionPrefix = "del-"

// Deletion reports whether the id is that of a deletion, whose rows were neither
// captured nor brought by any move: they are the tenant's own.
func (m MoveID) Deletion() bool { return strings.HasPrefix(string(m), deletionPrefix) }

// Residue is a cell that lost a cut and may still hold rows.
type Residue struct {
	Cell CellID `json:"cell"`
	// Epoch is the one at which Cell's fence is (to be) closed, exactly, for the
	// removal to run: Base+1 at the source after a commit, Base+2 at the target
	// after a rollback.
	Epoch Epoch  `json:"epoch"`
	Move  MoveID `json:"move"`

	// Until, unless zero: the entry is held. Cell keeps its rows, the changes of
	// Back flow to it, and Move can be undone. Nothing is removed before a row without
	// the hold is written; Until itself only says when somebody will write it.
	// Invariant: a held entry is in an ACTIVE row without a move, whose CellID is Back.
	Until time.Time `json:"until,omitzero"`
	// Back is the cell that captures its changes for Cell, or has done so while the
	// entry was held; "" when no way back was kept. It is freed with the removal.
	Back CellID `json:"back,omitempty"`
	// Undoes, for a move that took another one back: the move that the rows of Cell
	// are known by if Move never got as far as taking them over.
	Undoes MoveID `json:"undoes,omitempty"`
}

// Held reports whether the entry's move can be undone.
func (e Residue) Held() bool { return !e.Until.IsZero() }

// Return describes the way back of the entry: from Back to Cell, under the id of
// the move that it would undo, and at its epochs. ok is false if there is none.
func (e Residue) Return(tenant TenantID) (back MoveRef, ok bool) {
	if e.Back == "" || e.Undoes != "" {
		return MoveRef{}, false
	}
	return MoveRef{ID: e.Move, Tenant: tenant, Source: e.Back, Target: e.Cell, Base: e.Epoch - 1}, true
}

// same reports whether both name the same removal.
func (e Residue) same(o Residue) bool {
	return e.Cell == o.Cell && e.Epoch == o.Epoch && e.Move == o.Move
}

// Serving reports whether the route's cell serves requests in this state.
func (r *TenantRoute) Serving() bool { return r.State == StateActive }

// Moving reports whether requests must wait for the outcome of a cut.
func (r *TenantRoute) Moving() bool {
	return r.State >= StateQuiescing && r.State <= StateCommitting
}

// Preparing reports whether a move is being prepared while the source serves.
func (r *TenantRoute) Preparing() bool { return r.State == StateActive && r.MoveID != "" }

// Exists reports whether the tenant is placed: it has a row that is not a tombstone.
func (r *TenantRoute) Exists() bool {
	return r.State != 0 && r.State != StateDeleting && r.State != StateDeleted
}

// Held returns the entry of Residue whose move can be undone; ok is false when there
// is none. There is at most one.
func (r *TenantRoute) Held() (e Residue, ok bool) {
	for _, e := range r.Residue {
		if e.Held() {
			return e, true
		}
	}
	return Residue{}, false
}

// Clone returns a copy that shares no memory with r.
func (r TenantRoute) Clone() TenantRoute {
	if r.Residue != nil {
		r.Residue = append([]Residue(nil), r.Residue...)
	}
	return r
}

// Move returns the description of the route's current move; ok is false when
// there is none.
func (r *TenantRoute) Move() (m MoveRef, ok bool) {
	if r.MoveID == "" {
		return MoveRef{}, false
	}
	return MoveRef{ID: r.MoveID, Tenant: r.TenantID, Source: r.SourceCell, Target: r.TargetCell, Base: r.Base,
		Keep: r.UndoWindow > 0, Undoes: r.Undoes}, true
}

// MoveRef is what a step of a move needs to know: who moves, between whom, and
// the epochs. It is the same at every step of one move.
type MoveRef struct {
	ID     MoveID   `json:"id"`
	Tenant TenantID `json:"tenant"`
	Source CellID   `json:"source"`
	Target CellID   `json:"target"`
	// Base is the epoch at which Source was serving when the move began.
	Base Epoch `json:"base"`
	// Keep: the move is to be undoable. The target begins to capture its changes
	// before it is opened.
	Keep bool `json:"keep,omitempty"`
	// Undoes is the move that this one takes back, or "".
	Undoes MoveID `json:"undoes,omitempty"`
}

// Back is the way back of the move: the changes of its target flow to its source,
// whose fence is closed at the same CloseEpoch by the same id.
func (m MoveRef) Back() MoveRef {
	return MoveRef{ID: m.ID, Tenant: m.Tenant, Source: m.Target, Target: m.Source, Base: m.Base}
}

// CloseEpoch is the epoch at which the source's fence is closed by the cut, and
// the epoch at which the target's fence is held closed while rows are imported.
func (m MoveRef) CloseEpoch() Epoch { return m.Base + 1 }

// OpenEpoch is the epoch that the winner of the cut is opened at.
func (m MoveRef) OpenEpoch() Epoch { return m.Base + 2 }
