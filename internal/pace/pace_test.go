// SPDX-License-Identifier: Apache-2.0

package pace_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/internal/pace"
)

func TestRetryIsAdmitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pace.New(3, 2)
		for range 3 {
			if w := p.Take("a"); w != 0 {
				t.Fatalf("within the pace: wait %v", w)
			}
		}
		w := p.Take("a")
		if w < time.Second || w > time.Minute {
			t.Fatalf("past the pace: wait %v", w)
		}
		if p.Take("b") != 0 {
			t.Error("one name's calls are counted for another")
		}
		<-time.After(w - time.Millisecond)
		if p.Take("a") == 0 {
			t.Error("admitted before its time")
		}
		<-time.After(time.Millisecond)
		if w := p.Take("a"); w != 0 {
			t.Errorf("the retry has to wait %v more", w)
		}
		if p.Take("c") != 0 || p.Take("b") != 0 { // b was forgotten
			t.Error("new names are not admitted")
		}
	})
}
