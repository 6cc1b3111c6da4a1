// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"cmp"
	"context"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"
)

// BudgetLimit is how long a tenant may go without service within a meter's window.
type BudgetLimit struct {
	Pause time.Duration `json:"pause"`
	// Own: the tenant has this limit for itself; otherwise it is everybody's.
	Own bool `json:"own,omitempty"`
}

// BudgetLimits is what a [BudgetStore] may offer besides its entries: limits that
// are kept with them.
type BudgetLimits interface {
	// BudgetLimit returns the tenant's limit, its own or everybody's; ok is false when
	// neither was set, and the meter's own applies. Errors wrap [ErrUnavailable].
	BudgetLimit(ctx context.Context, tenant TenantID) (limit BudgetLimit, ok bool, err error)
}

// BudgetAccount is the state of a tenant's budget.
type BudgetAccount struct {
	Tenant TenantID `json:"tenant"`
	// Limit within Window; Used and Left of it. What is reserved is used.
	Limit  BudgetLimit   `json:"limit"`
	Window time.Duration `json:"window"`
	Used   time.Duration `json:"used"`
	Left   time.Duration `json:"left"`
	// GrowsAt is when the oldest pause leaves the window, which gives GrowsBy back;
	// zero when there is none. GrowsBy is less than that pause, even 0, when more than
	// the limit was used.
	GrowsAt time.Time     `json:"grows_at,omitzero"`
	GrowsBy time.Duration `json:"grows_by,omitempty"`
	// Entries are the pauses within the window, the oldest first.
	Entries []BudgetEntry `json:"entries,omitempty"`
}

// Entry returns the entry of a move.
func (a *BudgetAccount) Entry(move MoveID) (BudgetEntry, bool) {
	for _, e := range a.Entries {
		if e.Move == move {
			return e, true
		}
	}
	return BudgetEntry{}, false
}

// Without is what would be left if the move had not been.
func (a *BudgetAccount) Without(move MoveID) time.Duration {
	return left(a.Limit.Pause, a.Entries, move)
}

// Account returns the state of the tenant's budget.
func (m *BudgetMeter) Account(ctx context.Context, tenant TenantID) (BudgetAccount, error) {
	limit, err := m.limit(ctx, tenant)
	if err != nil {
		return BudgetAccount{}, err
	}
	es, err := m.store.Entries(ctx, tenant)
	if err != nil {
		return BudgetAccount{}, err
	}
	es = m.current(es)
	slices.SortFunc(es, func(x, y BudgetEntry) int {
		return cmp.Or(x.At.Compare(y.At), strings.Compare(string(x.Move), string(y.Move)))
	})
	a := BudgetAccount{Tenant: tenant, Limit: limit, Window: m.window, Left: left(limit.Pause, es, ""), Entries: es}
	for _, e := range es {
		a.Used += e.Pause
	}
	if at, by := m.grows(limit.Pause, es, func(after time.Duration) bool { return after > a.Left }); !at.IsZero() {
		a.GrowsAt, a.GrowsBy = at, by-a.Left
	} else if len(es) > 0 {
		a.GrowsAt = es[0].At.Add(m.window)
	}
	return a, nil
}

// grows returns when enough entries have left the window for what is left to
// satisfy enough, and what is left then; the zero time when it never will. es are
// in order of their times.
func (m *BudgetMeter) grows(limit time.Duration, es []BudgetEntry, enough func(left time.Duration) bool) (time.Time, time.Duration) {
	for i, e := range es {
		if after := left(limit, es[i+1:], ""); enough(after) {
			return e.At.Add(m.window), after
		}
	}
	return time.Time{}, 0
}

// forced reports whether the move may exceed the budget.
func (m *BudgetMeter) entry(ctx context.Context, tenant TenantID, move MoveID) (BudgetEntry, error) {
	es, err := m.store.Entries(ctx, tenant)
	for _, e := range es {
		if e.Move == move {
			return e, err
		}
	}
	return BudgetEntry{}, err
}

// limit returns the tenant's limit.
func (m *BudgetMeter) limit(ctx context.Context, tenant TenantID) (BudgetLimit, error) {
	if s, ok := m.store.(BudgetLimits); ok {
		l, ok, err := s.BudgetLimit(ctx, tenant)
		if err != nil || ok {
			return l, err
		}
	}
	return BudgetLimit{Pause: m.budget}, nil
}

// DefaultLimit is the limit of tenants for whom the store has none, and Window is
// what it counts within.
func (m *BudgetMeter) DefaultLimit() time.Duration { return m.budget }

// Window is how long a pause counts.
func (m *BudgetMeter) Window() time.Duration { return m.window }

func (m *BudgetMeter) fits(tenant TenantID, limit time.Duration, es []BudgetEntry, move MoveID, pause time.Duration) error {
	rest := left(limit, es, move)
	if rest > 0 && pause <= rest {
		return nil
	}
	others := slices.DeleteFunc(slices.Clone(es), func(e BudgetEntry) bool { return e.Move == move })
	slices.SortFunc(others, func(x, y BudgetEntry) int { return x.At.Compare(y.At) })
	e := &BudgetError{Tenant: tenant, Asked: pause, Remaining: rest, Limit: limit, Window: m.window}
	at, after := m.grows(limit, others, func(after time.Duration) bool { return after > rest })
	e.GrowsAt, e.GrowsTo = at, after
	e.FitsAt, _ = m.grows(limit, others, func(after time.Duration) bool { return after > 0 && pause <= after })
	return e
}

// BudgetError refuses a pause. It wraps [ErrBudget].
type BudgetError struct {
	Tenant TenantID
	// Asked is the predicted pause, Remaining what is left of Limit within Window.
	Asked, Remaining time.Duration
	Limit, Window    time.Duration
	// GrowsAt is when more will be left, GrowsTo how much then; FitsAt when the pause
	// would fit if nothing else happens. Zero: never.
	GrowsAt, FitsAt time.Time
	GrowsTo         time.Duration
}

// Error implements error.
func (e *BudgetError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v: tenant %s has %v left of %v in %s, a pause of %v is predicted", ErrBudget, e.Tenant,
		e.Remaining.Round(time.Millisecond), e.Limit, days(e.Window), e.Asked.Round(time.Millisecond))
	at := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	switch {
	case e.FitsAt.IsZero() && e.GrowsAt.IsZero():
		b.WriteString("; it would not fit a budget that nothing was taken from")
	case e.FitsAt.IsZero():
		fmt.Fprintf(&b, "; %v are left at %s, and it never fits", e.GrowsTo.Round(time.Millisecond), at(e.GrowsAt))
	case e.FitsAt.Equal(e.GrowsAt):
		fmt.Fprintf(&b, "; it fits at %s, when %v are left", at(e.FitsAt), e.GrowsTo.Round(time.Millisecond))
	default:
		fmt.Fprintf(&b, "; %v are left at %s, and it fits at %s", e.GrowsTo.Round(time.Millisecond), at(e.GrowsAt), at(e.FitsAt))
	}
	b.WriteString("; --force goes ahead, which is recorded with its actor")
	return b.String()
}

// Unwrap returns [ErrBudget].
func (e *BudgetError) Unwrap() error { return ErrBudget }

func days(d time.Duration) string {
	if d >= 24*time.Hour && d%(24*time.Hour) == 0 {
		return fmt.Sprintf("%d days", d/(24*time.Hour))
	}
	return d.String()
}

// ParseAvailability turns a percentage such as "99.995" or "99.995%" into how long
// a tenant may be without service within the window, exactly, rounded down to a
// nanosecond. It takes 0 to 100 with up to 9 decimals; the error wraps [ErrInvalid].
func ParseAvailability(s string, window time.Duration) (time.Duration, error) {
	bad := fmt.Errorf("%w: availability %q is not a percentage such as 99.995", ErrInvalid, s)
	whole, frac, dot := strings.Cut(strings.TrimSuffix(s, "%"), ".")
	digits := func(s string) bool { return strings.Trim(s, "0123456789") == "" }
	if len(whole) == 0 || len(whole) > 3 || len(frac) > 9 || dot && frac == "" || !digits(whole) || !digits(frac) || window < 0 {
		return 0, bad
	}
	percent, ok := new(big.Rat).SetString(whole + "." + frac + "0")
	hundred := big.NewRat(100, 1)
	if !ok || percent.Cmp(hundred) > 0 {
		return 0, bad
	}
	down := new(big.Rat).Sub(hundred, percent)
	down.Mul(down, new(big.Rat).SetFrac64(int64(window), 100))
	return time.Duration(new(big.Int).Quo(down.Num(), down.Denom()).Int64()), nil
}
