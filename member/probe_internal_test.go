// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

func TestStoreProbe(t *testing.T) {
	refused := errors.New("refused")
	slow := fmt.Errorf("asking: %w", context.DeadlineExceeded)
	at := func(s float64) time.Time { return time.Unix(1000, 0).Add(time.Duration(s * float64(time.Second))) }
	var p storeProbe
	for i, step := range []struct {
		at      float64
		err     error
		changed bool
		down    bool
	}{
		{0, nil, false, false},
		{1, refused, false, false}, // one failure is nothing yet
		{1.5, nil, false, false},
		{2, refused, false, false},
		{3.5, refused, false, false},
		{4, refused, true, true}, // for 2 s
		{5, nil, false, true},    // one good answer is nothing yet
		{6, refused, false, true},
		{7, nil, false, true},
		{8, nil, true, false},
		{10, slow, false, false}, // slow under load is not gone
		{20, slow, false, false},
		{25, slow, true, true},
		{26, nil, false, true},
		{27, nil, true, false},
	} {
		if got := p.take(step.err, at(step.at)); got != step.changed || p.down != step.down {
			t.Fatalf("step %d at %v s: changed %v, down %v", i, step.at, got, p.down)
		}
	}
}
