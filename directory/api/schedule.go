// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // time zones are known wherever the program runs

	"github.com/cloister-dev/cloister/cells"
)

// Window is a time of the week, by the wall clock of a time zone: on Days, from
// From until To. If To is not after From the window ends on the day after.
//
// The wall clock decides, also where it is set forward or back: an hour that is
// skipped is in no window, an hour that comes twice is in its window twice.
type Window struct {
	// Days on which the window begins: mon, tue, wed, thu, fri, sat, sun. None means
	// every day.
	Days []string `json:"days,omitempty"`
	// From and To are HH:MM; To may be 24:00.
	From string `json:"from"`
	To   string `json:"to"`
}

var weekdays = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

const dayMinutes = 24 * 60

func parseMinutes(s string, end bool) (int, error) {
	if end && s == "24:00" {
		return dayMinutes, nil
	}
	t, err := time.Parse("15:04", s)
	if err != nil || len(s) != 5 {
		return 0, fmt.Errorf("%w: %q is no time of the day; want HH:MM", cells.ErrInvalid, s)
	}
	return t.Hour()*60 + t.Minute(), nil
}

// ParseWindow reads "22:00-04:00", "sat,sun 00:00-24:00" or "mon-fri 22:00-04:00".
// The error wraps [cells.ErrInvalid].
func ParseWindow(s string) (Window, error) {
	fields := strings.Fields(strings.ToLower(s))
	bad := func() (Window, error) {
		return Window{}, fmt.Errorf("%w: window %q; want for example \"mon-fri 22:00-04:00\"", cells.ErrInvalid, s)
	}
	if len(fields) == 0 || len(fields) > 2 {
		return bad()
	}
	var w Window
	if len(fields) == 2 {
		for _, part := range strings.Split(fields[0], ",") {
			first, last, span := strings.Cut(part, "-")
			i := slices.Index(weekdays, first)
			j := i
			if span {
				j = slices.Index(weekdays, last)
			}
			if i < 0 || j < 0 {
				return bad()
			}
			for d := i; ; d = (d + 1) % 7 {
				if !slices.Contains(w.Days, weekdays[d]) {
					w.Days = append(w.Days, weekdays[d])
				}
				if d == j {
					break
				}
			}
		}
	}
	var ok bool
	if w.From, w.To, ok = strings.Cut(fields[len(fields)-1], "-"); !ok {
		return bad()
	}
	return w, w.Validate()
}

// Validate reports what is malformed; the error wraps [cells.ErrInvalid].
func (w *Window) Validate() error {
	from, err := parseMinutes(w.From, false)
	if err != nil {
		return err
	}
	to, err := parseMinutes(w.To, true)
	if err != nil {
		return err
	}
	if from == to {
		return fmt.Errorf("%w: window %s is empty; the whole day is 00:00-24:00", cells.ErrInvalid, w)
	}
	for i, d := range w.Days {
		if !slices.Contains(weekdays, d) || slices.Contains(w.Days[:i], d) {
			return fmt.Errorf("%w: %q is no day, or is named twice; want mon, tue, wed, thu, fri, sat, sun", cells.ErrInvalid, d)
		}
	}
	return nil
}

// String writes the window as [ParseWindow] reads it.
func (w *Window) String() string {
	s := w.From + "-" + w.To
	if len(w.Days) > 0 {
		s = strings.Join(w.Days, ",") + " " + s
	}
	return s
}

// open marks the minutes of the week, from Sunday on, that the window includes. It is
// valid.
func (w *Window) open(week *[7 * dayMinutes]bool) {
	from, _ := parseMinutes(w.From, false)
	to, _ := parseMinutes(w.To, true)
	if to <= from {
		to += dayMinutes
	}
	for d, name := range weekdays {
		if len(w.Days) > 0 && !slices.Contains(w.Days, name) {
			continue
		}
		for m := from; m < to; m++ {
			week[(d*dayMinutes+m)%len(week)] = true
		}
	}
}

// Schedule is when moves of a campaign may begin.
type Schedule struct {
	zone   *time.Location
	always bool
	week   [7 * dayMinutes]bool // by the wall clock, from Sunday 00:00 on
}

// NewSchedule makes a schedule; no windows means always. zone is an IANA name, ""
// is UTC. The error wraps [cells.ErrInvalid].
func NewSchedule(zone string, windows []Window) (*Schedule, error) {
	if zone == "Local" {
		return nil, fmt.Errorf("%w: time zone %q depends on the machine; name one, for example Europe/Berlin", cells.ErrInvalid, zone)
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return nil, fmt.Errorf("%w: time zone %q: %w", cells.ErrInvalid, zone, err)
	}
	if len(windows) > 64 {
		return nil, fmt.Errorf("%w: %d windows, at most 64", cells.ErrInvalid, len(windows))
	}
	s := &Schedule{zone: loc, always: len(windows) == 0}
	for i := range windows {
		if err := windows[i].Validate(); err != nil {
			return nil, err
		}
		windows[i].open(&s.week)
	}
	return s, nil
}

// Open reports whether moves may begin at t.
func (s *Schedule) Open(t time.Time) bool {
	if s.always {
		return true
	}
	t = t.In(s.zone)
	hour, minute, _ := t.Clock()
	return s.week[int(t.Weekday())*dayMinutes+hour*60+minute]
}

// changeWithin is how far Next looks: a window that one week skips with the clock
// is there in the next.
const changeWithin = 15 * 24 * time.Hour

// Next returns the next time at which Open changes, and false if there is none.
func (s *Schedule) Next(t time.Time) (time.Time, bool) {
	if s.always {
		return time.Time{}, false
	}
	now := s.Open(t)
	for at, end := t.Truncate(time.Minute).Add(time.Minute), t.Add(changeWithin); at.Before(end); at = at.Add(time.Minute) {
		if s.Open(at) != now {
			return at, true
		}
	}
	return time.Time{}, false
}

// afterWithin is how far After looks: whoever asks waits for the answer, and what is
// further away is no estimate.
const afterWithin = 366 * 24 * time.Hour

// After returns when d of open time has passed since t, and false if that is more
// than a year away.
func (s *Schedule) After(t time.Time, d time.Duration) (time.Time, bool) {
	end := t.Add(afterWithin)
	for t.Before(end) {
		open := s.Open(t)
		next, ok := s.Next(t)
		switch {
		case open && (!ok || next.Sub(t) >= d):
			t = t.Add(d)
			return t, !t.After(end)
		case !ok:
			return time.Time{}, false
		case open:
			d -= next.Sub(t)
		}
		t = next
	}
	return time.Time{}, false
}
