// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// subscription is a reader of one member's changes.
type subscription struct {
	sh     *sharer
	cancel context.CancelCauseFunc
	wake   chan struct{} // of capacity 1
	at     pglogrepl.LSN // told up to here
	upto   pglogrepl.LSN
	last   time.Time
}

func (sub *subscription) kick() {
	select {
	case sub.wake <- struct{}{}:
	default:
	}
}

// subscribe begins to read a member's changes at from, in place of whoever did.
func (h *hub) subscribe(cancel context.CancelCauseFunc, move cells.MoveID, from, upto pglogrepl.LSN) (*subscription, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return nil, h.err
	}
	sh := h.members[move]
	if sh == nil || sh.joining {
		return nil, errUnknownMember
	}
	if sh.leaving {
		return nil, errTaken // soon it has a slot of its own
	}
	if sh.sub != nil {
		sh.sub.cancel(errTaken)
	}
	h.used = time.Now()
	sub := &subscription{sh: sh, cancel: cancel, wake: make(chan struct{}, 1), at: from, upto: upto, last: time.Now()}
	sh.sub = sub
	if sh.cold || from < sh.base {
		sh.chill()
		sh.cold, sh.paused = false, true
		sh.base, sh.want = from, from
		h.again = true
		if h.cut != nil {
			h.cut(errAgain)
		}
		return sub, nil
	}
	n := 0
	for n < len(sh.q) && sh.q[n].final < from {
		n++
	}
	sh.next = max(n, sh.next)
	sh.trim(n)
	sh.next = 0
	sub.kick()
	return sub, nil
}

func (h *hub) unsubscribe(sub *subscription) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = time.Now()
	if sub.sh.sub == sub {
		sub.sh.sub = nil
	}
}

// take returns what there is for a subscription: several transactions in one batch when
// they are waiting. last: the wanted position is reached.
func (h *hub) take(sub *subscription) (b transfer.Batch, ok, last bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	sh := sub.sh
	if sh.sub != sub || sh.paused {
		return b, false, false
	}
	for sh.next < len(sh.q) {
		p := sh.q[sh.next]
		if sub.upto != 0 && p.final >= sub.upto {
			if !ok {
				return transfer.Batch{Upto: positionOf(sub.upto), End: true}, true, true
			}
			return b, ok, false
		}
		if !ok {
			b, ok = p.b, true
			if !p.b.End {
				sh.next++
				break
			}
			b.Data = append([]byte(nil), b.Data...) // the queue keeps its own
		} else {
			if !p.b.End || len(b.Data) > transfer.BatchBytes {
				break
			}
			b.Data, b.Count, b.Upto = append(b.Data, p.b.Data...), b.Count+p.b.Count, p.b.Upto
		}
		sh.next++
	}
	if ok {
		sub.last = time.Now()
		if b.End {
			sub.at = max(sub.at, mustLSN(b.Upto))
		}
		sh.forgetRead()
		return b, true, false
	}
	switch {
	case sh.open || sh.hit:
	case sub.upto != 0 && h.pos >= sub.upto:
		return transfer.Batch{Upto: positionOf(sub.upto), End: true}, true, true
	case sub.upto == 0 && h.pos > sub.at && time.Since(sub.last) >= idleAfter:
		sub.at, sub.last = h.pos, time.Now()
		return transfer.Batch{Upto: positionOf(h.pos), End: true}, true, false
	}
	return b, false, false
}

// forgetRead bounds what is kept of what was read.
func (sh *sharer) forgetRead() {
	var read int64
	for _, p := range sh.q[:sh.next] {
		read += p.cost()
	}
	n := 0
	for ; n < sh.next && read > replayBytes; n++ {
		read -= sh.q[n].cost()
	}
	if n > 0 {
		sh.trim(n)
	}
}

func mustLSN(p transfer.Position) pglogrepl.LSN {
	l, _ := lsnOf(p) // made here
	return l
}

// follow yields a member's changes.
func (h *hub) follow(ctx context.Context, move cells.MoveID, from, upto pglogrepl.LSN, yield func(transfer.Batch) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sub, err := h.subscribe(cancel, move, from, upto)
	if err != nil {
		return err
	}
	defer h.unsubscribe(sub)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		b, ok, last := h.take(sub)
		if ok {
			if err := yield(b); err != nil || last {
				return err
			}
			continue
		}
		select {
		case <-sub.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

var errUnknownMember = fmt.Errorf("%w: transfer/postgres: the group's reader does not know the move", cells.ErrUnavailable)
