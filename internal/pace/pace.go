// SPDX-License-Identifier: Apache-2.0

// Package pace bounds how often each of many callers may do something in this process.
// It keeps one bucket for each name, of those that were seen last.
package pace

import (
	"container/list"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limit bounds names to a rate each. Make it with [New] or [NewBurst].
type Limit struct {
	per          rate.Limit
	burst, names int

	mu    sync.Mutex
	order *list.List               // of *bucket, last used first; guarded by mu
	by    map[string]*list.Element // guarded by mu
}

type bucket struct {
	name string
	l    *rate.Limiter
}

// New bounds each name to perMinute, at least 1, all of which may come at once. It
// remembers the last names callers; one that is forgotten begins anew.
func New(perMinute, names int) *Limit {
	perMinute = max(perMinute, 1)
	return NewBurst(rate.Limit(float64(perMinute)/60), perMinute, names)
}

// NewBurst bounds each name to per a second, of which burst may come at once, and
// remembers names as New does.
func NewBurst(per rate.Limit, burst, names int) *Limit {
	return &Limit{per: per, burst: max(burst, 1), names: max(names, 1), order: list.New(), by: map[string]*list.Element{}}
}

// Take counts one call of the name. If it is past its pace the call is not counted,
// and Take returns after what time one would be, with no other between: one second to
// a minute.
func (p *Limit) Take(name string) (wait time.Duration) {
	p.mu.Lock()
	e := p.by[name]
	if e == nil {
		for len(p.by) >= p.names {
			last := p.order.Back()
			delete(p.by, last.Value.(*bucket).name)
			p.order.Remove(last)
		}
		e = p.order.PushFront(&bucket{name: name, l: rate.NewLimiter(p.per, p.burst)})
		p.by[name] = e
	}
	p.order.MoveToFront(e)
	l := e.Value.(*bucket).l
	p.mu.Unlock()
	res := l.Reserve()
	if wait = res.Delay(); res.OK() && wait == 0 {
		return 0
	}
	res.Cancel()
	return min(max(wait, time.Second), time.Minute)
}

// Burst is how many calls of one name may come at once: the number a minute of New.
func (p *Limit) Burst() int { return p.burst }

// Len is how many names are remembered.
func (p *Limit) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.by)
}
