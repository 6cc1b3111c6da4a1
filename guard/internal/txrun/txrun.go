// SPDX-License-Identifier: Apache-2.0

// Package txrun has what running a guarded transaction needs in every store:
// waits between its tries, and a mark that says whether it has emitted.
package txrun

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

type emitsKey struct{}

// CountEmits returns a context under which [MarkEmit] sets the flag.
func CountEmits(ctx context.Context) (context.Context, *atomic.Bool) {
	b := new(atomic.Bool)
	return context.WithValue(ctx, emitsKey{}, b), b
}

// MarkEmit records that the transaction of ctx has emitted an event.
func MarkEmit(ctx context.Context) {
	if b, ok := ctx.Value(emitsKey{}).(*atomic.Bool); ok {
		b.Store(true)
	}
}

// Backoff waits before the next try: up to 1 ms after the first, doubling, at
// most 100 ms. It returns the context's cause when that ends first.
func Backoff(ctx context.Context, try int) error {
	limit := min(time.Millisecond<<min(try, 10), 100*time.Millisecond)
	t := time.NewTimer(rand.N(limit))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
