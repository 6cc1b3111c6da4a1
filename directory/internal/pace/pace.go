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

// Limit bounds names to a number a minute each. Make it with [New].
type Limit struct {
	perMinute, names int

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
	return &Limit{perMinute: max(perMinute, 1), names: max(names, 1), order: list.New(), by: map[string]*list.Element{}}
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
		e = p.order.PushFront(&bucket{name: name, l: rate.NewLimiter(rate.Limit(float64(p.perMinute)/60), p.perMinute)})
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

// PerMinute is the bound.
func (p *Limit) PerMinute() int { return p.perMinute }
