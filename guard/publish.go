// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// PartialError is returned by a [Publisher] that has accepted the first events
// of a batch but not all: those are recorded, and only the rest is given again.
type PartialError struct {
	// Accepted is how many events, from the first, were accepted.
	Accepted int
	// Err is why the next one was not.
	Err error
}

// Error implements error.
func (e *PartialError) Error() string { return fmt.Sprintf("after %d events: %v", e.Accepted, e.Err) }

// Unwrap returns the cause.
func (e *PartialError) Unwrap() error { return e.Err }

// DelayError is returned by a [Publisher] that knows when it is worth while to be
// called again: a receiver has said so. The relay leaves the tenant alone for that
// long, at most for an hour.
type DelayError struct {
	// After is how long to wait; longer than the relay's own wait to count.
	After time.Duration
	// Err is what failed.
	Err error
}

// Error implements error.
func (e *DelayError) Error() string {
	return fmt.Sprintf("%v (again after %s)", e.Err, e.After.Round(time.Millisecond))
}

// Unwrap returns what failed.
func (e *DelayError) Unwrap() error { return e.Err }

// Accepted returns how many of n events a publisher that returned err has
// accepted: all when err is nil, otherwise what a [PartialError] says, or none.
func Accepted(err error, n int) int {
	if err == nil {
		return n
	}
	var p *PartialError
	if errors.As(err, &p) {
		return max(0, min(p.Accepted, n))
	}
	return 0
}

// PublisherFunc is a function that is a [Publisher].
type PublisherFunc func(ctx context.Context, events []Event) error

// Publish implements [Publisher].
func (f PublisherFunc) Publish(ctx context.Context, events []Event) error { return f(ctx, events) }

// Publishers returns a publisher that gives each batch to all ps, one after the
// other. The batch is accepted as far as all of them have accepted it; those
// that were ahead get events again.
func Publishers(ps ...Publisher) Publisher {
	return PublisherFunc(func(ctx context.Context, events []Event) error {
		var first error
		for _, p := range ps {
			err := p.Publish(ctx, events)
			// The next ones get what this one has accepted.
			events = events[:Accepted(err, len(events))]
			if err != nil {
				first = &PartialError{len(events), err}
			}
			if len(events) == 0 {
				break
			}
		}
		return first
	})
}

// Local delivers events to functions in this process. It is a [Publisher]; the
// zero value is ready. It hears only what this process publishes: other
// processes of the cell may have the turn. Streams to clients read the [Outbox]
// instead.
type Local struct {
	mu   sync.RWMutex // guards subs; held for reading during deliveries
	subs []*subscription
}

type subscription struct {
	tenant cells.TenantID
	f      func(context.Context, Event) error
}

// Subscribe calls f for each event of the tenant ("": of every tenant) that is
// published from now on: in order for one tenant, for several tenants at the same
// time. An error of f is one of the publication: the event comes again, to all
// subscribers. The function that is returned ends the subscription, after the
// deliveries that are under way; f must not call it.
func (l *Local) Subscribe(tenant cells.TenantID, f func(context.Context, Event) error) (unsubscribe func()) {
	s := &subscription{tenant, f}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.subs = append(l.subs, s)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.subs = slices.DeleteFunc(l.subs, func(o *subscription) bool { return o == s })
	}
}

// Publish implements [Publisher].
func (l *Local) Publish(ctx context.Context, events []Event) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for i, e := range events {
		for _, s := range l.subs {
			if s.tenant != "" && s.tenant != e.Tenant {
				continue
			}
			if err := ctx.Err(); err != nil {
				return &PartialError{i, context.Cause(ctx)}
			}
			if err := s.f(ctx, e); err != nil {
				return &PartialError{i, err}
			}
		}
	}
	return nil
}
