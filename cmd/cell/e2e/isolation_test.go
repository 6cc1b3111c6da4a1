// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
)

// TestFailingMovesLeaveOthersAlone lets a hundred moves fail, each in its cut, at one
// step after the other: the deadline passes because the clock jumps, or somebody rolls it back. The other
// tenants of both cells must not see one failure. Their p99 is shown beside that of
// the times without a move, which alternate with the moves.
func TestFailingMovesLeaveOthersAlone(t *testing.T) {
	moves := 100
	if testing.Short() {
		moves = 10
	}
	e := start(t, fleet.Config{})
	moving := e.tenant("moving", "cell-a")
	if err := moving.Fill(t.Context(), "bulk", 300, 200, func(int) {}); err != nil {
		t.Fatal(err)
	}
	stop := e.hammer(&load.Hammer{Client: moving, Clients: 2, Keys: 5, Pause: 5 * time.Millisecond})
	var others []*load.Hammer
	var stops []func() load.Tally
	for _, cell := range []string{"cell-a", "cell-b"} {
		for i := range 2 {
			h := &load.Hammer{Client: e.tenant(fmt.Sprintf("other-%s-%d", cell, i), cell), Clients: 2, Keys: 10, Pause: 5 * time.Millisecond}
			others = append(others, h)
			stops = append(stops, e.hammer(h))
		}
	}
	var quiet, busy []span
	failing := []cells.Step{cells.StepQuiesce, cells.StepGates, cells.StepDrain, cells.StepCopy, cells.StepFence, cells.StepEvents, cells.StepFinish}
	for i := range moves {
		if i%20 == 0 {
			from := time.Now()
			idle(t, time.Second)
			quiet = append(quiet, span{from, time.Now()})
			busy = append(busy, span{from: time.Now()})
		}
		step := failing[i%len(failing)]
		e.haltAt(step)
		mv := e.startMove("moving", "cell-b", fmt.Sprintf("f%d", i))
		e.waitHalted()
		if j := i % len(failing); j < 4 {
			if err := os.WriteFile(e.clock, []byte(fmt.Sprintf("%dh", i+1)), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if _, err := e.cl.Rollback(t.Context(), mv.ID, api.RollbackRequest{Reason: "test"}); err != nil {
			t.Fatal(err)
		}
		e.release()
		if rec := e.settle(mv.ID); rec.State != api.MoveRolledBack {
			t.Errorf("move %d, failing at %s, is %s", i, step, rec.State)
		}
		busy[len(busy)-1].to = time.Now()
	}
	if got := e.cellOf("moving"); got != "cell-a" {
		t.Errorf("the tenant is in %s", got)
	}
	mustBeClean(t, "the moving tenant", stop(), false)
	var failed, requests int
	for i, s := range stops {
		tally := s()
		mustBeClean(t, others[i].Client.Tenant, tally, false)
		failed, requests = failed+tally.Failed, requests+tally.Requests
	}
	t.Logf("%d moves failed; other tenants: %d of %d requests failed; p99 %s without moves, %s during them",
		moves, failed, requests, p99(others, quiet), p99(others, busy))
}

type span struct{ from, to time.Time }

// p99 of the requests that began in one of the spans.
func p99(hs []*load.Hammer, spans []span) time.Duration {
	var took []time.Duration
	for _, h := range hs {
		for _, op := range h.Ops() {
			for _, s := range spans {
				if op.Call.After(s.from) && op.Call.Before(s.to) {
					took = append(took, op.Return.Sub(op.Call))
				}
			}
		}
	}
	return load.Percentile(took, 99)
}

// idle lets time pass: the measurement is of the time without moves.
func idle(t *testing.T, d time.Duration) {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	<-ctx.Done()
}
