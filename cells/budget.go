// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"slices"
	"sync"
	"time"
)

// DefaultBudgetWindow and DefaultBudget are 99.995 % of a month: 129.6 seconds
// without service. A month is any 30 days of 24 hours, ending now: a pause counts
// for 30 days from its beginning, and then no more, whatever the calendar says.
const (
	DefaultBudgetWindow = 30 * 24 * time.Hour
	DefaultBudget       = DefaultBudgetWindow / 20000
)

// BudgetEntry is one pause of a tenant, or what is reserved for one.
type BudgetEntry struct {
	Tenant TenantID `json:"tenant"`
	// Move is the move that paused the tenant. A tenant has one entry a move.
	Move MoveID `json:"move"`
	// At is when the pause began: when it was reserved, or charged if it never was.
	At time.Time `json:"at"`
	// Pause is what counts against the budget: what is reserved; then what clients saw,
	// if an edge has reported; else what the driver measured.
	Pause time.Duration `json:"pause"`
	// Reserved: the cut may still be under way. Pause is the most that it may take
	// before it is given up, and counts as if it had happened.
	Reserved bool `json:"reserved,omitempty"`
	// Driver is the pause as the driver of the move measured it; 0 until then, and for
	// good if that driver died before it could say.
	Driver time.Duration `json:"driver,omitempty"`
	// Seen is for how long clients were refused because of the move, as edges
	// reported it; only if Reported.
	Seen     time.Duration `json:"seen,omitempty"`
	Reported bool          `json:"reported,omitempty"`
	// Forced: the move may exceed the budget, because Actor said so.
	Forced bool   `json:"forced,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

// count makes Pause what counts.
func (e *BudgetEntry) count() {
	switch {
	case e.Reserved:
	case e.Reported:
		e.Pause = e.Seen
	default:
		e.Pause = e.Driver
	}
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

// Remaining returns what is left of the tenant's budget, reservations taken off;
// never negative.
func (m *BudgetMeter) Remaining(ctx context.Context, tenant TenantID) (time.Duration, error) {
	a, err := m.Account(ctx, tenant)
	return a.Left, err
}

// Allow reports whether a pause would fit, without reserving it: nil, or a
// [BudgetError]. Nothing fits once the budget is used up, not even a pause of 0.
func (m *BudgetMeter) Allow(ctx context.Context, tenant TenantID, pause time.Duration) error {
	limit, err := m.limit(ctx, tenant)
	if err != nil {
		return err
	}
	es, err := m.store.Entries(ctx, tenant)
	if err != nil {
		return err
	}
	return m.fits(tenant, limit.Pause, m.current(es), "", pause)
}

// Reserve takes a predicted pause off the budget, or refuses with a [BudgetError].
// A move that has reserved before changes its reservation.
func (m *BudgetMeter) Reserve(ctx context.Context, tenant TenantID, move MoveID, pause time.Duration) error {
	_, err := m.reserve(ctx, tenant, move, pause, max(pause, 0), false)
	return err
}

// reserve reserves as much of want as is left, if pause fits. A move that is forced,
// now or by [BudgetMeter.Authorize], gets all of it, fitting or not. With over, other
// moves of the tenant are known to have ended: what they reserved and never settled
// counts as it is.
func (m *BudgetMeter) reserve(ctx context.Context, tenant TenantID, move MoveID, pause, want time.Duration, over bool) (granted time.Duration, _ error) {
	err := m.update(ctx, tenant, move, func(limit time.Duration, es []BudgetEntry, e *BudgetEntry) (keep bool, _ error) {
		granted = want
		if !e.Forced {
			if err := m.fits(tenant, limit, es, move, max(pause, 0)); err != nil {
				return false, err
			}
			granted = min(want, left(limit, es, move))
		}
		for i := range es {
			if over && es[i].Move != move {
				es[i].Reserved = false
			}
		}
		e.At, e.Pause, e.Reserved = m.now(), granted, true
		return true, nil
	})
	return granted, err
}

// Authorize lets the move exceed the budget and records who said so. Whoever drives
// the move on, in whatever process, is bound by it.
func (m *BudgetMeter) Authorize(ctx context.Context, tenant TenantID, move MoveID, actor string) error {
	return m.update(ctx, tenant, move, func(_ time.Duration, _ []BudgetEntry, e *BudgetEntry) (bool, error) {
		if e.At.IsZero() {
			e.At, e.Reserved = m.now(), true
		}
		if !e.Forced {
			e.Forced, e.Actor = true, actor
		}
		return true, nil
	})
}

// Charge records for how long the driver measured that the move has paused the
// tenant, in place of what it had reserved. Charging the same move again keeps the
// longer pause. What counts is what clients saw, once an edge has reported that.
func (m *BudgetMeter) Charge(ctx context.Context, tenant TenantID, move MoveID, pause time.Duration) error {
	return m.update(ctx, tenant, move, func(_ time.Duration, _ []BudgetEntry, e *BudgetEntry) (bool, error) {
		if e.At.IsZero() {
			e.At = m.now()
		}
		e.Reserved, e.Driver = false, max(pause, e.Driver)
		e.count()
		return true, nil
	})
}

// ChargeSeen records for how long clients were refused because of the move: from
// now on that is what counts, whether it is more or less than the driver measured.
// It may be called again with another value, and before the driver has charged. It
// returns the move's entry.
func (m *BudgetMeter) ChargeSeen(ctx context.Context, tenant TenantID, move MoveID, seen time.Duration) (BudgetEntry, error) {
	var out BudgetEntry
	err := m.update(ctx, tenant, move, func(_ time.Duration, _ []BudgetEntry, e *BudgetEntry) (bool, error) {
		if e.At.IsZero() {
			e.At = m.now()
		}
		e.Seen, e.Reported = max(seen, 0), true
		e.count()
		out = *e
		return true, nil
	})
	return out, err
}

// Settle ends the reservation of a move that is over and that nobody has charged: its
// driver died first. A pause that is known otherwise is charged; else (negative) what
// was reserved counts. Nothing happens to a move without a reservation.
func (m *BudgetMeter) Settle(ctx context.Context, tenant TenantID, move MoveID, pause time.Duration) error {
	return m.update(ctx, tenant, move, func(_ time.Duration, _ []BudgetEntry, e *BudgetEntry) (bool, error) {
		if !e.Reserved {
			return !e.At.IsZero(), nil
		}
		e.Reserved = false
		if pause >= 0 {
			e.Driver = pause
			e.count()
		}
		return true, nil
	})
}

// Release gives a reservation back: there was no cut. A charge stays.
func (m *BudgetMeter) Release(ctx context.Context, tenant TenantID, move MoveID) error {
	return m.update(ctx, tenant, move, func(_ time.Duration, _ []BudgetEntry, e *BudgetEntry) (bool, error) {
		if !e.Reserved {
			return !e.At.IsZero(), nil
		}
		e.Reserved = false
		e.count()
		return e.Reported, nil
	})
}

// update changes the move's entry; one that is new has only its names. f gets the
// limit and a copy of the tenant's current entries, which it may change too.
func (m *BudgetMeter) update(ctx context.Context, tenant TenantID, move MoveID, f func(limit time.Duration, es []BudgetEntry, e *BudgetEntry) (keep bool, _ error)) error {
	if err := tenant.Validate(); err != nil {
		return err
	}
	if err := move.Validate(); err != nil {
		return err
	}
	limit, err := m.limit(ctx, tenant)
	if err != nil {
		return err
	}
	return m.store.Update(ctx, tenant, func(es []BudgetEntry) ([]BudgetEntry, error) {
		es = m.current(es)
		e := BudgetEntry{Tenant: tenant, Move: move}
		i := slices.IndexFunc(es, func(o BudgetEntry) bool { return o.Move == move })
		if i >= 0 {
			e = es[i]
		}
		keep, err := f(limit.Pause, es, &e)
		if err != nil {
			return nil, err
		}
		es = slices.DeleteFunc(es, func(o BudgetEntry) bool { return o.Move == move })
		if keep {
			e.At = e.At.UTC().Round(0)
			es = append(es, e)
		}
		return es, nil
	})
}

// current drops what has left the window.
func (m *BudgetMeter) current(es []BudgetEntry) []BudgetEntry {
	since := m.now().Add(-m.window)
	return slices.DeleteFunc(slices.Clone(es), func(e BudgetEntry) bool { return !e.At.After(since) })
}

// left is what the entries, without those of move, leave of the limit.
func left(limit time.Duration, es []BudgetEntry, move MoveID) time.Duration {
	for _, e := range es {
		if e.Move == move {
			continue
		}
		if limit -= e.Pause; limit <= 0 {
			return 0
		}
	}
	return max(limit, 0)
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
