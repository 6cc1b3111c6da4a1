// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member/vitals"
)

// What [Next] refuses.
var (
	// ErrNoChange: the event changes nothing now.
	ErrNoChange = errors.New("rollout: nothing to change")
	// ErrRefused: the event does not fit the rollout's state. It wraps the reason.
	ErrRefused = errors.New("rollout: refused")
)

// Kind is what has happened.
type Kind string

// The events. Those of operators are Pause, Resume and Abort; the driver's are all
// others.
const (
	// Start: the record is new.
	Start Kind = "start"
	// Judged: Totals were read.
	Judged Kind = "judged"
	// Open: a campaign is to be made.
	Open Kind = "open"
	// Closed: the campaign is over, and its results are in the units. Again: units that
	// were to be returned are not.
	Closed Kind = "closed"
	// Stalled: the change does not go on by itself, for Reason.
	Stalled Kind = "stalled"
	// Settled: every unit of the wave has its result. Canary and Baseline are the cells to
	// compare, by upgrade; Totals were read afterwards.
	Settled Kind = "settled"
	// Returned: every unit that was to be returned is.
	Returned Kind = "returned"
	Pause    Kind = "pause"
	Resume   Kind = "resume"
	Abort    Kind = "abort"
)

// Totals are what was counted of each cell so far, by who measured. They only grow.
type Totals map[string]map[cells.CellID]vitals.Counts

// of sums up a group of cells.
func (t Totals) of(by string, group []cells.CellID) vitals.Counts {
	var sum vitals.Counts
	for _, c := range group {
		sum = sum.Plus(t[by][c])
	}
	return sum
}

// Event is something that has happened to a rollout.
type Event struct {
	Kind   Kind
	At     time.Time
	Actor  string
	Reason string
	Totals Totals
	// Canary and Baseline, with Settled.
	Canary, Baseline []cells.CellID
	// Again, with Closed; Keep, with Abort.
	Again, Keep bool
}

// retryReturn is how long units that could not be returned are left alone.
const retryReturn = 5 * time.Second

// Next says what becomes of a rollout by an event. It is pure: it has no clock and
// reads nothing. The units are not part of it; their counts in r.Waves are, and have to
// be those of the moment. The record is returned changed, or as it was with an error:
// [ErrNoChange], or one that wraps [ErrRefused].
func Next(r api.Rollout, ev Event) (api.Rollout, error) {
	r.Waves = slices.Clone(r.Waves)
	n := r
	var err error
	switch {
	case r.State == "" && ev.Kind == Start:
		machine{&n}.start(&ev)
	case r.State.Final():
		if ev.Kind == Abort && r.State == api.RolloutAborted {
			return r, ErrNoChange
		}
		return r, refused("rollout %s is %s", r.ID, r.State)
	default:
		m := machine{&n}
		switch ev.Kind {
		case Judged:
			err = m.judged(&ev)
		case Open:
			err = m.open()
		case Closed:
			err = m.closed(&ev)
		case Stalled:
			err = m.stalled(&ev)
		case Settled:
			err = m.settled(&ev)
		case Returned:
			err = m.returned(&ev)
		case Pause:
			err = m.pause(&ev)
		case Resume:
			err = m.resume(&ev)
		case Abort:
			err = m.abort(&ev)
		default:
			err = refused("event %q", ev.Kind)
		}
	}
	if err != nil {
		return r, err
	}
	n.UpdatedAt = ev.At
	return n, nil
}

func refused(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
}
