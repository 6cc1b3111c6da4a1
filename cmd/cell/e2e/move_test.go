// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// The main job: a tenant is moved back and forth while it is hammered; nothing
// fails, nothing is lost, events have no gap, other tenants see nothing.
func TestMoveUnderLoad(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		for _, replicas := range []int{1, 2} {
			t.Run(fmt.Sprintf("replicas=%d", replicas), func(t *testing.T) {
				e := start(t, fleet.Config{Store: store, Cells: []fleet.Cell{{Name: "cell-a", Replicas: replicas}, {Name: "cell-b", Replicas: replicas}}})
				rep, err := load.MoveRun{Edge: e.Info.Edge, Cells: [2]string{"cell-a", "cell-b"}, Rows: 3000, Size: 200, Clients: 8, Moves: 6,
					OtherPerCell: 1, OtherClients: 2, Mover: fleet.Mover{Client: e.cl}, OnStep: func(s string) { t.Log(s) }}.Run(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				mustBeClean(t, "moving tenant", rep.Moving, false)
				mustBeClean(t, "other tenants", rep.Others, false)
				if rep.Gaps+rep.Repeats+rep.MissedInEnd > 0 {
					t.Errorf("events: %d gaps, %d repeats, %d missing", rep.Gaps, rep.Repeats, rep.MissedInEnd)
				}
			})
		}
	})
}

// register is the model of one key: a value that is read and written.
var register = porcupine.Model{
	Partition: func(ops []porcupine.Operation) [][]porcupine.Operation {
		by := map[string][]porcupine.Operation{}
		for _, op := range ops {
			k := op.Input.(load.Op).Key
			by[k] = append(by[k], op)
		}
		var out [][]porcupine.Operation
		for _, p := range by {
			out = append(out, p)
		}
		return out
	},
	Init: func() any { return "" },
	Step: func(state, input, output any) (bool, any) {
		in, out := input.(load.Op), output.(load.Op)
		if in.Write {
			return true, in.Value
		}
		return out.Value == state.(string), state
	},
	Equal:             func(a, b any) bool { return a == b },
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %+v", in, out) },
}

// linearizable checks the answered requests of a hammer; a write whose outcome is
// unknown may take effect at any time after it was sent, or never.
func linearizable(ops []load.Op) porcupine.CheckResult {
	var h []porcupine.Operation
	id := 1000
	for _, op := range ops {
		ret := op.Return.UnixNano()
		client := op.Client
		switch {
		case op.Err == nil:
		case op.Unknown && op.Write:
			// Its client goes on, so it becomes a client of its own that never returns.
			ret, client, id = math.MaxInt64, id, id+1
		default:
			continue
		}
		h = append(h, porcupine.Operation{ClientId: client, Input: op, Call: op.Call.UnixNano(), Output: op, Return: ret})
	}
	return porcupine.CheckOperationsTimeout(register, h, 2*time.Minute)
}

// A checker that accepts everything would be no checker.
func TestLinearizabilityCheckerRefuses(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(0, int64(ms)*1e6) }
	stale := []load.Op{
		{Client: 1, Key: "k", Write: true, Value: "1", Call: at(0), Return: at(1)},
		{Client: 1, Key: "k", Write: true, Value: "2", Call: at(2), Return: at(3)},
		{Client: 2, Key: "k", Value: "1", Call: at(4), Return: at(5)},
	}
	if r := linearizable(stale); r != porcupine.Illegal {
		t.Fatalf("a stale read is %v", r)
	}
	stale[2].Value = "2"
	if r := linearizable(stale); r != porcupine.Ok {
		t.Fatalf("a good history is %v", r)
	}
}

// Clients share a few keys while the tenant moves and processes are killed with
// SIGKILL; what they saw must be explainable by one register for each key.
func TestHistoriesAreLinearizable(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		e := start(t, fleet.Config{Store: store, Cells: []fleet.Cell{{Name: "cell-a", Replicas: 2}, {Name: "cell-b", Replicas: 2}}})
		tenant := e.tenant("linear", "cell-a")
		h := &load.Hammer{Client: tenant, Clients: 6, Keys: 4, Pause: 4 * time.Millisecond}
		stop := e.hammer(h)
		ctx, cancel := context.WithCancel(t.Context())
		var killer sync.WaitGroup
		killer.Go(func() {
			victims := []string{"cell-a-1", "directory", "cell-b-2", "cell-a-2", "cell-b-1", "edge"}
			for i := 0; ctx.Err() == nil; i++ {
				e.kill(victims[i%len(victims)])
				select {
				case <-ctx.Done():
				case <-time.After(700 * time.Millisecond):
				}
			}
		})
		for i := range 8 {
			to := "cell-b"
			if e.cellOf("linear") == "cell-b" {
				to = "cell-a"
			}
			e.settle(e.startMove("linear", to, fmt.Sprintf("op-%d", i)).ID)
		}
		cancel()
		killer.Wait()
		mustBeClean(t, "linear", stop(), true)
		ops := h.Ops()
		if r := linearizable(ops); r != porcupine.Ok {
			t.Errorf("the history of %d requests is %v", len(ops), r)
		}
	})
}
