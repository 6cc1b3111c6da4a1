// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"runtime"
	"time"
)

// Fatalf ends the recorded test, as that of a testing.T does.
func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

// waitFor polls a condition until it holds, for at most ten seconds.
func waitFor(tb TB, what string, cond func() (ok bool, state string)) {
	tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for {
		ok, state := cond()
		if ok {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("%s: still %s after ten seconds", what, state)
		}
	}
}

// Unwrap returns the test that records, for harnesses that need a testing.TB.
func (r *recorder) Unwrap() TB { return r.tb }
