// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// DefaultBudgetWindow and DefaultBudget are 99.995 % of 30 days: 129.6 seconds
// without service.
const (
	DefaultBudgetWindow = 30 * 24 * time.Hour
	DefaultBudget       = DefaultBudgetWindow / 20000
)

// BudgetEntry is one pause of a tenant, or what is reserved for one.
type BudgetEntry struct {
	Tenant TenantID `json:"tenant"`
	// Move is the move that paused the tenant. A tenant has one entry a move.
	Move MoveID `json:"move"`
	// At is when the pause was reserved or charged.
	At    time.Time     `json:"at"`
	Pause time.Duration `json:"pause"`
	// Reserved: Pause is what was predicted before the cut. It counts as if it had
	// happened until the move is charged.
	Reserved bool `json:"reserved,omitempty"`
}

// BudgetStore keeps the entries. Safe for concurrent use; a store that several
// processes share makes their updates exclude each other.
type BudgetStore interface {
	// Entries returns the tenant's entries in any order; none is no error. The
	// caller owns them. Errors wrap [ErrUnavailable] or [ErrInvalid].
	Entries(ctx context.Context, tenant TenantID) ([]BudgetEntry, error)
	// Update replaces the tenant's entries by what change returns for them,
	// atomically and durably. change may be called several times and must not block;
	// when it returns an error nothing is changed and Update returns that error.
	Update(ctx context.Context, tenant TenantID, change func([]BudgetEntry) ([]BudgetEntry, error)) error
}

// BudgetMeter tracks for how long each tenant was not served because it was
// moved, over a sliding window, and refuses what would exceed its budget. Without
// a file or a store it forgets everything when the process ends.
// Safe for concurrent use.
type BudgetMeter struct {
	store  BudgetStore
	budget time.Duration
	window time.Duration
	now    func() time.Time
}

// BudgetOption configures a BudgetMeter.
type BudgetOption func(*BudgetMeter)

// WithBudgetFile keeps the entries in the file at path, shared by any number of
// processes on this machine. The folder must exist; errors surface on use.
func WithBudgetFile(path string) BudgetOption {
	return func(m *BudgetMeter) { m.store = newBudgetFile(path) }
}

// WithBudgetStore keeps the entries in s.
func WithBudgetStore(s BudgetStore) BudgetOption { return func(m *BudgetMeter) { m.store = s } }

// WithBudget sets how long a tenant may go without service within window. Values
// that are not positive leave the default.
func WithBudget(budget, window time.Duration) BudgetOption {
	return func(m *BudgetMeter) {
		if budget > 0 {
			m.budget = budget
		}
		if window > 0 {
			m.window = window
		}
	}
}

// WithBudgetNow sets the clock.
func WithBudgetNow(now func() time.Time) BudgetOption { return func(m *BudgetMeter) { m.now = now } }

// NewBudgetMeter returns a meter with [DefaultBudget] in [DefaultBudgetWindow].
func NewBudgetMeter(opts ...BudgetOption) *BudgetMeter {
	m := &BudgetMeter{budget: DefaultBudget, window: DefaultBudgetWindow, now: time.Now}
	for _, o := range opts {
		o(m)
	}
	if m.store == nil {
		m.store = &budgetMem{}
	}
	if m.now == nil {
		m.now = time.Now
	}
	return m
}

// BudgetError refuses a pause. It wraps [ErrBudget].
type BudgetError struct {
	Tenant TenantID
	// Asked is the predicted pause, Remaining what is left of the budget.
	Asked, Remaining time.Duration
}

// Error implements error.
func (e *BudgetError) Error() string {
	return fmt.Sprintf("%v: tenant %s has %v left, a pause of %v is predicted", ErrBudget, e.Tenant,
		e.Remaining.Round(time.Millisecond), e.Asked.Round(time.Millisecond))
}

// Unwrap returns [ErrBudget].
func (e *BudgetError) Unwrap() error { return ErrBudget }

// Remaining returns what is left of the tenant's budget, reservations taken off;
// never negative.
func (m *BudgetMeter) Remaining(ctx context.Context, tenant TenantID) (time.Duration, error) {
	es, err := m.store.Entries(ctx, tenant)
	if err != nil {
		return 0, err
	}
	return m.left(m.current(es), ""), nil
}

// Allow reports whether a pause would fit, without reserving it: nil, or a
// [BudgetError]. Nothing fits once the budget is used up, not even a pause of 0.
func (m *BudgetMeter) Allow(ctx context.Context, tenant TenantID, pause time.Duration) error {
	es, err := m.store.Entries(ctx, tenant)
	if err != nil {
		return err
	}
	return m.fits(tenant, m.left(m.current(es), ""), pause)
}

// Reserve takes a predicted pause off the budget, or refuses with a [BudgetError].
// A move that has reserved before changes its reservation.
func (m *BudgetMeter) Reserve(ctx context.Context, tenant TenantID, move MoveID, pause time.Duration) error {
	return m.reserve(ctx, tenant, move, pause, false)
}

func (m *BudgetMeter) reserve(ctx context.Context, tenant TenantID, move MoveID, pause time.Duration, force bool) error {
	pause = max(pause, 0)
	return m.update(ctx, tenant, move, func(es []BudgetEntry) (*BudgetEntry, error) {
		if err := m.fits(tenant, m.left(es, move), pause); err != nil && !force {
			return nil, err
		}
		return &BudgetEntry{Tenant: tenant, Move: move, At: m.now(), Pause: pause, Reserved: true}, nil
	})
}

// Charge records how long the move has really paused the tenant, in place of
// what it had reserved. Charging the same move again keeps the longer pause.
func (m *BudgetMeter) Charge(ctx context.Context, tenant TenantID, move MoveID, pause time.Duration) error {
	return m.update(ctx, tenant, move, func(es []BudgetEntry) (*BudgetEntry, error) {
		e := BudgetEntry{Tenant: tenant, Move: move, At: m.now(), Pause: max(pause, 0)}
		for _, old := range es {
			if old.Move == move && !old.Reserved && old.Pause > e.Pause {
				e = old
			}
		}
		return &e, nil
	})
}

// Release gives a reservation back. A charge stays.
func (m *BudgetMeter) Release(ctx context.Context, tenant TenantID, move MoveID) error {
	return m.update(ctx, tenant, move, func(es []BudgetEntry) (*BudgetEntry, error) {
		for _, old := range es {
			if old.Move == move && !old.Reserved {
				return &old, nil
			}
		}
		return nil, nil
	})
}

// update replaces the move's entry by what f makes of the current ones.
func (m *BudgetMeter) update(ctx context.Context, tenant TenantID, move MoveID, f func([]BudgetEntry) (*BudgetEntry, error)) error {
	if err := tenant.Validate(); err != nil {
		return err
	}
	if err := move.Validate(); err != nil {
		return err
	}
	return m.store.Update(ctx, tenant, func(es []BudgetEntry) ([]BudgetEntry, error) {
		es = m.current(es)
		e, err := f(es)
		if err != nil {
			return nil, err
		}
		es = slices.DeleteFunc(es, func(o BudgetEntry) bool { return o.Move == move })
		if e != nil {
			e.At = e.At.UTC().Round(0)
			es = append(es, *e)
		}
		return es, nil
	})
}

// current drops what has left the window.
func (m *BudgetMeter) current(es []BudgetEntry) []BudgetEntry {
	since := m.now().Add(-m.window)
	return slices.DeleteFunc(slices.Clone(es), func(e BudgetEntry) bool { return !e.At.After(since) })
}

// left is what the entries, without those of move, leave of the budget.
func (m *BudgetMeter) left(es []BudgetEntry, move MoveID) time.Duration {
	left := m.budget
	for _, e := range es {
		if e.Move == move {
			continue
		}
		if left -= e.Pause; left <= 0 {
			return 0
		}
	}
	return left
}

func (m *BudgetMeter) fits(tenant TenantID, left, pause time.Duration) error {
	if left <= 0 || pause > left {
		return &BudgetError{Tenant: tenant, Asked: pause, Remaining: left}
	}
	return nil
}

// budgetMem is the store of a meter without one.
type budgetMem struct {
	mu      sync.Mutex // guards entries
	entries map[TenantID][]BudgetEntry
}

func (b *budgetMem) Entries(_ context.Context, tenant TenantID) ([]BudgetEntry, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.entries[tenant]), nil
}

func (b *budgetMem) Update(_ context.Context, tenant TenantID, change func([]BudgetEntry) ([]BudgetEntry, error)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	es, err := change(slices.Clone(b.entries[tenant]))
	if err != nil {
		return err
	}
	if b.entries == nil {
		b.entries = map[TenantID][]BudgetEntry{}
	}
	if len(es) == 0 {
		delete(b.entries, tenant)
	} else {
		b.entries[tenant] = slices.Clone(es)
	}
	return nil
}
