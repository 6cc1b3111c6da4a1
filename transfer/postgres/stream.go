// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

const (
	// statusEvery is how often the server hears of this reader. It gives up on one that
	// is silent for wal_sender_timeout (a minute by default).
	statusEvery = 5 * time.Second
	// receiveStep bounds how long an acknowledgement waits for the server to speak.
	receiveStep = time.Second
)

// stream is the one reader of a move's slot in this process.
type stream struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
	acked  atomic.Uint64
}

func (st *stream) ack(l pglogrepl.LSN) {
	for {
		old := st.acked.Load()
		if uint64(l) <= old || st.acked.CompareAndSwap(old, uint64(l)) {
			return
		}
	}
}

var errTaken = fmt.Errorf("%w: transfer/postgres: another reader of the changes has begun", cells.ErrUnavailable)

// take ends the move's reader in this process, and puts st in its place.
func (s *Store) take(move cells.MoveID, st *stream) {
	for {
		s.mu.Lock()
		old := s.streams[move]
		if old == nil {
			if st != nil {
				s.streams[move] = st
			}
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		old.cancel(errTaken)
		<-old.done
	}
}

func (s *Store) leave(move cells.MoveID, st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[move] == st {
		delete(s.streams, move)
	}
}

// Changes implements transfer.Source.
func (s *Store) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	return s.changes(ctx, m, from, 0, yield)
}

// changes yields changes of the move: until ctx ends, or, if upto is set, until all
// transactions that committed before upto were yielded.
func (s *Store) changes(ctx context.Context, m cells.MoveRef, from transfer.Position, upto pglogrepl.LSN, yield func(transfer.Batch) error) error {
	start, err := lsnOf(from)
	if err != nil {
		return err
	}
	cat, err := s.capturedTables(ctx, s.pool, m)
	if err != nil {
		return err
	}
	c, err := s.capture(ctx, s.pool, m.ID)
	if err != nil {
		return translate(err)
	}
	if c.together() {
		err = s.together(ctx, c, m, start, upto, yield)
		if !errors.Is(err, transfer.ErrElsewhere) || upto == 0 && !transfer.Alone(ctx) {
			return err
		}
		if err := s.detach(ctx, c.group, m.ID); err != nil {
			return err
		}
		if c, err = s.capture(ctx, s.pool, m.ID); err != nil {
			return translate(err)
		}
	}
	return s.apart(ctx, c, m, cat, start, upto, yield)
}

// apart yields changes from a slot that only the move has.
func (s *Store) apart(ctx context.Context, c captured, m cells.MoveRef, cat *catalog, start, upto pglogrepl.LSN, yield func(transfer.Batch) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	st := &stream{cancel: cancel, done: make(chan struct{})}
	st.ack(start)
	s.take(m.ID, st)
	r := &reader{s: s, slot: c.name, publication: c.publication(), source: m.Source, cat: cat}
	l := &lone{r: r, st: st, move: m.ID, upto: upto, out: make(chan transfer.Batch, 256)}
	if r.outlet = l; c.group != "" {
		l.tenant = string(m.Tenant)
	}
	var readErr error
	go func() {
		defer close(st.done)
		defer s.leave(m.ID, st)
		defer close(l.out)
		if readErr = r.open(ctx, start, true); readErr != nil {
			return
		}
		if readErr = r.read(ctx); errors.Is(readErr, errReached) {
			readErr = l.put(ctx, transfer.Batch{Upto: positionOf(upto), End: true})
		}
	}()
	err := deliver(l.out, yield)
	cancel(err)
	<-st.done
	if err == nil {
		err = readErr
	}
	if cause := context.Cause(ctx); err != nil && cause != nil && errors.Is(err, context.Canceled) {
		err = cause
	}
	return err
}

// deliver yields what comes, several transactions in one batch when they are waiting.
func deliver(in <-chan transfer.Batch, yield func(transfer.Batch) error) error {
	var next *transfer.Batch
	for {
		var b transfer.Batch
		if next != nil {
			b, next = *next, nil
		} else {
			var ok bool
			if b, ok = <-in; !ok {
				return nil
			}
		}
	merge:
		for b.End && len(b.Data) < transfer.BatchBytes {
			select {
			case n, ok := <-in:
				if !ok {
					break merge
				}
				if !n.End || len(b.Data)+len(n.Data) > 2*transfer.BatchBytes {
					next = &n
					break merge
				}
				b.Data, b.Count, b.Upto = append(b.Data, n.Data...), b.Count+n.Count, n.Upto
			default:
				break merge
			}
		}
		if err := yield(b); err != nil {
			return err
		}
	}
}

// lone is where the changes of one move go.
type lone struct {
	part
	r    *reader
	st   *stream
	move cells.MoveID
	// tenant is set if others' changes come too.
	tenant  string
	upto    pglogrepl.LSN
	out     chan transfer.Batch
	message bool // the transaction carries this move's message
}

func (l *lone) acked() pglogrepl.LSN { return pglogrepl.LSN(l.st.acked.Load()) }

func (l *lone) begin(final pglogrepl.LSN) error {
	if l.upto != 0 && final >= l.upto {
		return errReached
	}
	l.message = false
	return nil
}

func (l *lone) pick(t *table, tenant []byte) *part {
	if l.tenant != "" && t.tenantKey(string(tenant)) != t.tenantKey(l.tenant) {
		return nil
	}
	return &l.part
}

func (l *lone) note(move string) { l.message = l.message || move == string(l.move) }

func (l *lone) broken(_ *part, err error) error { return err }

func (l *lone) emit(ctx context.Context, p *part) error {
	return l.put(ctx, p.take())
}

func (l *lone) commit(ctx context.Context, end pglogrepl.LSN) error {
	if l.count == 0 && !l.message {
		return nil
	}
	b := l.take()
	b.Upto, b.End = positionOf(end), true
	return l.put(ctx, b)
}

func (l *lone) reached(at pglogrepl.LSN) error {
	if l.upto != 0 && at >= l.upto {
		return errReached
	}
	return nil
}

// put hands a batch over, and goes on telling the server while it waits.
func (l *lone) put(ctx context.Context, b transfer.Batch) error {
	select {
	case l.out <- b:
		return nil
	default:
	}
	t := time.NewTicker(statusEvery)
	defer t.Stop()
	for {
		select {
		case l.out <- b:
			return nil
		case <-t.C:
			if err := l.r.status(ctx, true); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
