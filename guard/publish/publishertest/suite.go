// SPDX-License-Identifier: Apache-2.0

package publishertest

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
)

// Publisher is one process's publisher.
type Publisher interface {
	guard.Publisher
	Close()
}

// Broker is a broker on this machine, which keeps what it has stored over a
// restart.
type Broker interface {
	// Publisher returns a new publisher, as a further process would have, that talks
	// to the broker through the link.
	Publisher(ctx context.Context) (Publisher, error)
	// Link is what publishers go through.
	Link() *Link
	// Log returns all that the broker has stored for the tenant, in its order, as
	// bodies were decoded.
	Log(ctx context.Context, tenant cells.TenantID) ([]guard.Event, error)
	// Stop ends the broker, Start starts it again where it was.
	Stop() error
	Start() error
	Close()
}

// Harness is a publisher as the suite sees it.
type Harness struct {
	// Open starts an empty broker.
	Open func(ctx context.Context) (Broker, error)
	// Once: the broker stores nothing twice, whoever repeats it, and nothing out of
	// order. Without it consumers drop repetitions.
	Once bool
	// Wrap, if set, stands between the suite and each publisher: for broken ones.
	Wrap func(Publisher) Publisher
	// Patience bounds waits that should end by themselves; 0 means 20 s.
	Patience time.Duration
	// Settled bounds how long Publish may go on after its context has ended; 0
	// means 5 s.
	Settled time.Duration
	// Only, if not empty, names the sections to run.
	Only []string
}

var sections = []struct {
	name string
	run  func(*env)
}{
	{"order", testOrder},
	{"repeated", testRepeated},
	{"behind", testBehind},
	{"two", testTwo},
	{"recreated", testRecreated},
	{"answers-lost", testAnswersLost},
	{"cut", testCut},
	{"restart", testRestart},
	{"away", testAway},
	{"pause", testPause},
	{"late", testLate},
	{"move", testMove},
}

// Sections lists the names that [Harness.Only] takes.
func Sections() (out []string) {
	for _, s := range sections {
		out = append(out, s.name)
	}
	return out
}

// Run runs the suite.
func Run(t guardtest.T, h Harness) {
	for _, only := range h.Only {
		if !slices.Contains(Sections(), only) {
			t.Fatalf("there is no section %q", only)
		}
	}
	for _, s := range sections {
		if len(h.Only) > 0 && !slices.Contains(h.Only, s.name) {
			continue
		}
		t.Run(s.name, func(t guardtest.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			b, err := h.Open(ctx)
			if err != nil {
				t.Fatalf("cannot open a broker: %v", err)
			}
			defer b.Close()
			e := &env{T: t, h: &h, b: b, ctx: ctx}
			defer e.closeAll()
			s.run(e)
		})
	}
}

// env is one section's.
type env struct {
	guardtest.T
	h    *Harness
	b    Broker
	ctx  context.Context
	pubs []Publisher
}

func (e *env) closeAll() {
	e.b.Link().Release()
	for _, p := range e.pubs {
		p.Close()
	}
}

func (e *env) publisher() Publisher {
	e.Helper()
	p, err := e.b.Publisher(e.ctx)
	if err != nil {
		e.Fatalf("publisher: %v", err)
	}
	e.pubs = append(e.pubs, p)
	if e.h.Wrap != nil {
		p = e.h.Wrap(p)
	}
	return p
}

func (e *env) patience() time.Duration {
	if e.h.Patience > 0 {
		return e.h.Patience
	}
	return 20 * time.Second
}

func (e *env) settled() time.Duration {
	if e.h.Settled > 0 {
		return e.h.Settled
	}
	return 5 * time.Second
}

var tenants atomic.Int64

// newTenant has a full stop in its name, which brokers may take for more.
func newTenant() cells.TenantID {
	return cells.TenantID(fmt.Sprintf("t.%d:x@y_z", tenants.Add(1)))
}

// event is the same whenever it is asked for.
func event(tenant cells.TenantID, seq cells.EventSeq) guard.Event {
	return guard.Event{
		Tenant: tenant, Seq: seq, Epoch: 3, Cell: "here", ID: fmt.Sprintf("%s-%d", reID(tenant), seq), Type: "thing.changed",
		Payload: json.RawMessage(fmt.Sprintf(`{"n":%d,"text":"ä <&> \u0000"}`, seq)), At: time.Unix(1700000000, int64(seq)*1000).UTC(),
	}
}

// reID makes a tenant's name something that ids may have.
func reID(t cells.TenantID) string {
	b := []byte(t)
	for i, c := range b {
		if c == '.' || c == ':' || c == '@' {
			b[i] = '-'
		}
	}
	return string(b)
}

func events(tenant cells.TenantID, from, to cells.EventSeq) (out []guard.Event) {
	for s := from; s <= to; s++ {
		out = append(out, event(tenant, s))
	}
	return out
}

// publish does what a relay does with one batch: it repeats what was not accepted
// until all is. It returns how many calls there were.
func (e *env) publish(p guard.Publisher, batch []guard.Event) (calls int) {
	e.Helper()
	deadline := time.Now().Add(e.patience())
	for len(batch) > 0 {
		ctx, cancel := context.WithTimeout(e.ctx, 2*time.Second)
		err := p.Publish(ctx, batch)
		cancel()
		calls++
		batch = batch[guard.Accepted(err, len(batch)):]
		if len(batch) > 0 && time.Now().After(deadline) {
			e.Fatalf("event %d of %s is not accepted after %s: %v", batch[0].Seq, batch[0].Tenant, e.patience(), err)
		}
		if err != nil {
			pause := time.NewTimer(20 * time.Millisecond)
			<-pause.C
		}
	}
	return calls
}

func (e *env) log(tenant cells.TenantID) []guard.Event {
	e.Helper()
	log, err := e.b.Log(e.ctx, tenant)
	if err != nil {
		e.Fatalf("log of %s: %v", tenant, err)
	}
	return log
}

func (e *env) eventually(what string, cond func() bool) {
	e.Helper()
	deadline := time.Now().Add(e.patience())
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			e.Fatalf("%s: not after %s", what, e.patience())
		}
		<-tick.C
	}
}

// check holds a log against the events from 1 to n, as want has them: each is
// there, first times are in order, repetitions carry the same id, and there are none
// where nothing is stored twice. late allows events to come behind newer ones.
func (e *env) check(log []guard.Event, n cells.EventSeq, want func(cells.EventSeq) guard.Event, late bool) {
	e.Helper()
	high := cells.EventSeq(0)
	for i, got := range log {
		if got.Seq == 0 || got.Seq > n {
			e.Errorf("the broker has event %d, want 1 to %d: %v", got.Seq, n, seqs(log))
			return
		}
		if w := want(got.Seq); !same(got, w) {
			e.Errorf("event %d is %+v, want %+v", got.Seq, got, w)
		}
		switch {
		case got.Seq == high+1:
			high++
		case got.Seq > high+1:
			e.Errorf("event %d came after %d: %v", got.Seq, high, seqs(log))
			return
		case e.h.Once:
			e.Errorf("event %d is there twice: %v", got.Seq, seqs(log))
			return
		case !late && i > 0 && got.Seq > log[i-1].Seq+1:
			e.Errorf("repetition %d came after %d: %v", got.Seq, log[i-1].Seq, seqs(log))
			return
		}
	}
	if high != n {
		e.Errorf("the broker has events up to %d, want %d: %v", high, n, seqs(log))
	}
}

func (e *env) checkTenant(tenant cells.TenantID, n cells.EventSeq, late bool) {
	e.Helper()
	e.check(e.log(tenant), n, func(s cells.EventSeq) guard.Event { return event(tenant, s) }, late)
}

// same compares events; a payload may have been written another way.
func same(a, b guard.Event) bool {
	var x, y any
	if json.Unmarshal(a.Payload, &x) != nil || json.Unmarshal(b.Payload, &y) != nil || !reflect.DeepEqual(x, y) || !a.At.Equal(b.At) {
		return false
	}
	a.Payload, b.Payload, a.At, b.At = nil, nil, time.Time{}, time.Time{}
	return reflect.DeepEqual(a, b)
}

func seqs(log []guard.Event) (out []cells.EventSeq) {
	for _, e := range log {
		out = append(out, e.Seq)
	}
	return out
}
