// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// BudgetSpec is the body of PUT PathBudgets, for everybody, and of PUT
// PathBudgets/{tenant}.
type BudgetSpec struct {
	// Pause is how long a tenant may be without service within the window; 0 allows
	// forced moves only.
	Pause time.Duration `json:"pause"`
	Actor string        `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (s *BudgetSpec) Normalize(window time.Duration) error {
	if s.Pause < 0 || s.Pause > window {
		return fmt.Errorf("%w: pause %v is not between 0 and the window of %v", cells.ErrInvalid, s.Pause, window)
	}
	return normalizeAsked(&s.Actor, "")
}

// BudgetLimit is a limit that was set.
type BudgetLimit struct {
	// Tenant whose limit it is; "" for everybody without one.
	Tenant cells.TenantID `json:"tenant,omitempty"`
	Pause  time.Duration  `json:"pause"`
	Actor  string         `json:"actor,omitempty"`
	At     time.Time      `json:"at,omitzero"`
}

// BudgetList answers GET PathBudgets.
type BudgetList struct {
	// Window is how long a pause counts; Default what tenants have that none was set for.
	Window  time.Duration `json:"window"`
	Default BudgetLimit   `json:"default"`
	// Tenants are those with limits of their own, in their order.
	Tenants []BudgetLimit `json:"tenants"`
}

// Bounds of reports of what clients saw.
const (
	// MaxSeen is how many moves one report may be about.
	MaxSeen = 256
	// MaxSpan bounds the times of a report.
	MaxSpan = 24 * time.Hour
)

// SeenReport is the body of POST PathSeen: what the clients of one edge process saw
// of moves. It is sent again until it is answered.
type SeenReport struct {
	// Instance names the process; 1 to 64 bytes of [A-Za-z0-9._-].
	Instance string     `json:"instance"`
	Moves    []SeenMove `json:"moves"`
}

// SeenMove is what clients saw of one move, all of it so far. Times are ages, by the
// edge's monotonic clock, when the report was sent: no two clocks are compared.
type SeenMove struct {
	Tenant cells.TenantID `json:"tenant"`
	// Move, or "" if the edge has not seen its id; Base is the epoch that it began
	// from, which names it too.
	Move cells.MoveID `json:"move,omitempty"`
	Base cells.Epoch  `json:"base"`
	// Seq grows whenever one of the following changes.
	Seq int64 `json:"seq"`
	// Refused counts the requests that were refused because of the move; 0 says that
	// the edge has seen the cut, and that every request was answered.
	Refused int64 `json:"refused"`
	// FirstAgo is how long ago the first refused request arrived. LastAgo is how long
	// ago the last one was told it might come again; negative: in so long.
	FirstAgo time.Duration `json:"first_ago,omitempty"`
	LastAgo  time.Duration `json:"last_ago,omitempty"`
}

// Normalize reports what is malformed; the error wraps [cells.ErrInvalid].
func (r *SeenReport) Normalize() error {
	if cells.MoveID(r.Instance).Validate() != nil {
		return fmt.Errorf("%w: instance must have 1 to 64 bytes of [A-Za-z0-9._-]", cells.ErrInvalid)
	}
	if len(r.Moves) > MaxSeen {
		return fmt.Errorf("%w: a report is about %d moves at most", cells.ErrInvalid, MaxSeen)
	}
	for i := range r.Moves {
		m := &r.Moves[i]
		if err := m.Tenant.Validate(); err != nil {
			return err
		}
		if m.Move != "" {
			if err := m.Move.Validate(); err != nil {
				return err
			}
		}
		switch {
		case m.Seq < 1, m.Refused < 0, m.Refused == 0 && (m.FirstAgo != 0 || m.LastAgo != 0):
			return fmt.Errorf("%w: seq %d, refused %d, first_ago %v, last_ago %v", cells.ErrInvalid, m.Seq, m.Refused, m.FirstAgo, m.LastAgo)
		case m.FirstAgo < 0, m.FirstAgo > MaxSpan, m.LastAgo < -MaxSpan, m.LastAgo > m.FirstAgo:
			return fmt.Errorf("%w: first_ago %v, last_ago %v", cells.ErrInvalid, m.FirstAgo, m.LastAgo)
		}
	}
	return nil
}
