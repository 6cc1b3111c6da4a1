// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"sync"
	"time"
)

// drivers has this process drive the things of one kind that nobody else drives. A
// record says how far each is; a row's driver and beat say who drives it.
type drivers[ID ~string] struct {
	s    *Server
	what string        // for the log
	now  chan struct{} // look now
	// beats, beat and take are the store's.
	beats func(ctx context.Context) ([]Beat[ID], error)
	beat  func(ctx context.Context, driver string) error
	take  func(ctx context.Context, seen Beat[ID], driver string) (bool, error)
	// taken is called when this process has become the driver.
	taken func(ctx context.Context, id ID) error
	// step does what there is to do, and says when to look again. over ends this
	// process's part until it is started or taken again. It is called by one goroutine
	// for each thing.
	step func(ctx context.Context, id ID) (wait time.Duration, over bool, err error)
	// ended is called when this process's part has ended; nil is nothing.
	ended func(id ID)

	mu      sync.Mutex
	running map[ID]chan struct{} // guarded by mu; what wakes each
	takes   takeover[ID]         // used by the loop only
}

func newDrivers[ID ~string](s *Server, what string) *drivers[ID] {
	return &drivers[ID]{s: s, what: what, now: make(chan struct{}, 1), running: map[ID]chan struct{}{}, takes: newTakeover[ID](s)}
}

// poke makes what is driven here look again.
func (d *drivers[ID]) poke() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, wake := range d.running {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

// kick looks for something to take on now.
func (d *drivers[ID]) kick() {
	select {
	case d.now <- struct{}{}:
	default:
	}
	d.poke()
}

// loop shows that this process drives what it drives, and takes on what nobody
// drives, or whose driver has shown no sign of life for a while.
func (d *drivers[ID]) loop(ctx context.Context) {
	d.s.sweepEvery(ctx, d.what+"s", d.now, d.sweep)
}

func (d *drivers[ID]) sweep(ctx context.Context) error {
	list, err := d.beats(ctx)
	if err != nil {
		return err
	}
	mine := false
	err = d.takes.look(list, func(id ID) bool {
		mine = true
		d.start(id)
		return true
	}, func(b Beat[ID]) error {
		ok, err := d.take(ctx, b, d.s.instance)
		if err != nil || !ok {
			return err
		}
		d.s.log.Info(d.what+" taken on", d.what, string(b.ID), "from", b.Driver)
		if err := d.taken(ctx, b.ID); err != nil {
			return err
		}
		d.start(b.ID)
		return nil
	})
	if mine {
		err = errors.Join(err, d.beat(ctx, d.s.instance))
	}
	return err
}

// start drives one here; again is no harm.
func (d *drivers[ID]) start(id ID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running[id] != nil || d.s.ctx.Err() != nil {
		return
	}
	wake := make(chan struct{}, 1)
	d.running[id] = wake
	d.s.wg.Go(func() {
		d.drive(d.s.ctx, id, wake)
		if d.ended != nil {
			d.ended(id)
		}
		d.mu.Lock()
		delete(d.running, id)
		d.mu.Unlock()
	})
}

func (d *drivers[ID]) drive(ctx context.Context, id ID, wake <-chan struct{}) {
	const first, last = 50 * time.Millisecond, 5 * time.Second
	wait := first
	for ctx.Err() == nil {
		next, over, err := d.step(ctx, id)
		switch {
		case over, stopped(err):
			return
		case err != nil:
			if ctx.Err() == nil {
				d.s.log.Warn(d.what+" not driven on; trying again", d.what, string(id), "err", err)
			}
			next, wait = wait, min(2*wait, last)
		default:
			wait = first
		}
		t := time.NewTimer(next)
		select {
		case <-ctx.Done():
		case <-wake:
		case <-t.C:
		}
		t.Stop()
	}
}
