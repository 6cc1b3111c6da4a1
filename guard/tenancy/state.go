// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"

	"github.com/cloister-dev/cloister/cells"
)

// Mode is how strictly a cell keeps to its tenants. The zero value is no mode row.
type Mode string

const (
	// Recording: a verified request for a new tenant writes its row and is served.
	Recording Mode = "recording"
	// Enforced: a tenant without a row is placed through the directory, or refused.
	Enforced Mode = "enforced"
)

// Validate reports whether m is one of the two modes. The error wraps
// [cells.ErrInvalid].
func (m Mode) Validate() error {
	if m != Recording && m != Enforced {
		return fmt.Errorf("%w: mode %q; want %q or %q", cells.ErrInvalid, string(m), Recording, Enforced)
	}
	return nil
}

// First is the cell's first row: written once, with the mode, and never changed.
type First struct {
	// First says that this is the first cell, which keeps the shared host.
	First bool `json:"first"`
	// Cell is the cell's name, compared exactly with the process's.
	Cell cells.CellID `json:"cell"`
}

// Self is the cell's own row: which configurations its processes may have.
type Self struct {
	// Current is the accepted fingerprint. Never nil in a row that exists.
	Current *Fingerprint `json:"current"`
	// Next is the second one, while a change rolls out; nil otherwise.
	Next *Fingerprint `json:"next,omitempty"`
}

// Match says which value of the own row a process's configuration has.
type Match string

// The matches. A configuration that matches both is at MatchBoth: it neither keeps
// an old value alive nor waits for a new one.
const (
	MatchNone    Match = ""
	MatchCurrent Match = "current"
	MatchNext    Match = "next"
	MatchBoth    Match = "both"
)

// Match compares a process's fingerprint with the row. A nil Self matches nothing.
func (s *Self) Match(process Fingerprint) Match {
	if s == nil {
		return MatchNone
	}
	current := s.Current != nil && process.Matches(*s.Current)
	next := s.Next != nil && process.Matches(*s.Next)
	switch {
	case current && next:
		return MatchBoth
	case current:
		return MatchCurrent
	case next:
		return MatchNext
	}
	return MatchNone
}

// Rows are the cell's own rows as one statement read them. A nil or empty field is
// an absent row; rows that could not be read are an error of the reader, never this.
type Rows struct {
	Mode  Mode   `json:"mode,omitempty"`
	First *First `json:"first,omitempty"`
	Self  *Self  `json:"self,omitempty"`
	// AnyTenancy says that the tenancy table holds at least one row.
	AnyTenancy bool `json:"any_tenancy"`
}

// State is what the rows are together.
type State string

// The states; the package's documentation draws them.
const (
	StateOpen      State = "open"
	StateRecording State = "recording"
	StateEnforced  State = "enforced"
	StatePartial   State = "partial"
)

// State applies the rule of the first row.
func (r Rows) State() State {
	switch {
	case r.Mode == "" && r.First == nil && r.Self == nil && !r.AnyTenancy:
		return StateOpen
	case r.Mode == "" || r.First == nil || r.Self == nil:
		return StatePartial
	case r.First.First && r.Mode == Recording:
		return StateRecording
	}
	return StateEnforced
}

// EffectiveMode is the mode that the rows amount to: Recording only in
// StateRecording, Enforced in every other state but StateOpen, where it is "".
func (r Rows) EffectiveMode() Mode {
	switch r.State() {
	case StateOpen:
		return ""
	case StateRecording:
		return Recording
	}
	return Enforced
}

// Missing names the rows of the state that are absent, for people; nil in every
// state but StatePartial.
func (r Rows) Missing() []string {
	if r.State() != StatePartial {
		return nil
	}
	var out []string
	if r.First == nil {
		out = append(out, "first")
	}
	if r.Mode == "" {
		out = append(out, "mode")
	}
	if r.Self == nil {
		out = append(out, "self")
	}
	return out
}

// Odd says what is wrong with rows that are complete but that nothing of the
// platform writes, or "": a later cell whose mode row says recording. It changes no
// decision; doctors and prepare name it.
func (r Rows) Odd() string {
	if r.First != nil && !r.First.First && r.Mode == Recording {
		return "the mode row of a later cell says recording; it counts as enforced"
	}
	return ""
}
