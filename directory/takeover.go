// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"strings"
	"time"
)

// heardBeat is a driver's beat and when it was first heard.
type heardBeat struct {
	driver string
	beat   int64
	at     time.Time
}

// takeover says which of the things that need a driver have none that lives. A
// driver's sign of life is that its beat grows; when it last did is known by this
// process's monotonic clock. Used by one goroutine.
type takeover[ID ~string] struct {
	s       *Server
	started bool // a round was finished
	heard   map[ID]heardBeat
}

func newTakeover[ID ~string](s *Server) takeover[ID] {
	return takeover[ID]{s: s, heard: map[ID]heardBeat{}}
}

// look goes through all that needs a driver. What this process drives, and driven
// says that it does, is as alive as the process. free is called for what nobody
// drives, whose driver was silent for TakeOver, or was an earlier incarnation of this
// directory: it is free to be taken.
func (t *takeover[ID]) look(list []Beat[ID], driven func(ID) bool, free func(Beat[ID]) error) error {
	now := time.Now()
	known := make(map[ID]bool, len(list))
	var errs []error
	for _, b := range list {
		known[b.ID] = true
		mine := b.Driver == t.s.instance
		alive := mine && driven(b.ID)
		h, ok := t.heard[b.ID]
		if !ok || h.driver != b.Driver || h.beat != b.Beat && !mine || alive {
			h = heardBeat{driver: b.Driver, beat: b.Beat, at: now}
			t.heard[b.ID] = h
		}
		silent := now.Sub(h.at) >= t.s.cfg.TakeOver
		former := !t.started && !mine && t.s.sameName(b.Driver)
		if b.Driver == "" || silent || former {
			errs = append(errs, free(b))
		}
	}
	for id := range t.heard {
		if !known[id] {
			delete(t.heard, id)
		}
	}
	t.started = true
	return errors.Join(errs...)
}

// knows reports whether the thing was among those of the last round.
func (t *takeover[ID]) knows(id ID) bool {
	_, ok := t.heard[id]
	return ok
}

// sameName reports whether a driver is an incarnation of this directory.
func (s *Server) sameName(driver string) bool {
	name, _, ok := strings.Cut(driver, "/")
	return ok && name == s.cfg.Name
}

// sweepEvery runs f at once, then every SweepEvery and when now is sent to, until ctx
// ends; what it fails with is logged.
func (s *Server) sweepEvery(ctx context.Context, what string, now <-chan struct{}, f func(context.Context) error) {
	every := time.NewTicker(s.cfg.SweepEvery)
	defer every.Stop()
	for {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("sweep not finished", "of", what, "err", err)
			s.metrics.storeErrors.Inc()
		}
		select {
		case <-ctx.Done():
			return
		case <-now:
		case <-every.C:
		}
	}
}
