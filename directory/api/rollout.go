// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// RolloutID names a rollout: 1 to 24 bytes of [A-Za-z0-9_-].
type RolloutID string

// Validate reports whether the id is well formed. The error wraps
// [cells.ErrInvalid].
func (r RolloutID) Validate() error {
	if len(r) > 24 || strings.Contains(string(r), ".") {
		return fmt.Errorf("%w: rollout id %q", cells.ErrInvalid, string(r))
	}
	return cells.MoveID(r).Validate()
}

// RolloutState is how far a rollout is.
type RolloutState string

const (
	// RolloutObserving: the old version is measured before anything changes, because
	// nothing would be left of it to compare with later.
	RolloutObserving RolloutState = "OBSERVING"
	// RolloutChanging: the units of the wave get the new version.
	RolloutChanging RolloutState = "CHANGING"
	// RolloutBaking: the wave has it, and is compared with the rest.
	RolloutBaking RolloutState = "BAKING"
	// RolloutReturning: units get the old version back.
	RolloutReturning RolloutState = "RETURNING"
	// RolloutDone: every wave has the new version. Final.
	RolloutDone RolloutState = "DONE"
	// RolloutHalted: the new version was found to be worse, and its wave was returned.
	// Final.
	RolloutHalted RolloutState = "HALTED"
	// RolloutAborted: given up by an operator. Final.
	RolloutAborted RolloutState = "ABORTED"
)

// RolloutStates lists them.
var RolloutStates = []RolloutState{RolloutObserving, RolloutChanging, RolloutBaking, RolloutReturning, RolloutDone, RolloutHalted, RolloutAborted}

// Valid reports whether s is one of the states above.
func (s RolloutState) Valid() bool {
	for _, v := range RolloutStates {
		if s == v {
			return true
		}
	}
	return false
}

// Final reports whether nothing happens in this state any more.
func (s RolloutState) Final() bool {
	return s == RolloutDone || s == RolloutHalted || s == RolloutAborted
}

// UnitState is how far one unit of a rollout is: a tenant, or a cell.
type UnitState string

const (
	// UnitPending: nothing was begun; it has the old version.
	UnitPending UnitState = "PENDING"
	// UnitChanging: it is to get the new version, or is getting it.
	UnitChanging UnitState = "CHANGING"
	// UnitChanged: it has the new version.
	UnitChanged UnitState = "CHANGED"
	// UnitFailed: it has not got the new version; a resume tries again or leaves it.
	UnitFailed UnitState = "FAILED"
	// UnitLeft: the tenant was left with the old version, as an operator said. (A cell
	// that is to be left gets it back.)
	UnitLeft UnitState = "LEFT"
	// UnitGone: it is out of the rollout's hands: the tenant was deleted, or somebody
	// moved it elsewhere.
	UnitGone UnitState = "GONE"
	// UnitReturning: it is to get the old version back, or is getting it.
	UnitReturning UnitState = "RETURNING"
	// UnitReturned: it has the old version again.
	UnitReturned UnitState = "RETURNED"
)

// UnitStates lists them.
var UnitStates = []UnitState{UnitPending, UnitChanging, UnitChanged, UnitFailed, UnitLeft, UnitGone, UnitReturning, UnitReturned}

// Valid reports whether s is one of the states above.
func (s UnitState) Valid() bool {
	for _, v := range UnitStates {
		if s == v {
			return true
		}
	}
	return false
}

// May reports whether a unit may go from s to another state.
func (s UnitState) May(to UnitState) bool {
	switch s {
	case UnitPending:
		return to == UnitChanging || to == UnitGone
	case UnitChanging:
		return to == UnitPending || to == UnitChanged || to == UnitFailed || to == UnitGone || to == UnitReturning
	case UnitChanged:
		return to == UnitReturning || to == UnitGone
	case UnitFailed:
		return to == UnitPending || to == UnitChanging || to == UnitLeft || to == UnitGone || to == UnitReturning
	case UnitReturning:
		return to == UnitReturned || to == UnitGone
	}
	return false
}

// UnitCounts says how many units are in each state.
type UnitCounts struct {
	Total     int64 `json:"total"`
	Pending   int64 `json:"pending,omitempty"`
	Changing  int64 `json:"changing,omitempty"`
	Changed   int64 `json:"changed,omitempty"`
	Failed    int64 `json:"failed,omitempty"`
	Left      int64 `json:"left,omitempty"`
	Gone      int64 `json:"gone,omitempty"`
	Returning int64 `json:"returning,omitempty"`
	Returned  int64 `json:"returned,omitempty"`
}

// Of returns the count of a state, to be read or changed; nil for no state.
func (c *UnitCounts) Of(s UnitState) *int64 {
	switch s {
	case UnitPending:
		return &c.Pending
	case UnitChanging:
		return &c.Changing
	case UnitChanged:
		return &c.Changed
	case UnitFailed:
		return &c.Failed
	case UnitLeft:
		return &c.Left
	case UnitGone:
		return &c.Gone
	case UnitReturning:
		return &c.Returning
	case UnitReturned:
		return &c.Returned
	}
	return nil
}

// Plus returns the sum.
func (c UnitCounts) Plus(d UnitCounts) UnitCounts {
	c.Total += d.Total
	for _, s := range UnitStates {
		*c.Of(s) += *d.Of(s)
	}
	return c
}

// Ways in which a rollout changes versions.
const (
	// ByMove moves tenants from cells of the old version to cells of the new one.
	ByMove = "move"
	// ByUpgrade gives cells the new version.
	ByUpgrade = "upgrade"
)

// What bad health returns.
const (
	// ReturnWave returns the wave that was found to be bad.
	ReturnWave = "wave"
	// ReturnAll returns all waves.
	ReturnAll = "all"
)

// Who measures.
const (
	MeasuredByEdge = "edge"
	MeasuredByCell = "cell"
)

// RolloutSettings say how a rollout is made.
type RolloutSettings struct {
	// Version is the new one; From the old one, "" if the cells that do not have the new
	// one have one version.
	Version string `json:"version"`
	From    string `json:"from,omitempty"`
	// By is ByMove or ByUpgrade.
	By string `json:"by"`
	// Waves are percentages of all units, each above the one before, the last 100; none
	// means 1, 10, 50, 100. Each wave has a unit more than the one before, at least.
	Waves []float64 `json:"waves,omitempty"`
	// Bake is for how long a wave must have been healthy; 0 means 10 m. Patience is for
	// how much longer it may lack data before the rollout pauses; 0 means as long again.
	Bake     time.Duration `json:"bake,omitempty"`
	Patience time.Duration `json:"patience,omitempty"`
	// Canary are tenants (by move) or cells (by upgrade) that come first.
	Canary []string `json:"canary,omitempty"`
	// Seed varies the order of all others.
	Seed uint64 `json:"seed,omitempty"`
	// Return is what bad health returns: ReturnWave (also "") or ReturnAll.
	Return string `json:"return,omitempty"`
	// Health is what is held to be bad.
	Health HealthRule `json:"health"`
	// ChangeTimeout is how long a cell may take for its upgrade before it counts as
	// failed; 0 means 10 m. By upgrade only.
	ChangeTimeout time.Duration `json:"change_timeout,omitempty"`
	// Concurrency is how many units change at once: moves (0 means 4), or cells (0
	// means 1).
	Concurrency int `json:"concurrency,omitempty"`
	// UndoWindow is for how long each move can be undone, as "24h"; "" is the
	// directory's own. By move only.
	UndoWindow string `json:"undo_window,omitempty"`
	// Force lets the moves exceed their tenants' budgets. Moves back always may.
	Force bool `json:"force,omitempty"`
}

// Bounds of rollouts.
const (
	// MaxWaves bounds the waves of a rollout.
	MaxWaves = 32
	// MaxBake bounds Bake, Patience and ChangeTimeout.
	MaxBake = 30 * 24 * time.Hour
	// MaxCanary bounds the named canaries.
	MaxCanary = 1000
)

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (s *RolloutSettings) Normalize() error {
	if len(s.Waves) == 0 {
		s.Waves = []float64{1, 10, 50, 100}
	}
	if s.Bake == 0 {
		s.Bake = 10 * time.Minute
	}
	if s.Patience == 0 {
		s.Patience = s.Bake
	}
	if s.ChangeTimeout == 0 {
		s.ChangeTimeout = 10 * time.Minute
	}
	if s.Return == "" {
		s.Return = ReturnWave
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{cells.ErrInvalid}, args...)...)
	}
	switch {
	case s.Version == "":
		return bad("a rollout is of a version")
	case s.Version == s.From:
		return bad("from version %s to itself", s.Version)
	case s.By != ByMove && s.By != ByUpgrade:
		return bad("by is %q; want %s or %s", s.By, ByMove, ByUpgrade)
	case s.Return != ReturnWave && s.Return != ReturnAll:
		return bad("return is %q; want %s or %s", s.Return, ReturnWave, ReturnAll)
	case len(s.Waves) > MaxWaves:
		return bad("%d waves; at most %d", len(s.Waves), MaxWaves)
	case s.Waves[len(s.Waves)-1] != 100:
		return bad("the last wave is %g%%; want 100%%", s.Waves[len(s.Waves)-1])
	case len(s.Canary) > MaxCanary:
		return bad("%d canaries; at most %d", len(s.Canary), MaxCanary)
	case s.Concurrency < 0 || s.Concurrency > 256:
		return bad("concurrency is %d; want 0 to 256", s.Concurrency)
	case s.By == ByUpgrade && (s.UndoWindow != "" || s.Force):
		return bad("undo_window and force are for rollouts by move")
	}
	for i, w := range s.Waves {
		if !(w > 0 && w <= 100) || i > 0 && w <= s.Waves[i-1] {
			return bad("wave %d is %g%%; want more than the one before, up to 100%%", i+1, w)
		}
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"bake", s.Bake}, {"patience", s.Patience}, {"change_timeout", s.ChangeTimeout}} {
		if d.v < 0 || d.v > MaxBake {
			return bad("%s is %v; want 0 to %v", d.name, d.v, MaxBake)
		}
	}
	for _, v := range []string{s.Version, s.From} {
		if err := checkText("version", v, 128); err != nil {
			return err
		}
	}
	seen := map[string]bool{}
	for _, c := range s.Canary {
		err := cells.TenantID(c).Validate()
		if s.By == ByUpgrade {
			err = cells.CellID(c).Validate()
		}
		if err != nil {
			return err
		}
		if seen[c] {
			return bad("canary %s is there twice", c)
		}
		seen[c] = true
	}
	if s.By == ByMove {
		moves := s.Campaign()
		if err := moves.Normalize(); err != nil {
			return err
		}
	}
	return s.Health.Normalize()
}

// Campaign are the settings of the campaigns that make the rollout's moves.
func (s *RolloutSettings) Campaign() CampaignSettings {
	return CampaignSettings{Concurrency: s.Concurrency, StopAfter: "none", UndoWindow: s.UndoWindow, Force: s.Force}
}
