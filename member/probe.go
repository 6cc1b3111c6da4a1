// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"time"
)

const (
	// probeEvery is how often the store is asked, probeTimeout how long it may take.
	probeEvery   = 500 * time.Millisecond
	probeTimeout = 3 * time.Second
	// storeRefuses is for how long the store must fail before the process is no longer
	// ready, storeHangs the same when it only does not answer in time: a store that is
	// slow under load is not gone.
	storeRefuses = 2 * time.Second
	storeHangs   = 15 * time.Second
	// storeReturns is how many good answers in a row make it ready again.
	storeReturns = 2
)

// storeProbe judges from a series of answers whether the store can be reached. One
// goroutine uses it.
type storeProbe struct {
	down   bool
	good   int       // answers in a row
	failed time.Time // when the present series of failures began; zero when there is none
}

// take notes one answer and reports whether the verdict changed.
func (p *storeProbe) take(err error, now time.Time) (changed bool) {
	if err == nil {
		p.good++
		p.failed = time.Time{}
		if p.down && p.good >= storeReturns {
			p.down = false
			return true
		}
		return false
	}
	p.good = 0
	if p.failed.IsZero() {
		p.failed = now
	}
	limit := storeRefuses
	if errors.Is(err, context.DeadlineExceeded) {
		limit = storeHangs
	}
	if !p.down && now.Sub(p.failed) >= limit {
		p.down = true
		return true
	}
	return false
}

// probeStore asks the store until Close whether it answers, and has the beat loop
// report a change.
func (m *Member) probeStore() {
	var p storeProbe
	for m.sleep(probeEvery) {
		ctx, cancel := context.WithTimeout(m.life, probeTimeout)
		_, err := m.opts.store.Keeper.Fences(ctx, "", 1)
		cancel()
		if m.life.Err() != nil {
			return
		}
		if !p.take(err, time.Now()) {
			continue
		}
		if p.down {
			m.log.Error("member: the store cannot be reached; this process is not ready", "err", err)
		} else {
			m.log.Info("member: the store can be reached again")
		}
		m.storeDown.Store(p.down)
		m.wake()
	}
}
