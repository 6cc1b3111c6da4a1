// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Limits bound what a move may cost the cells that it runs between.
type Limits struct {
	// MaxRetained is how many bytes of changes the source may have to keep for the move:
	// write-ahead log behind its slot, change log. A move that needs more is rolled back
	// before it fills a disk. 0 is [DefaultMaxRetained], a negative number is no limit.
	MaxRetained int64 `json:"max_retained,omitempty"`
	// MaxReplicaLag pauses copying while a standby of one of the cells' servers is
	// further behind than that; 0 is no limit.
	MaxReplicaLag time.Duration `json:"max_replica_lag,omitempty"`
}

// DefaultMaxRetained is 8 GiB.
const DefaultMaxRetained = 8 << 30

// Retained is the limit in bytes; 0 if there is none.
func (l Limits) Retained() int64 {
	if l.MaxRetained == 0 {
		return DefaultMaxRetained
	}
	return max(0, l.MaxRetained)
}

// Check fails with [ErrRetention] if more is kept than the limit allows.
func (l Limits) Check(cell cells.CellID, kept int64) error {
	if limit := l.Retained(); limit > 0 && kept > limit {
		return fmt.Errorf("%w: cell %s keeps %d bytes of changes for it, the limit is %d; move at a quieter time, copy faster, or raise the limit (--max-retained) if its disk has room",
			ErrRetention, cell, kept, limit)
	}
	return nil
}

// Validate reports whether the limits make sense; the error wraps [cells.ErrInvalid].
func (l Limits) Validate() error {
	if l.MaxReplicaLag < 0 {
		return fmt.Errorf("%w: replica lag %v", cells.ErrInvalid, l.MaxReplicaLag)
	}
	return nil
}

type limitsKey struct{}

// ContextWithLimits sets the limits for a Prepare that is called with the context.
func ContextWithLimits(ctx context.Context, l Limits) context.Context {
	return context.WithValue(ctx, limitsKey{}, l)
}

func limitsOf(ctx context.Context) Limits {
	l, _ := LimitsOf(ctx)
	return l
}

// LimitsOf returns what [ContextWithLimits] has set, if it was called.
func LimitsOf(ctx context.Context) (Limits, bool) {
	l, ok := ctx.Value(limitsKey{}).(Limits)
	return l, ok
}

// Health is what a running move costs its source, and what holds it up there.
type Health struct {
	// Retained is the bytes of changes that are kept for the move.
	Retained int64 `json:"retained"`
	// ReplicaLag is how far the slowest standby of the server is behind; 0 without one,
	// or if the agent may not see it.
	ReplicaLag time.Duration `json:"replica_lag,omitempty"`
	// Shared is how many moves share the capture, this one included; 0 if it has its own.
	Shared int `json:"shared,omitempty"`
	// Blockers are transactions for which a view has to wait, the oldest first, a few
	// at most.
	Blockers []Blocker `json:"blockers,omitempty"`
}

// Blocker is a transaction that others wait for. What it does is not told: statements
// carry values.
type Blocker struct {
	// PID is the server process; 0 for a prepared transaction, which GID names.
	PID int    `json:"pid,omitempty"`
	GID string `json:"gid,omitempty"`
	// User, Application and Database are what the client has said.
	User        string `json:"user,omitempty"`
	Application string `json:"application,omitempty"`
	Database    string `json:"database,omitempty"`
	State       string `json:"state,omitempty"`
	// Began is the start of the transaction, QueryBegan that of its last statement;
	// both by the server's clock, as is Age.
	Began      time.Time     `json:"began"`
	QueryBegan time.Time     `json:"query_began,omitzero"`
	Age        time.Duration `json:"age"`
}

// String names the transaction for a person.
func (b Blocker) String() string {
	var s strings.Builder
	if b.GID != "" {
		fmt.Fprintf(&s, "prepared transaction %q", b.GID)
	} else {
		fmt.Fprintf(&s, "pid %d", b.PID)
	}
	who := []string{}
	for _, f := range []struct{ name, value string }{{"user", b.User}, {"application", b.Application}, {"database", b.Database}} {
		if f.value != "" {
			who = append(who, f.name+" "+f.value)
		}
	}
	if len(who) > 0 {
		fmt.Fprintf(&s, " (%s)", strings.Join(who, ", "))
	}
	fmt.Fprintf(&s, ", open for %v since %s", b.Age.Round(time.Second), b.Began.UTC().Format(time.DateTime))
	if b.State != "" {
		fmt.Fprintf(&s, ", %s", b.State)
	}
	if !b.QueryBegan.IsZero() {
		fmt.Fprintf(&s, ", last statement at %s", b.QueryBegan.UTC().Format(time.DateTime))
	}
	return s.String()
}

func nameAll(bs []Blocker) string {
	out := make([]string, len(bs))
	for i, b := range bs {
		out[i] = b.String()
	}
	return strings.Join(out, "; ")
}
