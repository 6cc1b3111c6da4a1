// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
)

// receiver is a webhook receiver in this process.
type receiver struct {
	mu   sync.Mutex // guards everything below
	got  []guard.Event
	bad  []string
	hold chan struct{} // if set, requests wait until it is closed
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	var ev guard.Event
	if err == nil {
		err = webhook.Verify([]webhook.Key{ChildKey()}, req.Header, body, time.Now(), time.Minute)
	}
	if err == nil {
		ev, err = webhook.Decode(body)
	}
	r.mu.Lock()
	if err != nil {
		r.bad = append(r.bad, err.Error())
	} else {
		r.got = append(r.got, ev)
	}
	hold := r.hold
	r.mu.Unlock()
	if hold != nil {
		<-hold
	}
	w.WriteHeader(http.StatusNoContent)
}

func (r *receiver) seqs() []cells.EventSeq {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []cells.EventSeq
	for _, ev := range r.got {
		out = append(out, ev.Seq)
	}
	return out
}

// testRelayCrash kills a relaying process in the middle of a publication, three
// times; all events arrive, in order, some of them again.
func testRelayCrash(e *env) {
	if e.h.Child == nil {
		return
	}
	tenant := newTenant()
	epoch := cells.Epoch(1)
	e.open(tenant, epoch)
	const each = 4
	r := &receiver{}
	srv := httptest.NewServer(r)
	defer srv.Close()
	for round := range 3 {
		hold := make(chan struct{})
		r.mu.Lock()
		r.hold = hold
		before := len(r.got)
		r.mu.Unlock()
		e.emit(e.a, tenant, epoch, each)
		child := e.h.Child(e.db, srv.URL)
		if err := child.Start(); err != nil {
			e.Fatalf("start a relaying process: %v", err)
		}
		ended := async(child.Wait)
		e.eventually("the child publishes", func() bool { return len(r.seqs()) > before || ended.ended(0) })
		if round == 1 {
			// Not in its first request but in a later one.
			r.mu.Lock()
			r.hold = nil
			r.mu.Unlock()
			close(hold)
			hold = nil
			e.eventually("the child publishes more", func() bool { return len(r.seqs()) > before+2 || ended.ended(0) })
		}
		_ = child.Process.Kill()
		_ = ended.wait(e, "the child")
		if hold != nil {
			close(hold)
		}
		if round == 0 {
			// A process that has died does not hold up a move.
			order := cells.BarrierOrder{Tenant: tenant, Epoch: epoch + 1, Move: "m"}
			e.close(tenant, order.Epoch)
			mark, err := e.b.PauseEvents(e.ctx, order)
			if err != nil || mark != each {
				e.Errorf("pause after a crash: %d, %v, want %d", mark, err, each)
			}
			order.Epoch++
			e.must(e.b.StartEvents(e.ctx, order, mark), "start")
			epoch = order.Epoch
			e.open(tenant, epoch)
		}
	}
	r.mu.Lock()
	r.hold = nil
	r.mu.Unlock()
	pub, err := webhook.New(webhook.Config{URL: srv.URL, Keys: []webhook.Key{ChildKey()}})
	e.must(err, "publisher")
	defer pub.Close()
	stop := e.relay(e.a, pub)
	e.eventually("everything is published", func() bool { return e.fence(tenant).Published == 3*each })
	stop()

	high, ids := cells.EventSeq(0), map[string]cells.EventSeq{}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range r.bad {
		e.Errorf("a request was bad: %s", b)
	}
	for i, ev := range r.got {
		if seq, seen := ids[ev.ID]; seen && seq != ev.Seq {
			e.Errorf("id %s came with %d and %d", ev.ID, seq, ev.Seq)
		}
		ids[ev.ID] = ev.Seq
		// The next one, or again from one that was not recorded yet.
		if ev.Seq > high+1 || i > 0 && ev.Seq <= high && ev.Seq > r.got[i-1].Seq+1 {
			e.Errorf("event %d came after %v", ev.Seq, seqsOf(r.got[:i]))
		}
		high = max(high, ev.Seq)
	}
	if high != 3*each || len(ids) != 3*each {
		e.Errorf("%d events up to %d arrived, want %d", len(ids), high, 3*each)
	}
	if len(r.got) == len(ids) {
		e.Errorf("no event came twice: no process was killed in the middle of a publication (%s)", fmt.Sprint(seqsOf(r.got)))
	}
}

func seqsOf(events []guard.Event) (out []cells.EventSeq) {
	for _, ev := range events {
		out = append(out, ev.Seq)
	}
	return out
}
