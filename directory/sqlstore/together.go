// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"sync"
	"time"
)

// together collects calls of the same key that come while an earlier one is under way
// and runs them as one. A call that finds nobody waits for nobody. The zero value is not
// ready: set run and max.
type together[K comparable, T any] struct {
	// run answers all items, by writing into them. The slice is its own.
	run func(key K, items []T)
	// max bounds the items of one run.
	max int
	// linger bounds how long a run that comes after a fuller one waits to become as full:
	// those who were just answered ask again at about one time, and the first of them
	// would have a run to itself.
	linger time.Duration

	mu sync.Mutex // guards waiting
	// waiting has the keys for which something runs, with what waits for its end.
	waiting map[K][]ticket[T]
}

type ticket[T any] struct {
	item T
	done chan struct{}
}

// do returns when the item is answered, or ctx has ended: the item may then still be
// answered, and must not be read.
func (t *together[K, T]) do(ctx context.Context, key K, item T) error {
	me := ticket[T]{item, make(chan struct{})}
	t.mu.Lock()
	if t.waiting == nil {
		t.waiting = map[K][]ticket[T]{}
	}
	before, running := t.waiting[key]
	t.waiting[key] = append(before, me)
	if !running {
		go t.drain(key)
	}
	t.mu.Unlock()
	select {
	case <-me.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// drain runs what waits for the key until nothing does.
func (t *together[K, T]) drain(key K) {
	last := 1 // items of the run before
	for {
		t.gather(key, last)
		t.mu.Lock()
		all := t.waiting[key]
		n := min(len(all), t.max)
		if n == 0 {
			delete(t.waiting, key)
			t.mu.Unlock()
			return
		}
		batch := all[:n:n]
		t.waiting[key] = all[n:]
		t.mu.Unlock()
		items := make([]T, n)
		for i, e := range batch {
			items[i] = e.item
		}
		t.run(key, items)
		for _, e := range batch {
			close(e.done)
		}
		last = n
	}
}

// gather waits for company.
func (t *together[K, T]) gather(key K, want int) {
	if want < 2 || t.linger <= 0 {
		return
	}
	for by, step := time.Now().Add(t.linger), t.linger/8; time.Now().Before(by); time.Sleep(step) {
		t.mu.Lock()
		n := len(t.waiting[key])
		t.mu.Unlock()
		if n >= want {
			return
		}
	}
}
