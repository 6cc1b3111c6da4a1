// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// headSource answers Head after a while.
type headSource struct {
	Source
	takes time.Duration
	asked int
}

func (s *headSource) Head(ctx context.Context, _ cells.MoveRef) (Position, error) {
	s.asked++
	select {
	case <-time.After(s.takes):
		return MakePosition(1), nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

func roundsOf(src Source, lag time.Duration) (*preparing, *run) {
	p := &preparing{v: New(nil, nil, WithLag(lag)), src: src, progress: func(cells.Progress) {}}
	return p, &run{applied: MakePosition(9), wake: make(chan struct{})}
}

// TestCatchUpEnds: rounds that get no shorter are given up; the last one's time is
// what the prediction is made of, and that refuses a cut that would take too long.
func TestCatchUpEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &headSource{takes: 3 * time.Second}
		p, r := roundsOf(src, time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour) // a test that goes on for ever says nothing
		defer cancel()
		lag, _, asked, err := p.rounds(ctx, r)
		if err != nil || lag != 3*time.Second || src.asked != 6 {
			t.Fatalf("lag %v after %d rounds, %v", lag, src.asked, err)
		}
		if got := p.predict(lag, 0, 0, 0, asked, 0).Pause; got < 3*time.Second {
			t.Errorf("predicted %v for a lag of %v", got, lag)
		}
	})
}

// TestNoCutBeforeTheLagIsKnown: however long the answer takes, or the changes up to it
// take to be applied, there is no prediction without them; and it is made of that time.
func TestNoCutBeforeTheLagIsKnown(t *testing.T) {
	for name, behind := range map[string]bool{"no answer": false, "changes are not applied": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := &headSource{takes: time.Hour}
				if behind {
					src.takes = 0
				}
				p, r := roundsOf(src, time.Second)
				if behind {
					r.applied = ""
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if lag, _, _, err := p.rounds(ctx, r); err == nil {
					t.Fatalf("a lag of %v that nobody has measured", lag)
				}
				if !behind {
					return
				}
				time.AfterFunc(700*time.Millisecond, func() {
					r.mu.Lock()
					defer r.mu.Unlock()
					r.applied = MakePosition(1)
					close(r.wake)
					r.wake = make(chan struct{})
				})
				if lag, _, _, err := p.rounds(t.Context(), r); err != nil || lag != 700*time.Millisecond {
					t.Errorf("lag %v, %v; the changes took 700ms", lag, err)
				}
			})
		})
	}
}

// TestCallsComeFirst: changes that never pause keep no call waiting.
func TestCallsComeFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &run{quit: make(chan struct{}), calls: make(chan func()), done: make(chan struct{})}
		f := newFeed()
		for range 3 {
			if err := f.put(t.Context(), Batch{End: true}); err != nil {
				t.Fatal(err)
			}
		}
		var called bool
		go func() { _ = r.call(t.Context(), func(Import) error { called = true; return nil }) }()
		synctest.Wait()
		if _, err := r.next(t.Context(), f, false); err != nil || called {
			t.Errorf("inside a transaction: called %t, %v", called, err)
		}
		if _, err := r.next(t.Context(), f, true); err != nil || !called {
			t.Errorf("between two: called %t, %v", called, err)
		}
	})
}
