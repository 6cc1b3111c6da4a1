// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// Op is one request of a hammer, as its client saw it.
type Op struct {
	Client  int
	Key     string
	Write   bool
	Value   string // written, or read
	Version int64  // acknowledged, or read; 0 when there was none
	// Seq, Epoch and Cell are those of the version.
	Seq, Epoch uint64
	Cell       string
	Call       time.Time
	Return     time.Time
	// Err is nil for an acknowledged request. Unknown says that it may have run.
	Err     error
	Unknown bool
}

// String describes an acknowledged write.
func (op Op) String() string {
	return fmt.Sprintf("%s=%q, acknowledged at %s by cell %s at epoch %d as version %d with event %d,", op.Key, op.Value, op.Return.Format("15:04:05.000"), op.Cell, op.Epoch, op.Version, op.Seq)
}

// Hammer reads and writes one tenant's keys from several clients at once.
type Hammer struct {
	Client *Client
	// Clients is the number of concurrent clients; Keys how many keys they share.
	Clients, Keys int
	// WriteShare in percent; 0 means 50.
	WriteShare int
	// Pause between two requests of one client; 0 is none.
	Pause time.Duration
	// Rate is how many requests a second all clients send together, each by a timetable
	// of its own: who was kept waiting sends the next at once, until it has caught up or
	// is more than a second behind. 0 is as many as there are answers, less the pauses.
	Rate float64
	// Namespace of the keys; "" means "hammer".
	Namespace string

	mu  sync.Mutex // guards the rest
	ops []Op
	// found has the version that each value was found at, by key; set by Verify.
	found map[string]map[string]int64
}

// Run hammers until ctx ends.
func (h *Hammer) Run(ctx context.Context) {
	if h.WriteShare == 0 {
		h.WriteShare = 50
	}
	if h.Namespace == "" {
		h.Namespace = "hammer"
	}
	var wg sync.WaitGroup
	for i := range h.Clients {
		wg.Go(func() { h.client(ctx, i) })
	}
	wg.Wait()
}

func (h *Hammer) client(ctx context.Context, id int) {
	rng := rand.New(rand.NewPCG(uint64(id), 7))
	due := timetable{}
	if h.Rate > 0 {
		due.every = time.Duration(float64(h.Clients) / h.Rate * float64(time.Second))
		due.next = time.Now().Add(due.every * time.Duration(id) / time.Duration(h.Clients))
	}
	for n := 0; due.wait(ctx); n++ {
		op := Op{Client: id, Key: fmt.Sprintf("k%d", rng.IntN(h.Keys)), Write: rng.IntN(100) < h.WriteShare}
		// The request is not cut off at the end of the run: its outcome would be unknown.
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 60*time.Second)
		op.Call = time.Now()
		var it Item
		if op.Write {
			op.Value = fmt.Sprintf("%d-%d", id, n)
			it, op.Err = h.Client.Set(rctx, h.Namespace, op.Key, op.Value, -1)
		} else {
			it, op.Err = h.Client.Get(rctx, h.Namespace, op.Key)
			if len(it.Value) > 2 {
				op.Value = string(it.Value[1 : len(it.Value)-1])
			}
		}
		op.Return = time.Now()
		cancel()
		op.Version, op.Seq, op.Epoch, op.Cell = it.Version, it.EventSeq, it.Epoch, it.Cell
		var se *StatusError
		switch {
		case op.Err == nil:
		case errors.As(op.Err, &se) && se.Status == 404 && se.Code == "NO_SUCH_MEMORY":
			op.Err = nil
		case errors.As(op.Err, &se) && se.Code != "CELL_UNREACHABLE" && se.Code != "BACKEND_TIMEOUT" && se.Status != 500:
			// Refused before anything ran.
		default:
			op.Unknown = true
		}
		h.mu.Lock()
		h.ops = append(h.ops, op)
		h.mu.Unlock()
		if h.Pause > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(h.Pause):
			}
		}
	}
}

// timetable says when the next request of a client is due; the zero value: at once.
type timetable struct {
	every time.Duration
	next  time.Time
}

// wait waits for the next request to be due; false when ctx has ended.
func (t *timetable) wait(ctx context.Context) bool {
	if t.every == 0 {
		return ctx.Err() == nil
	}
	left := time.Until(t.next)
	if left < -time.Second {
		t.next = time.Now()
	}
	t.next = t.next.Add(t.every)
	if left <= 0 {
		return ctx.Err() == nil
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(left):
		return true
	}
}

// Ops returns what was recorded so far; the caller owns the slice.
func (h *Hammer) Ops() []Op {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Op(nil), h.ops...)
}

// Tally is what a hammer's books say in the end.
type Tally struct {
	Requests, Writes, Failed, Unknown int
	// Lost acknowledged writes are not in the key's history; Duplicated ones are in
	// it more than once; Phantom versions were never sent or were refused.
	Lost, Duplicated, Phantom int
	FirstFailure              string
	// FirstLoss says which acknowledged write was not found as it was.
	FirstLoss string
}

// Clean reports whether nothing failed and nothing was lost.
func (t *Tally) Clean() bool { return t.Failed+t.Lost+t.Duplicated+t.Phantom == 0 }

func (t *Tally) lose(format string, args ...any) {
	t.Lost++
	if t.FirstLoss == "" {
		t.FirstLoss = fmt.Sprintf(format, args...)
	}
}

// Verify reads the history of every key and compares it with the books.
func (h *Hammer) Verify(ctx context.Context) (Tally, error) {
	var t Tally
	type write struct{ key, value string }
	acked, maybe := map[write]Op{}, map[write]bool{}
	keys := map[string]bool{}
	for _, op := range h.Ops() {
		t.Requests++
		keys[op.Key] = true
		w := write{op.Key, op.Value}
		switch {
		case op.Err != nil:
			t.Failed++
			if t.FirstFailure == "" {
				t.FirstFailure = op.Err.Error()
			}
			if op.Unknown {
				t.Unknown++
			}
			if op.Write && op.Unknown {
				maybe[w] = true
			}
		case op.Write:
			t.Writes++
			acked[w] = op
		}
	}
	for key := range keys {
		items, err := h.Client.History(ctx, h.Namespace, key)
		if err != nil {
			return t, fmt.Errorf("history of %s: %w", key, err)
		}
		seen := map[string]int{}
		found := map[string]int64{}
		for i, it := range items {
			if i > 0 && items[i-1].Version != it.Version+1 {
				t.lose("%s: version %d follows %d", key, items[i-1].Version, it.Version)
			}
			if len(it.Value) < 2 {
				t.Phantom++
				continue
			}
			v := string(it.Value[1 : len(it.Value)-1])
			seen[v]++
			found[v] = it.Version
			w := write{key, v}
			switch ack, ok := acked[w]; {
			case seen[v] > 1:
				t.Duplicated++
			case ok && ack.Version != it.Version:
				t.lose("%s is at version %d", ack, it.Version)
			case !ok && !maybe[w]:
				t.Phantom++
			}
		}
		for w, ack := range acked {
			if w.key == key && seen[w.value] == 0 {
				t.lose("%s is in none of %d versions", ack, len(items))
			}
		}
		h.mu.Lock()
		if h.found == nil {
			h.found = map[string]map[string]int64{}
		}
		h.found[key] = found
		h.mu.Unlock()
	}
	return t, nil
}

// Found returns the version at which Verify found a written value; ok is false
// when it is in no version of the key.
func (h *Hammer) Found(key, value string) (version int64, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	version, ok = h.found[key][value]
	return version, ok
}

// Waits returns, for each client that had a request during the span from..to, the
// longest that one of them took, in no particular order.
func (h *Hammer) Waits(from, to time.Time) []time.Duration {
	most := map[int]time.Duration{}
	for _, op := range h.Ops() {
		if op.Call.Before(to) && op.Return.After(from) {
			most[op.Client] = max(most[op.Client], op.Return.Sub(op.Call))
		}
	}
	return slices.Collect(maps.Values(most))
}
