// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cmd/cell/schedule"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestSchedules runs 200 schedules, or as many as CELL_SCHEDULES says, beginning with
// the seed that CELL_SEED names.
func TestSchedules(t *testing.T) {
	number := func(name string, def uint64) uint64 {
		v := os.Getenv(name)
		if v == "" {
			return def
		}
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	n, first := number("CELL_SCHEDULES", 200), number("CELL_SEED", 1)
	switch {
	case testing.Short():
		n = min(n, 10)
	case raceDetector && os.Getenv("CELL_SCHEDULES") == "":
		n = 20 // all of them run without it
	}
	dir := t.TempDir()
	var next, moved, undone, crashes, acked, ended atomic.Int64
	var wg sync.WaitGroup
	begun := time.Now()
	for range 16 { // a schedule mostly waits
		wg.Go(func() {
			for i := uint64(next.Add(1)); i <= n && !t.Failed(); i = uint64(next.Add(1)) {
				r, err := schedule.Run(t.Context(), dir, first+i-1, "")
				if err != nil {
					t.Errorf("seed %d: %v", first+i-1, err)
					return
				}
				moved.Add(int64(r.Moved))
				undone.Add(int64(r.Undone))
				crashes.Add(int64(r.Crashes))
				acked.Add(int64(r.Acked))
				if e := uint64(ended.Add(1)); e%500 == 0 && e < n {
					took := time.Since(begun)
					t.Logf("%d of %d schedules in %s; about %s more", e, n, took.Round(time.Second), (took * time.Duration(n-e) / time.Duration(e)).Round(time.Minute))
				}
				if len(r.Wrong) > 0 {
					t.Errorf("seed %d:\n%s\nwhat happened:\n%s", r.Seed, strings.Join(r.Wrong, "\n"), strings.Join(r.Log, "\n"))
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d schedules: %d attempts at moves decided, %d undone, %d crashes asked for, %d writes acknowledged", n, moved.Load(), undone.Load(), crashes.Load(), acked.Load())
	if moved.Load() == 0 || n >= 200 && undone.Load() == 0 || acked.Load() == 0 {
		t.Error("nothing happened")
	}
}

// TestSchedulesNotice: when a rule is broken, some of the schedules must say so.
func TestSchedulesNotice(t *testing.T) {
	if raceDetector {
		t.Skip("runs without the race detector")
	}
	for _, broken := range []schedule.Broken{schedule.NoFinish, schedule.NoRemoval, schedule.StaleOpens} {
		t.Run(string(broken), func(t *testing.T) {
			for seed := uint64(1); seed <= 60; seed++ {
				r, err := schedule.Run(t.Context(), t.TempDir(), seed, broken)
				if err != nil {
					t.Fatal(err)
				}
				if len(r.Wrong) > 0 {
					t.Logf("seed %d: %s", seed, r.Wrong[0])
					return
				}
			}
			t.Error("no schedule has noticed")
		})
	}
}
