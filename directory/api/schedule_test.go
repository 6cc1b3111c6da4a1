// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

func schedule(t *testing.T, zone string, windows ...string) *api.Schedule {
	t.Helper()
	var list []api.Window
	for _, s := range windows {
		w, err := api.ParseWindow(s)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, w)
	}
	s, err := api.NewSchedule(zone, list)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func at(t *testing.T, zone, s string) time.Time {
	t.Helper()
	loc, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	out, err := time.ParseInLocation("2006-01-02 15:04:05", s, loc)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestSchedule(t *testing.T) {
	s := schedule(t, "Europe/Berlin", "mon-fri 22:00-04:00", "sun 10:00-12:30")
	for when, open := range map[string]bool{
		"2026-06-01 21:59:59": false, "2026-06-01 22:00:00": true, // a Monday
		"2026-06-02 03:59:59": true, "2026-06-02 04:00:00": false,
		"2026-06-06 03:00:00": true,  // the night after Friday
		"2026-06-06 22:30:00": false, // Saturday
		"2026-06-07 03:00:00": false, "2026-06-07 12:29:59": true, "2026-06-07 12:30:00": false,
		"2026-06-08 03:00:00": false, // the night after Sunday
	} {
		if got := s.Open(at(t, "Europe/Berlin", when)); got != open {
			t.Errorf("%s: open %v, want %v", when, got, open)
		}
		if got := s.Open(at(t, "Europe/Berlin", when).UTC()); got != open {
			t.Errorf("%s in another zone: open %v, want %v", when, got, open)
		}
	}
	next, ok := s.Next(at(t, "Europe/Berlin", "2026-06-06 04:00:00"))
	if want := at(t, "Europe/Berlin", "2026-06-07 10:00:00"); !ok || !next.Equal(want) {
		t.Errorf("next %v, want %v", next, want)
	}
	// Three hours of open time from Sunday 11:00: 1.5 h that day, 1.5 h on Monday night.
	end, ok := s.After(at(t, "Europe/Berlin", "2026-06-07 11:00:00"), 3*time.Hour)
	if want := at(t, "Europe/Berlin", "2026-06-08 23:30:00"); !ok || !end.Equal(want) {
		t.Errorf("after %v, want %v", end, want)
	}
	always := schedule(t, "")
	if _, ok := always.Next(time.Now()); ok || !always.Open(time.Now()) {
		t.Error("no windows is not always")
	}
}

// Berlin 2026: forward on 29 March at 02:00 (to 03:00), back on 25 October at 03:00
// (to 02:00).
func TestScheduleWhenClocksChange(t *testing.T) {
	s := schedule(t, "Europe/Berlin", "sun 02:00-03:00")
	spring := time.Date(2026, 3, 29, 0, 0, 0, 0, time.UTC) // 01:00 in Berlin
	next, ok := s.Next(spring)
	if want := at(t, "Europe/Berlin", "2026-04-05 02:00:00"); !ok || !next.Equal(want) {
		t.Errorf("the skipped hour: next %v, want the week after, %v", next, want)
	}
	autumn := time.Date(2026, 10, 24, 22, 0, 0, 0, time.UTC)
	open, ok := s.Next(autumn)
	if want := time.Date(2026, 10, 25, 0, 0, 0, 0, time.UTC); !ok || !open.Equal(want) {
		t.Errorf("opens %v, want %v", open.UTC(), want)
	}
	shut, ok := s.Next(open)
	if want := open.Add(2 * time.Hour); !ok || !shut.Equal(want) {
		t.Errorf("the hour that comes twice ends %v, want %v", shut.UTC(), want)
	}
	// A night of the change keeps the times on the wall.
	n := schedule(t, "Europe/Berlin", "sat 22:00-04:00")
	for date, hours := range map[string]time.Duration{"2026-03-28": 5, "2026-10-24": 7, "2026-06-06": 6} {
		from := at(t, "Europe/Berlin", date+" 22:00:00")
		if end, ok := n.Next(from); !ok || end.Sub(from) != hours*time.Hour {
			t.Errorf("the night of %s ends after %v, want %d h", date, end.Sub(from), hours)
		}
	}
	// Half an hour, in Lord Howe.
	l := schedule(t, "Australia/Lord_Howe", "sun 01:45-02:15")
	if next, ok := l.Next(time.Date(2026, 4, 4, 14, 0, 0, 0, time.UTC)); !ok || !l.Open(next) || l.Open(next.Add(-time.Minute)) {
		t.Errorf("next %v %v", next, ok)
	}
}

// What takes more than a year is no estimate, and is found out in no time: a campaign
// is shown while somebody waits.
func TestScheduleFarAway(t *testing.T) {
	from := at(t, "Europe/Berlin", "2026-06-01 00:00:00")
	s := schedule(t, "Europe/Berlin", "sun 02:00-02:30")
	// The half hour of 25 October comes twice: 40 of them in 39 weeks.
	if end, ok := s.After(from, 20*time.Hour); !ok || !end.Equal(at(t, "Europe/Berlin", "2027-02-28 02:30:00")) {
		t.Errorf("20 h end %v, %t", end, ok)
	}
	for _, d := range []time.Duration{27 * time.Hour, 1000 * time.Hour, 100_000 * time.Hour} {
		if end, ok := s.After(from, d); ok {
			t.Errorf("%v of half an hour a week end %v", d, end)
		}
	}
	always := schedule(t, "")
	if end, ok := always.After(from, 10*24*time.Hour); !ok || end.Sub(from) != 10*24*time.Hour {
		t.Errorf("always: %v, %t", end, ok)
	}
	if end, ok := always.After(from, 800*24*time.Hour); ok {
		t.Errorf("800 days from now are an estimate: %v", end)
	}
}

func TestBadSchedules(t *testing.T) {
	for _, s := range []string{"", "22:00", "22:00-22:00", "25:00-26:00", "24:00-04:00", "2:00-4:00", "mon 22-04", "someday 22:00-23:00", "mon-xyz 22:00-23:00", "mon tue 22:00-23:00"} {
		if w, err := api.ParseWindow(s); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v %v", s, w, err)
		}
	}
	for _, zone := range []string{"Local", "Europe/Atlantis", "../etc/passwd"} {
		if _, err := api.NewSchedule(zone, nil); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("zone %s: %v", zone, err)
		}
	}
	for _, s := range []string{"22:00-04:00", "mon,tue 00:00-24:00", "sat-mon 10:00-11:00"} {
		w, err := api.ParseWindow(s)
		if err != nil {
			t.Fatal(err)
		}
		again, err := api.ParseWindow(w.String())
		if err != nil || again.String() != w.String() {
			t.Errorf("%s came back as %s, %v", s, again.String(), err)
		}
	}
}
