// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
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

// cell is the state of one key: its version and value.
type cell struct {
	version int64
	value   string
}

// register is the model of one key: a write makes the next version, a read returns
// the present one.
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
	Init: func() any { return cell{} },
	Step: func(state, input, _ any) (bool, any) {
		op, s := input.(load.Op), state.(cell)
		if op.Write {
			return op.Version == s.version+1, cell{op.Version, op.Value}
		}
		return cell{op.Version, op.Value} == s, s
	},
	Equal:             func(a, b any) bool { return a == b },
	DescribeOperation: func(in, _ any) string { return fmt.Sprintf("%+v", in) },
}

// linearizable checks what a hammer's clients saw. A write whose outcome they do
// not know took effect at some time after it was sent if the key's history has it,
// and never if not.
func linearizable(ops []load.Op, found func(key, value string) (int64, bool)) porcupine.CheckResult {
	var h []porcupine.Operation
	id := 1000
	for _, op := range ops {
		ret := op.Return.UnixNano()
		client := op.Client
		if op.Err != nil {
			v, ok := int64(0), false
			if op.Write && op.Unknown {
				v, ok = found(op.Key, op.Value)
			}
			if !ok {
				continue
			}
			// Its client goes on, so it becomes a client of its own that never returns.
			op.Version, ret, client, id = v, math.MaxInt64, id, id+1
		}
		h = append(h, porcupine.Operation{ClientId: client, Input: op, Call: op.Call.UnixNano(), Return: ret})
	}
	return porcupine.CheckOperationsTimeout(register, h, 2*time.Minute)
}

// A checker that accepts everything would be no checker.
func TestLinearizabilityCheckerRefuses(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(0, int64(ms)*1e6) }
	nothing := func(string, string) (int64, bool) { return 0, false }
	write := func(value string, version int64, from, to int) load.Op {
		return load.Op{Client: 1, Key: "k", Write: true, Value: value, Version: version, Call: at(from), Return: at(to)}
	}
	read := func(value string, version int64, from, to int) load.Op {
		return load.Op{Client: 2, Key: "k", Value: value, Version: version, Call: at(from), Return: at(to)}
	}
	lost := write("3", 0, 6, 7)
	lost.Err, lost.Unknown = errors.New("connection reset"), true
	for name, c := range map[string]struct {
		ops   []load.Op
		found func(string, string) (int64, bool)
		want  porcupine.CheckResult
	}{
		"good":                    {[]load.Op{write("1", 1, 0, 1), write("2", 2, 2, 3), read("2", 2, 4, 5)}, nothing, porcupine.Ok},
		"stale read":              {[]load.Op{write("1", 1, 0, 1), write("2", 2, 2, 3), read("1", 1, 4, 5)}, nothing, porcupine.Illegal},
		"one version twice":       {[]load.Op{write("1", 1, 0, 1), write("2", 1, 2, 3)}, nothing, porcupine.Illegal},
		"lost write":              {[]load.Op{write("1", 1, 0, 1), read("", 0, 2, 3)}, nothing, porcupine.Illegal},
		"unknown took effect":     {[]load.Op{write("1", 1, 0, 1), write("2", 2, 2, 3), lost, read("3", 3, 8, 9)}, func(_, v string) (int64, bool) { return 3, v == "3" }, porcupine.Ok},
		"unknown that was undone": {[]load.Op{write("1", 1, 0, 1), write("2", 2, 2, 3), lost, read("3", 3, 8, 9), read("2", 2, 10, 11)}, func(_, v string) (int64, bool) { return 3, v == "3" }, porcupine.Illegal},
	} {
		if got := linearizable(c.ops, c.found); got != c.want {
			t.Errorf("%s is %v, want %v", name, got, c.want)
		}
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
		if r := linearizable(ops, h.Found); r != porcupine.Ok {
			t.Errorf("the history of %d requests is %v", len(ops), r)
		}
	})
}
