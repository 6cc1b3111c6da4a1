// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// What comes during a run is the next one's, up to the bound, by key and in order; one
// that leaves takes nobody with it.
func TestTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var runs [][]int
		hold := make(chan struct{})
		x := together[string, *int]{max: 3, run: func(key string, items []*int) {
			var list []int
			for _, i := range items {
				list = append(list, *i)
			}
			mu.Lock()
			runs = append(runs, list)
			mu.Unlock()
			if key == "slow" {
				<-hold
			}
			for _, i := range items {
				*i *= 10
			}
		}}
		values := []int{1, 2, 3, 4, 5}
		var wg sync.WaitGroup
		for i := range values {
			wg.Go(func() {
				if err := x.do(t.Context(), "slow", &values[i]); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		other := 7
		if err := x.do(t.Context(), "other", &other); err != nil || other != 70 {
			t.Errorf("another key: %d, %v", other, err)
		}
		gone, cancel := context.WithCancelCause(t.Context())
		why := errors.New("gone")
		cancel(why)
		left := 6
		if err := x.do(gone, "slow", &left); !errors.Is(err, why) {
			t.Errorf("a caller that has gone: %v", err)
		}
		close(hold)
		wg.Wait()
		synctest.Wait()
		for i, v := range values {
			if v != 10*(i+1) {
				t.Errorf("item %d is %d", i, v)
			}
		}
		want := [][]int{{1}, {7}, {2, 3, 4}, {5, 6}}
		if len(runs) != len(want) {
			t.Fatalf("runs %v", runs)
		}
		for i := range want {
			if len(runs[i]) != len(want[i]) || runs[i][0] != want[i][0] {
				t.Errorf("runs %v, want %v", runs, want)
			}
		}
		if len(x.waiting) != 0 {
			t.Errorf("%d keys are kept", len(x.waiting))
		}
	})
}

// A run after a full one waits for as many, and for no longer than it may.
func TestTogetherLingers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs []int
		hold := make(chan struct{})
		x := together[string, int]{max: 8, linger: time.Millisecond, run: func(_ string, items []int) {
			runs = append(runs, len(items))
			<-hold
		}}
		var wg sync.WaitGroup
		call := func(n int) {
			for range n {
				wg.Go(func() {
					if err := x.do(t.Context(), "k", 0); err != nil {
						t.Error(err)
					}
				})
			}
			synctest.Wait()
		}
		call(1)
		call(4) // the next run's, without a wait: the one before was alone
		hold <- struct{}{}
		synctest.Wait()
		call(1)
		begun := time.Now()
		hold <- struct{}{} // four are answered; one is left, and waits for three
		synctest.Wait()
		if len(runs) != 2 {
			t.Fatalf("runs %v", runs)
		}
		call(3)
		<-time.After(x.linger / 8) // by the bubble's clock
		synctest.Wait()
		if len(runs) != 3 || runs[2] != 4 || time.Since(begun) >= x.linger {
			t.Fatalf("runs %v after %s", runs, time.Since(begun))
		}
		call(1)
		hold <- struct{}{}
		<-time.After(x.linger)
		synctest.Wait()
		if len(runs) != 4 || runs[3] != 1 {
			t.Errorf("runs %v", runs)
		}
		close(hold)
		wg.Wait()
	})
}
