// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

func TestProgressIsBounded(t *testing.T) {
	p := newPlane(t)
	reports := 0
	agent := &fakeAgent{prepare: func(ctx context.Context, _ cells.MoveRef, _ transfer.Source, progress func(cells.Progress)) (cells.Prediction, error) {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for begun := time.Now(); time.Since(begun) < 500*time.Millisecond; <-tick.C {
			reports++
			progress(cells.Progress{Phase: "snapshot", Done: int64(reports)})
		}
		progress(cells.Progress{Phase: "verify", Done: 1})
		return cells.Prediction{}, nil
	}}
	pair(t, p, agent, agent)
	var got []cells.Progress
	begun := time.Now()
	_, err := p.client(t).Prepare(t.Context(), moveRef(), func(p cells.Progress) { got = append(got, p) })
	most := int(time.Since(begun)/(100*time.Millisecond)) + 3
	if err != nil || len(got) < 2 || len(got) > most || got[len(got)-1].Phase != "verify" || reports < 20 {
		t.Fatalf("%d lines for %d reports, want at most %d: %v; %v", len(got), reports, most, got, err)
	}
	for i, g := range got[1:] {
		if g.Phase == "snapshot" && g.Done <= got[i].Done {
			t.Fatalf("progress goes back: %v", got)
		}
	}
}

// A caller that goes away ends its step.
func TestDisconnectCancelsTheStep(t *testing.T) {
	p := newPlane(t)
	ended := make(chan error, 1)
	agent := &fakeAgent{prepare: func(ctx context.Context, _ cells.MoveRef, _ transfer.Source, progress func(cells.Progress)) (cells.Prediction, error) {
		progress(cells.Progress{Phase: "snapshot", Done: 1})
		<-ctx.Done()
		ended <- ctx.Err()
		return cells.Prediction{}, ctx.Err()
	}}
	pair(t, p, agent, agent)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := p.client(t).Prepare(ctx, moveRef(), func(cells.Progress) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("the step goes on")
	}
}

// A process that leaves in the middle of a step hands it over.
func TestStepGoesOnInAnotherProcess(t *testing.T) {
	p := newPlane(t)
	var runs atomic.Int64
	running := make(chan string, 2)
	agentOf := func(name string) *fakeAgent {
		return &fakeAgent{prepare: func(ctx context.Context, _ cells.MoveRef, _ transfer.Source, progress func(cells.Progress)) (cells.Prediction, error) {
			if runs.Add(1) > 1 {
				return cells.Prediction{LagChanges: 7}, nil
			}
			running <- name
			<-ctx.Done()
			return cells.Prediction{}, ctx.Err()
		}}
	}
	a := p.join(t, p.config(t, "a"), WithStore(store(newMemKeeper(), &fakeAgent{})))
	p.ready(t, a)
	targets := map[string]*Member{}
	for _, n := range []string{"b-1", "b-2"} {
		cfg := p.config(t, "b")
		cfg.Instance = n
		targets[n] = p.join(t, cfg, WithStore(store(newMemKeeper(), agentOf(n))))
		p.ready(t, targets[n])
		p.waitBeat(t, n, func(h Heartbeat) bool { return h.Instance == n && h.Ready })
	}
	c := p.client(t)
	done := make(chan error, 1)
	var pred cells.Prediction
	go func() {
		var err error
		pred, err = c.Prepare(t.Context(), moveRef(), nil)
		done <- err
	}()
	if err := targets[<-running].Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || pred.LagChanges != 7 || runs.Load() != 2 {
		t.Fatal(pred, err, runs.Load())
	}
}

func TestReadLines(t *testing.T) {
	try := func(text string) (cells.Prediction, error) {
		var out cells.Prediction
		return out, readLines(strings.NewReader(text), &out, nil, func(error) {})
	}
	good := "{}\n" + `{"progress":{"phase":"x","done":1,"total":2,"bytes":0}}` + "\n" + `{"result":{"pause":5,"lag_changes":1,"write_rate":2}}` + "\n"
	var out cells.Prediction
	if err := readLines(strings.NewReader(good), &out, nil, func(error) {}); err != nil || out.Pause != 5 {
		t.Fatalf("%+v %v", out, err)
	}
	for text, want := range map[string]error{
		"":     cells.ErrUnavailable,
		"{}\n": cells.ErrUnavailable,
		`{"progress":{"phase":"x","done":1,"total":2,"bytes":0}}` + "\n": cells.ErrUnavailable,
		`{"error":{"kind":"stale_order","message":"late"}}` + "\n":       cells.ErrStaleOrder,
		`{"surprise":1}` + "\n":                      cells.ErrInvalid,
		"nonsense\n":                                 cells.ErrInvalid,
		`{"result":{"pause":"soon"}}` + "\n":         cells.ErrInvalid,
		`{"result":{"pause":5,"surprise":1}}` + "\n": cells.ErrInvalid,
		`{"result":[]}` + "\n":                       cells.ErrInvalid,
		`{} {}` + "\n":                               cells.ErrInvalid,
		`{"error":{"message":"` + strings.Repeat("x", maxLine) + `"}}` + "\n": cells.ErrInvalid,
	} {
		if p, err := try(text); !errors.Is(err, want) {
			t.Errorf("%.60q: %+v %v, want %v", text, p, err, want)
		}
	}
}

func FuzzReadLines(f *testing.F) {
	f.Add([]byte("{}\n" + `{"result":{"pause":5,"lag_changes":1,"write_rate":2}}` + "\n"))
	f.Add([]byte(`{"error":{"kind":"fenced","message":"x"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var out cells.Prediction
		err := readLines(bytes.NewReader(b), &out, func(cells.Progress) {}, func(error) {})
		if err != nil {
			return
		}
		again, merr := json.Marshal(out)
		if merr != nil || !bytes.Contains(b, []byte(`"result"`)) {
			t.Fatalf("accepted %q as %s", b, again)
		}
	})
}

func FuzzOrders(f *testing.F) {
	f.Add([]byte(`{"cell":"a","tenant":"t","epoch":2,"floor":1,"move":"m"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o cells.FenceOrder
		if err := decodeOrder(bytes.NewReader(b), 4096, &o); err != nil && !errors.Is(err, cells.ErrInvalid) {
			t.Fatal(err)
		}
		var r cells.TenantRoute
		if err := decodeOrder(bytes.NewReader(b), 4096, &r); err != nil && !errors.Is(err, cells.ErrInvalid) {
			t.Fatal(err)
		}
	})
}
