// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pglogrepl"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Bounds of what a hub keeps in memory, in bytes of changes.
const (
	// sharerBytes is what may wait for a member that reads, waitingBytes for one that
	// does not. The latter is read for anew when it does; one that reads too slowly gets a
	// slot of its own.
	sharerBytes  = 16 << 20
	waitingBytes = 2 << 20
	// replayBytes is what is kept of what a member has read and not applied, so that it
	// can begin again without a new reading.
	replayBytes = 1 << 20
	// hubBytes is what all members together may have waiting.
	hubBytes = 128 << 20
)

const (
	// hubEvery is how often a hub looks after its members, refreshEvery how many times
	// that it reads who they are.
	hubEvery     = time.Second
	refreshEvery = 5
	// hubLinger is how long a hub goes on that nobody reads from.
	hubLinger = 20 * time.Second
	// idleAfter is how often a member that has no changes hears how far the hub is.
	idleAfter = 2 * time.Second
)

// stallBounds say from when on a member holds up its group: what it has not applied
// is more than bytes of log, and it has not got further for a while.
type stallBounds struct {
	bytes      uint64
	move, back time.Duration // for a move, and for a way back, which is read in rounds
}

var defaultStall = stallBounds{bytes: 64 << 20, move: time.Minute, back: 15 * time.Minute}

// hub reads the slot of a group, once for all members, and keeps for each what it has
// not read. It is the group's one reader in this process; another process cannot read
// meanwhile.
//
// A member's queue holds every transaction of its tenant whose commit record is at or
// behind base and before want. What the server hears is the least that any member
// has applied, so whatever a member may still ask for can be read again.
type hub struct {
	s      *Store
	id     string
	r      *reader
	cancel context.CancelCauseFunc
	done   chan struct{}

	mu      sync.Mutex // guards what follows
	members map[cells.MoveID]*sharer
	tenants map[string]*sharer
	version int           // of members and where they begin
	final   pglogrepl.LSN // of the transaction that is being read
	pos     pglogrepl.LSN // everything that committed before was told
	sent    pglogrepl.LSN // what the server has heard
	touched []*sharer     // with changes or a message in the transaction
	again   bool          // read anew
	cut     context.CancelCauseFunc
	used    time.Time
	err     error // why it has ended
}

// sharer is a member of a hub.
type sharer struct {
	part
	move   cells.MoveID
	tenant string
	back   bool
	// joining: where it begins is not known yet, and nothing may be forgotten.
	joining bool
	// local: it joins in this process, which knows best.
	local         bool
	acked, stored pglogrepl.LSN
	ackedAt       time.Time
	base, want    pglogrepl.LSN
	// cold: the queue has been given up; paused: until the next reading begins.
	cold, paused bool
	hit          bool // a message or changes, in this transaction
	q            []piece
	next         int
	bytes        int64
	open         bool // the last pieces are of a transaction that has not ended
	sub          *subscription
	leaving      bool // it is being given a slot of its own
	tried        time.Time
}

type piece struct {
	final pglogrepl.LSN
	b     transfer.Batch
}

var errAgain = errors.New("transfer/postgres: read again")

// add makes a member known. Called with mu held, or before the hub runs.
func (h *hub) add(sh *sharer) {
	sh.owner, sh.ackedAt = sh, time.Now()
	h.members[sh.move] = sh
	for _, k := range h.keys(sh.tenant) {
		h.tenants[k] = sh
	}
	h.version++
}

func (h *hub) keys(tenant string) []string {
	out := []string{tenant}
	for _, t := range h.r.cat.tables {
		if k := t.tenantKey(tenant); k != tenant {
			return append(out, k)
		}
	}
	return out
}

// drop forgets a member; whoever reads for it is told why.
func (h *hub) drop(move cells.MoveID, why error) {
	sh := h.members[move]
	if sh == nil {
		return
	}
	delete(h.members, move)
	for _, k := range h.keys(sh.tenant) {
		if h.tenants[k] == sh {
			delete(h.tenants, k)
		}
	}
	h.version++
	if sh.sub != nil {
		sh.sub.cancel(why)
	}
}

// floor is what no member needs any more.
func (h *hub) floor() pglogrepl.LSN {
	out, any := ^pglogrepl.LSN(0), false
	for _, sh := range h.members {
		if any = true; sh.joining {
			return h.sent
		}
		out = min(out, sh.acked)
	}
	if !any {
		return h.sent
	}
	return max(out, h.sent)
}

// ack notes that a member's target holds everything up to at.
func (h *hub) ack(move cells.MoveID, at pglogrepl.LSN) {
	h.mu.Lock()
	defer h.mu.Unlock()
	sh := h.members[move]
	if sh == nil || sh.joining || at <= sh.acked {
		return
	}
	sh.acked, sh.ackedAt = at, time.Now()
	n := 0
	for n < sh.next && sh.q[n].b.End && sh.q[n].b.Upto <= positionOf(at) {
		n++
	}
	sh.trim(n)
}

// trim gives up the first n pieces, which were read.
func (sh *sharer) trim(n int) {
	for _, p := range sh.q[:n] {
		sh.bytes -= p.cost()
		sh.base = p.final + 1
	}
	sh.q, sh.next = sh.q[n:], sh.next-n
}

func (p piece) cost() int64 { return int64(len(p.b.Data)) + 128 }

// The outlet of the reader.

func (h *hub) acked() pglogrepl.LSN {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sent = h.floor()
	return h.sent
}

func (h *hub) begin(final pglogrepl.LSN) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.final = final
	return nil
}

// wants reports whether the transaction is news to the member.
func (h *hub) wants(sh *sharer) bool {
	return sh != nil && !sh.cold && !sh.paused && h.final >= sh.want
}

func (h *hub) hit(sh *sharer) {
	if !sh.hit {
		sh.hit = true
		h.touched = append(h.touched, sh)
	}
}

func (h *hub) pick(_ *table, tenant []byte) *part {
	h.mu.Lock()
	defer h.mu.Unlock()
	sh := h.tenants[string(tenant)]
	if !h.wants(sh) {
		return nil
	}
	h.hit(sh)
	return &sh.part
}

func (h *hub) note(move string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if sh := h.members[cells.MoveID(move)]; h.wants(sh) {
		h.hit(sh)
	}
}

func (h *hub) broken(p *part, err error) error {
	if p == nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	sh := p.owner
	if sh.sub != nil {
		sh.sub.cancel(err)
	}
	sh.chill()
	return nil
}

// chill gives up the queue: who reads next is read for anew. What the reader has of a
// transaction it gives up at its end.
func (sh *sharer) chill() {
	sh.q, sh.next, sh.bytes, sh.open, sh.cold = nil, 0, 0, false, true
}

func (h *hub) emit(_ context.Context, p *part) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	sh := p.owner
	if !h.wants(sh) {
		sh.take()
		return nil
	}
	sh.open = true
	h.put(sh, p.take())
	return nil
}

func (h *hub) put(sh *sharer, b transfer.Batch) {
	p := piece{h.final, b}
	sh.q = append(sh.q, p)
	sh.bytes += p.cost()
	if sh.sub != nil {
		sh.sub.kick()
	}
	if sh.bytes > sh.bound() {
		h.full(sh)
	}
}

// bound is what may wait for the member.
func (sh *sharer) bound() int64 {
	if sh.sub == nil {
		return waitingBytes
	}
	return sharerBytes
}

// full makes room for a member that does not read, or not fast enough.
func (h *hub) full(sh *sharer) {
	n := sh.next
	for n > 0 && !sh.q[n-1].b.End {
		n--
	}
	sh.trim(n)
	if sh.bytes <= sh.bound() {
		return
	}
	if sub := sh.sub; sub != nil {
		h.detach(sh)
		sub.cancel(errTaken)
	}
	sh.chill()
}

func (h *hub) commit(_ context.Context, end pglogrepl.LSN) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, sh := range h.touched {
		sh.hit = false
		if !h.wants(sh) {
			sh.take()
			continue
		}
		b := sh.take()
		b.Upto, b.End = positionOf(end), true
		sh.want, sh.open = h.final+1, false
		h.put(sh, b)
	}
	h.touched = h.touched[:0]
	h.moved(end)
	return nil
}

func (h *hub) reached(at pglogrepl.LSN) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.moved(at)
	return nil
}

// moved notes how far the hub is. Outside of a transaction.
func (h *hub) moved(at pglogrepl.LSN) {
	if at <= h.pos {
		return
	}
	h.pos = at
	for _, sh := range h.members {
		if sh.sub != nil && sh.sub.upto != 0 && at >= sh.sub.upto {
			sh.sub.kick()
		}
	}
}

// run reads until the context ends or reading fails; the reader is open.
func (h *hub) run(ctx context.Context) {
	defer close(h.done)
	var err error
	for {
		rctx, cut := context.WithCancelCause(ctx)
		h.mu.Lock()
		h.cut = cut
		if h.again {
			cut(errAgain)
		}
		h.mu.Unlock()
		pid := h.r.conn.PID()
		err = h.r.read(rctx)
		cut(nil)
		h.mu.Lock()
		again := h.again && ctx.Err() == nil
		if again {
			h.rewind()
		}
		start := h.floor()
		h.mu.Unlock()
		if !again {
			break
		}
		// The server may not have noticed yet that its last reader is gone.
		_, _ = h.s.pool.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active_pid = $2", h.r.slot, int64(pid))
		if err = h.r.open(ctx, start, false); err != nil {
			break
		}
	}
	h.s.ended(h)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err = err; h.err == nil {
		h.err = errTaken
	}
	if errors.Is(h.err, context.Canceled) {
		h.err = errTaken
	}
	for _, sh := range h.members {
		if sh.sub != nil {
			sh.sub.cancel(h.err)
		}
	}
}

// rewind makes the members ready for a reading from the floor on: what they have is
// not taken twice, and what was left open is taken again.
func (h *hub) rewind() {
	h.again, h.pos = false, 0
	for _, sh := range h.members {
		sh.take()
		sh.paused, sh.hit = false, false
		if !sh.open {
			continue
		}
		sh.open = false
		n := len(sh.q)
		for n > 0 && !sh.q[n-1].b.End {
			n--
			sh.bytes -= sh.q[n].cost()
		}
		if sh.q = sh.q[:n]; sh.next > n {
			sh.next = n
			if sh.sub != nil {
				sh.sub.cancel(errTaken)
			}
		}
	}
	h.touched = h.touched[:0]
}
