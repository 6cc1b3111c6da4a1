// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Sentinels of [Room.Enter].
var (
	// ErrFull: the room as a whole has no place for this request.
	ErrFull = errors.New("hold: the room is full")
	// ErrTenantFull: the tenant has used up its share of the room.
	ErrTenantFull = errors.New("hold: too many requests of this tenant wait")
)

// Limits bound a room. A zero field takes its default.
type Limits struct {
	// Requests waiting at once; default 8192.
	Requests int
	// Bytes of buffered bodies waiting at once; default 64 MiB. Each request counts
	// as Overhead more.
	Bytes int64
	// TenantRequests and TenantBytes are the same for one tenant; defaults are a
	// quarter of the above.
	TenantRequests int
	TenantBytes    int64
	// Time that one request may wait, all its waits together; default 15 s.
	Time time.Duration
}

// Overhead is what a waiting request counts for besides its body, in bytes.
const Overhead = 4 << 10

// WithDefaults fills zero fields and reports fields that make no sense; the error
// wraps [cells.ErrInvalid].
func (l Limits) WithDefaults() (Limits, error) {
	if l.Requests == 0 {
		l.Requests = 8192
	}
	if l.Bytes == 0 {
		l.Bytes = 64 << 20
	}
	if l.TenantRequests == 0 {
		l.TenantRequests = max(1, l.Requests/4)
	}
	if l.TenantBytes == 0 {
		l.TenantBytes = max(Overhead, l.Bytes/4)
	}
	if l.Time == 0 {
		l.Time = 15 * time.Second
	}
	if l.Requests < 0 || l.Bytes < Overhead || l.TenantRequests < 0 || l.TenantBytes < Overhead || l.Time < 0 {
		return l, fmt.Errorf("%w: hold: requests %d, bytes %d, tenant requests %d, tenant bytes %d, time %s: want positive values, and bytes of at least %d",
			cells.ErrInvalid, l.Requests, l.Bytes, l.TenantRequests, l.TenantBytes, l.Time, Overhead)
	}
	return l, nil
}

// Room counts who waits. Safe for concurrent use; it has no goroutine.
type Room struct {
	limits Limits

	mu      sync.Mutex // guards what follows
	n       int
	bytes   int64
	tenants map[cells.TenantID]*share
}

type share struct {
	n     int
	bytes int64
}

// NewRoom returns an empty room. The error is that of [Limits.WithDefaults].
func NewRoom(l Limits) (*Room, error) {
	l, err := l.WithDefaults()
	if err != nil {
		return nil, err
	}
	return &Room{limits: l, tenants: map[cells.TenantID]*share{}}, nil
}

// Limits returns the room's bounds, defaults filled in.
func (r *Room) Limits() Limits { return r.limits }

// Enter takes a place for a request with that many buffered bytes. It never
// blocks. Errors: [ErrFull], [ErrTenantFull].
func (r *Room) Enter(tenant cells.TenantID, bytes int64) (*Ticket, error) {
	bytes += Overhead
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.tenants[tenant]
	var mine share
	if s != nil {
		mine = *s
	}
	switch reserve := r.limits.Requests / 8; {
	case r.n >= r.limits.Requests || r.bytes+bytes > r.limits.Bytes:
		return nil, ErrFull
	case mine.n >= r.limits.TenantRequests || mine.bytes+bytes > r.limits.TenantBytes:
		return nil, ErrTenantFull
	case r.n >= r.limits.Requests-reserve && mine.n >= max(1, r.limits.Requests/64):
		return nil, ErrTenantFull
	}
	if s == nil {
		s = &share{}
		r.tenants[tenant] = s
	}
	s.n++
	s.bytes += bytes
	r.n++
	r.bytes += bytes
	return &Ticket{room: r, tenant: tenant, bytes: bytes, since: now, deadline: now.Add(r.limits.Time)}, nil
}

// Held returns how many requests wait now, and their bytes.
func (r *Room) Held() (requests int, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n, r.bytes
}

// HeldBy returns how many requests of the tenant wait now.
func (r *Room) HeldBy(tenant cells.TenantID) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.tenants[tenant]; s != nil {
		return s.n
	}
	return 0
}

// Ticket is a place in the room. It belongs to one request.
type Ticket struct {
	room     *Room
	tenant   cells.TenantID
	bytes    int64
	since    time.Time
	deadline time.Time
	once     sync.Once
}

// Since is when the request began to wait.
func (t *Ticket) Since() time.Time { return t.since }

// Deadline is when its time is up.
func (t *Ticket) Deadline() time.Time { return t.deadline }

// Leave gives the place back and returns how long it was taken. Idempotent.
func (t *Ticket) Leave() time.Duration {
	t.once.Do(func() {
		r := t.room
		r.mu.Lock()
		defer r.mu.Unlock()
		r.n--
		r.bytes -= t.bytes
		s := r.tenants[t.tenant]
		s.n--
		s.bytes -= t.bytes
		if s.n == 0 {
			delete(r.tenants, t.tenant)
		}
	})
	return time.Since(t.since)
}
