// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/cloister-dev/cloister/cells"
)

// applyRows is how many changes one transaction takes before it commits while
// more are waiting.
const applyRows = 2000

// ackEvery is how often a running stream tells the source what is applied.
const ackEvery = time.Second

var errStopped = errors.New("transfer: stopped")

// run applies the changes of one move as they come, until it is stopped or fails.
// While it runs, its import is used by its goroutine only; others hand it a call.
type run struct {
	m     cells.MoveRef
	src   Source
	imp   Import
	once  sync.Once
	quit  chan struct{} // closed by stop: end between two transactions
	calls chan func()
	done  chan struct{} // closed when nothing is applied any more
	ended chan struct{} // closed when the source is not read any more either

	mu      sync.Mutex // guards what follows
	applied Position
	changes int64
	busy    time.Duration
	err     error
	wake    chan struct{} // closed and replaced whenever one of them changes
}

// follow starts a run at the import's applied position. It ends with ctx.
func follow(ctx context.Context, m cells.MoveRef, src Source, imp Import) *run {
	r := &run{m: m, src: src, imp: imp, quit: make(chan struct{}), calls: make(chan func()), done: make(chan struct{}), ended: make(chan struct{}),
		applied: imp.State().Applied, wake: make(chan struct{})}
	go r.loop(ctx)
	return r
}

// feed is what a run reads from: batches until done is closed, then err. What
// arrives while a transaction is under way waits here and makes up the next one:
// the busier the machine, the larger the transactions, which is what lets the
// import keep up with the writers beside it.
type feed struct {
	in   chan Batch
	room *semaphore.Weighted // bytes that may wait
	done chan struct{}
	err  error // set before done is closed
}

// Bounds of what waits in a feed: batches, and bytes of their data.
const (
	feedBatches = 1024
	feedBytes   = 16 << 20
	// batchCost is what a batch counts for besides its data.
	batchCost = 256
)

func newFeed() *feed {
	return &feed{in: make(chan Batch, feedBatches), room: semaphore.NewWeighted(feedBytes), done: make(chan struct{})}
}

func cost(b Batch) int64 { return min(int64(len(b.Data))+batchCost, feedBytes) }

func (f *feed) put(ctx context.Context, b Batch) error {
	if err := f.room.Acquire(ctx, cost(b)); err != nil {
		return context.Cause(ctx)
	}
	select {
	case f.in <- b:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (f *feed) took(b Batch) Batch {
	f.room.Release(cost(b))
	return b
}

func (r *run) loop(ctx context.Context) {
	defer close(r.ended)
	rctx, cancel := context.WithCancelCause(ctx)
	f := newFeed()
	from := r.imp.State().Applied
	go func() {
		defer close(f.done)
		put := func(b Batch) error { return f.put(rctx, b) }
		f.err = r.src.Changes(rctx, r.m, from, put)
		if errors.Is(f.err, ErrElsewhere) && rctx.Err() == nil {
			// None that was asked reads for the group: with a capture of its own, then.
			f.err = r.src.Changes(ContextAlone(rctx), r.m, from, put)
		}
		if f.err == nil {
			f.err = cells.ErrUnavailable
		}
	}()
	err := r.applyAll(ctx, f)
	r.imp.Abort()
	r.note(func() { r.err = err })
	close(r.done)
	cancel(err)
	<-f.done
}

// next returns the next batch; between says that calls run first: changes that never
// pause must not keep them waiting.
func (r *run) next(ctx context.Context, f *feed, between bool) (Batch, error) {
	calls := r.calls
	if !between {
		calls = nil
	}
	for {
		select {
		case do := <-calls:
			do()
			continue
		default:
		}
		select {
		case b := <-f.in:
			return f.took(b), nil
		default:
		}
		select {
		case b := <-f.in:
			return f.took(b), nil
		case do := <-calls:
			do()
		case <-r.quit:
			return Batch{}, errStopped
		case <-ctx.Done():
			return Batch{}, context.Cause(ctx)
		case <-f.done:
			if len(f.in) == 0 {
				return Batch{}, f.err
			}
		}
	}
}

func (r *run) applyAll(ctx context.Context, f *feed) error {
	acked := time.Now()
	for {
		b, err := r.next(ctx, f, true)
		if err != nil {
			return err
		}
		start := time.Now()
		n := b.Count
		for err = r.imp.Apply(ctx, b); err == nil && !(b.End && (n >= applyRows || len(f.in) == 0)); n += b.Count {
			if b, err = r.next(ctx, f, false); err == nil {
				err = r.imp.Apply(ctx, b)
			}
		}
		if err != nil {
			return err
		}
		if err := r.imp.Commit(ctx); err != nil {
			return err
		}
		pos := r.imp.State().Applied
		r.note(func() { r.applied, r.changes, r.busy = pos, r.changes+n, r.busy+time.Since(start) })
		if time.Since(acked) > ackEvery {
			acked = time.Now()
			if err := r.src.Applied(ctx, r.m, pos); err != nil && !retryable(err) {
				return err
			}
		}
		select {
		case <-r.quit:
			return errStopped
		default:
		}
	}
}

func (r *run) note(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.wake)
	r.wake = make(chan struct{})
}

// wait returns once everything up to pos is applied, or the run has ended.
func (r *run) wait(ctx context.Context, pos Position) error {
	for {
		r.mu.Lock()
		applied, err, wake := r.applied, r.err, r.wake
		r.mu.Unlock()
		if applied >= pos {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// call runs f between two transactions of the run.
func (r *run) call(ctx context.Context, f func(Import) error) error {
	out := make(chan error, 1)
	select {
	case r.calls <- func() { out <- f(r.imp) }:
		return <-out
	case <-r.done:
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stop ends the run between two transactions; afterwards the import is the
// caller's. The source may be read for a moment longer. It returns the error that ended the run before, if one did.
func (r *run) stop() error {
	r.once.Do(func() { close(r.quit) })
	<-r.done
	r.mu.Lock()
	defer r.mu.Unlock()
	if errors.Is(r.err, errStopped) {
		return nil
	}
	return r.err
}

// alive reports whether the run has not ended.
func (r *run) alive() bool {
	select {
	case <-r.done:
		return false
	default:
		return true
	}
}

func (r *run) counts() (changes int64, busy time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changes, r.busy
}
