// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"crypto/rand"
	"log/slog"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

const (
	// witnessEvery is how often it is looked at what is to be reported.
	witnessEvery = 200 * time.Millisecond
	// witnessSettle is for how long further news of a move is awaited before it is
	// reported.
	witnessSettle = 500 * time.Millisecond
	// witnessKeep is how long a move is remembered whose cut is over and reported.
	witnessKeep = 10 * time.Minute
	// witnessMoves bounds the moves that are remembered.
	witnessMoves = 1 << 14
	// leastRetry is when a refused client is taken to come again that was told nothing.
	leastRetry = time.Second
)

// SeenReporter takes reports of what clients saw; [client.EdgeClient] is one. It is
// called by one goroutine.
type SeenReporter interface {
	ReportSeen(ctx context.Context, r api.SeenReport) error
}

// Witness notes what the clients of this process see of moves, and reports it to the
// directory, which charges it to the tenant's budget. Safe for concurrent use.
//
// What counts against a move is a span of time: from when the first request arrived
// that was refused because of it, to when the last one that was refused may be sent
// again: its answer and its Retry-After, or a second. Everything between counts,
// also what was answered there: a client that is refused does not care that another
// was not. Refused because of a move is a request of the tenant that
//
//   - was answered MOVING, by this edge (it was held for too long) or by a gate whose
//     refusal could not be repeated;
//   - was answered STALE_ROUTE or WRONG_CELL by a gate and could not be repeated;
//   - was to be held for the cut and got any other answer of the platform: the room
//     was full, the directory did not answer;
//   - was held for the cut when its client gave up.
//
// A request that was held and then answered by the service is none, however long it
// waited. A stream that the gate ended is none: its client comes again and is held. A
// cut of which nothing was refused is reported, too, with a span of zero.
//
// A move is known by its tenant and the epoch that it began from, which no other has.
// Reports repeat all that is known of a move, until the directory has it; what a
// killed process had not reported is lost.
type Witness struct {
	to       SeenReporter
	instance string
	log      *slog.Logger

	mu    sync.Mutex // guards moves
	moves map[witnessKey]*witnessed
}

type witnessKey struct {
	tenant cells.TenantID
	base   cells.Epoch
}

// witnessed is what was seen of one move.
type witnessed struct {
	move    cells.MoveID
	seq     int64 // grows with each change
	sent    int64 // what the directory has
	refused int64
	first   time.Time // arrival of the first refused request
	last    time.Time // when the last one may come again
	changed time.Time
	news    time.Time // when what is not sent began to come
	over    bool      // the view has a route behind the cut
}

// NewWitness returns a witness that reports to a directory. Give its [Witness.Route]
// to the router of the edge's view, and itself to [Config].
func NewWitness(to SeenReporter, log *slog.Logger) *Witness {
	if log == nil {
		log = slog.Default()
	}
	return &Witness{to: to, instance: rand.Text(), log: log, moves: map[witnessKey]*witnessed{}}
}

// Route is told of the changes of the view: see [cells.WithOnChange].
func (w *Witness) Route(old, now cells.TenantRoute) {
	cutting := now.Moving() && now.MoveID != ""
	ended := old.MoveID != "" && now.MoveID != old.MoveID && now.Epoch >= old.Base+2
	jumped := old.Serving() && old.MoveID == "" && now.Epoch == old.Epoch+2 && now.MoveID == "" && now.Serving()
	if !cutting && !ended && !jumped {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if cutting {
		w.at(now.TenantID, now.Base, now.MoveID)
	}
	switch {
	case ended:
		w.end(w.at(old.TenantID, old.Base, old.MoveID))
	case jumped: // from before the move to behind it
		w.end(w.at(old.TenantID, old.Epoch, ""))
	}
}

// at returns what is known of a move, or nil when there is no room. With mu held.
func (w *Witness) at(tenant cells.TenantID, base cells.Epoch, move cells.MoveID) *witnessed {
	k := witnessKey{tenant, base}
	m := w.moves[k]
	if m == nil {
		if len(w.moves) >= witnessMoves {
			return nil
		}
		m = &witnessed{changed: time.Now()}
		w.moves[k] = m
	}
	if m.move == "" {
		m.move = move
	}
	return m
}

func (w *Witness) end(m *witnessed) {
	if m == nil || m.over {
		return
	}
	m.over = true
	m.change()
}

func (m *witnessed) change() {
	m.changed = time.Now()
	if m.sent == m.seq {
		m.news = m.changed
	}
	m.seq++
}

// refusal notes a request that was refused because of a move.
func (w *Witness) refusal(tenant cells.TenantID, base cells.Epoch, move cells.MoveID, from, until time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if behind := (witnessKey{tenant, base - 2}); base > 2 && move == "" && w.moves[behind] != nil && w.moves[witnessKey{tenant, base}] == nil {
		base -= 2 // the target, which was not yet ready to serve
	}
	m := w.at(tenant, base, move)
	if m == nil {
		w.log.Warn("edge: a refusal is not counted: too many moves", "tenant", tenant, "base", base)
		return
	}
	if m.refused == 0 || from.Before(m.first) {
		m.first = from
	}
	if until.After(m.last) {
		m.last = until
	}
	m.refused++
	m.change()
}

// Run reports until ctx ends, and then once more what is left, for a second at most.
func (w *Witness) Run(ctx context.Context) {
	tick := time.NewTicker(witnessEvery)
	defer tick.Stop()
	wait, next := time.Second, time.Time{}
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if err := w.flush(last, true); err != nil {
				w.log.Warn("edge: what clients saw of moves is not reported", "err", err)
			}
			return
		case <-tick.C:
		}
		if time.Now().Before(next) {
			continue
		}
		err := w.flush(ctx, false)
		if err == nil {
			wait = time.Second
			continue
		}
		if ctx.Err() == nil {
			w.log.Warn("edge: what clients saw of moves is not reported; trying again", "err", err, "in", wait)
		}
		next = time.Now().Add(wait)
		wait = min(2*wait, 15*time.Second)
	}
}

// flush reports what is due, or all that is not reported.
func (w *Witness) flush(ctx context.Context, all bool) error {
	for {
		rep, keys := w.report(all)
		if len(keys) == 0 {
			return nil
		}
		err := w.to.ReportSeen(ctx, rep)
		if a := cells.AnswerOf(err); a != nil && (a.Code == cells.CodeBadRequest || a.Code == cells.CodeNotServed) {
			// Saying it again would change nothing.
			w.log.Error("edge: the directory does not take what clients saw of moves", "moves", len(keys), "err", err)
		} else if err != nil {
			return err
		}
		w.mu.Lock()
		for i, k := range keys {
			if m := w.moves[k]; m != nil {
				if m.sent = max(m.sent, rep.Moves[i].Seq); m.sent < m.seq {
					m.news = time.Now()
				}
			}
		}
		w.mu.Unlock()
	}
}

// report makes the next report, and forgets what is over and reported.
func (w *Witness) report(all bool) (rep api.SeenReport, keys []witnessKey) {
	rep.Instance = w.instance
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	for k, m := range w.moves {
		idle := now.Sub(m.changed)
		switch {
		case m.sent == m.seq && m.seq > 0 && idle > witnessKeep, idle > api.MaxSpan:
			delete(w.moves, k)
			continue
		case m.sent == m.seq, !all && now.Sub(m.news) < witnessSettle, len(keys) >= api.MaxSeen:
			continue
		}
		x := api.SeenMove{Tenant: k.tenant, Move: m.move, Base: k.base, Seq: m.seq, Refused: m.refused}
		if m.refused > 0 {
			x.FirstAgo = min(now.Sub(m.first), api.MaxSpan)
			x.LastAgo = min(now.Sub(m.last), x.FirstAgo)
		}
		rep.Moves = append(rep.Moves, x)
		keys = append(keys, k)
	}
	return rep, keys
}

// waitsForCut notes that the request waits for the outcome of a cut, or is about to.
func (x *exchange) waitsForCut(d cells.Decision) {
	x.cutBase, x.cutMove = d.Epoch, d.Route.MoveID
	if d.Route.MoveID != "" {
		x.cutBase = d.Route.Base
	}
	x.inCut = true
}

// witness counts the request that has ended, if it was refused because of a move.
func (x *exchange) witness() {
	w := x.s.cfg.Witness
	if w == nil || x.tenant == "" {
		return
	}
	until := time.Now()
	if x.outcome != outcomeGone {
		if x.cause == nil {
			return
		}
		until = until.Add(max(x.cause.RetryAfter, leastRetry))
		switch x.cause.Code {
		case cells.CodeMoving:
		case cells.CodeStaleRoute, cells.CodeWrongCell:
			if x.sent == 0 {
				return
			}
		default:
			if !x.inCut {
				return
			}
		}
	} else if !x.inCut {
		return
	}
	base, move := x.cutBase, x.cutMove
	if base == 0 {
		if d := x.s.routes.Lookup(x.tenant); d.Route.MoveID != "" {
			base, move = d.Route.Base, d.Route.MoveID
		} else {
			base = x.epoch
		}
	}
	if base > 0 {
		w.refusal(x.tenant, base, move, x.start, until)
	}
}
