// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"
)

// ErrStandAside is the cause with which a worker's context ends when the process is
// gated.
var ErrStandAside = errors.New("tenancy: the process is gated and stands aside from the workers")

// RunWorkers runs the process's workers while it is not gated: run is called when it
// may work, its context ends with [ErrStandAside] as the cause when it may not any
// more, and it is called again afterwards. A run that ends by itself, with nil, ends
// RunWorkers; one that fails ends it with its error. It returns nil when ctx ends,
// after run has returned.
//
// While run is not running the process does not count as serving workers.
func (p *Process) RunWorkers(ctx context.Context, run func(context.Context) error) error {
	for {
		if !p.waitGate(ctx, false) {
			return nil
		}
		wctx, cancel := context.WithCancelCause(ctx)
		stop := context.AfterFunc(p.life, func() { cancel(ErrStandAside) })
		done := make(chan error, 1)
		p.setWorkers(true, "")
		go func() { done <- run(wctx) }()
		watch, unwatch := context.WithCancel(ctx)
		aside := make(chan bool, 1)
		go func() { aside <- p.waitGate(watch, true) }()
		var err error
		var ended bool
		select {
		case err = <-done:
			ended = true
			unwatch()
			<-aside
		case gated := <-aside:
			if gated {
				p.log.Warn("tenancy: the workers stand aside")
			}
			cancel(ErrStandAside)
			err = <-done
		}
		unwatch()
		cancel(nil)
		stop()
		p.setWorkers(false, "")
		switch {
		case ctx.Err() != nil || p.life.Err() != nil:
			return nil
		case ended && err != nil:
			return fmt.Errorf("tenancy: workers: %w", err)
		case ended:
			return nil
		}
	}
}

// waitGate waits until the process is gated, or is not; false when ctx or the
// process ends first.
func (p *Process) waitGate(ctx context.Context, gated bool) bool {
	for {
		p.mu.Lock()
		now, changed := p.reason.Gated(), p.changed
		p.mu.Unlock()
		if now == gated {
			return ctx.Err() == nil && p.life.Err() == nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-p.life.Done():
			return false
		case <-changed:
		}
	}
}

// SetLease says which lease the workers hold, for the heartbeat; "" for none. A
// gated process reports none.
func (p *Process) SetLease(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lease = name
}

func (p *Process) setWorkers(on bool, lease string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.workers, p.lease = on, lease
}
