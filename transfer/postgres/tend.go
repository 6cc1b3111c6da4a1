// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// errLingered ends a hub that nobody reads from.
var errLingered = fmt.Errorf("%w: transfer/postgres: nobody reads for the group", cells.ErrUnavailable)

// hub returns the hub of a group in this process, or nil.
func (s *Store) hub(id string) *hub {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hubs[id]
}

// hubOf returns the hub that has the move, or nil.
func (s *Store) hubOf(move cells.MoveID) *hub {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.hubs {
		if h.has(move) {
			return h
		}
	}
	return nil
}

func (h *hub) has(move cells.MoveID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.members[move] != nil
}

// ended forgets a hub.
func (s *Store) ended(h *hub) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hubs[h.id] == h {
		delete(s.hubs, h.id)
	}
}

// renamed follows an undo that has adopted a member's capture.
func (s *Store) renamed(id string, from, to cells.MoveID) {
	h := s.hub(id)
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if sh := h.members[from]; sh != nil {
		delete(h.members, from)
		if sh.sub != nil {
			sh.sub.cancel(errTaken)
		}
		sh.move, h.members[to] = to, sh
		h.version++
	}
}

// together yields a member's changes from the hub of its group.
func (s *Store) together(ctx context.Context, c captured, m cells.MoveRef, from, upto pglogrepl.LSN, yield func(transfer.Batch) error) error {
	for try := 0; ; try++ {
		h := s.hub(c.group)
		if h == nil {
			conn, err := s.pool.Acquire(ctx)
			if err != nil {
				return translate(err)
			}
			err = holding(ctx, conn, groupLock(c.group), func() (err error) {
				h, err = s.openHub(ctx, conn, c.group, m.Source)
				return err
			})
			conn.Release()
			if err != nil {
				return translate(err)
			}
		}
		err := h.follow(ctx, m.ID, from, upto, yield)
		if !errors.Is(err, errUnknownMember) {
			return err
		}
		if try > 0 {
			now, cerr := s.capture(ctx, s.pool, m.ID)
			if cerr == nil && (!now.known || now.released) {
				return fmt.Errorf("%w: transfer/postgres: changes of move %s are not captured here (any more)", transfer.ErrCaptureLost, m.ID)
			}
			return errors.Join(err, translate(cerr))
		}
		if err := h.refresh(ctx); err != nil {
			return err
		}
	}
}

// member is a row of a group.
type member struct {
	Move, Tenant, Start, Applied string
	Role                         int
}

func (m member) acked() (at pglogrepl.LSN, joining bool, err error) {
	start, err := pglogrepl.ParseLSN(m.Start)
	if err != nil {
		return 0, false, err
	}
	applied, err := pglogrepl.ParseLSN(m.Applied)
	return max(start, applied), start == 0, err
}

func (s *Store) members(ctx context.Context, q querier, id string) ([]member, error) {
	rows, err := q.Query(ctx, s.q("SELECT move, tenant, start::text, applied::text, role FROM @s.transfer_capture WHERE grp = $1 AND NOT released AND ended = '' AND NOT alone"), id)
	if err != nil {
		return nil, translate(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowToStructByPos[member])
	return out, translate(err)
}

// openHub begins to read for a group, or returns the hub that does. The group's lock is
// held: who joins meanwhile in another process sees the slot in use, or is seen here.
func (s *Store) openHub(ctx context.Context, conn *pgxpool.Conn, id string, source cells.CellID) (*hub, error) {
	if h := s.hub(id); h != nil {
		return h, nil
	}
	cat, err := s.load(ctx, conn)
	if err != nil {
		return nil, err
	}
	all, err := s.members(ctx, conn, id)
	if err != nil {
		return nil, err
	}
	name := s.groupName(id)
	h := &hub{s: s, id: id, done: make(chan struct{}), members: map[cells.MoveID]*sharer{}, tenants: map[string]*sharer{}, used: time.Now(),
		r: &reader{s: s, slot: name, publication: name, source: source, cat: cat}}
	h.r.outlet = h
	for _, m := range all {
		at, joining, err := m.acked()
		if err != nil {
			return nil, err
		}
		h.add(&sharer{move: cells.MoveID(m.Move), tenant: m.Tenant, back: m.Role != roleMove, joining: joining, acked: at, stored: at, base: at, want: at})
	}
	if err := h.r.open(ctx, h.floor(), false); err != nil {
		return nil, err
	}
	hctx, cancel := context.WithCancelCause(context.Background())
	h.cancel = cancel
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		cancel(nil)
		hangUp(h.r.conn)
		return nil, cells.ErrClosed
	}
	s.hubs[id] = h
	s.wg.Go(func() {
		defer cancel(nil)
		h.run(hctx)
	})
	s.wg.Go(h.tend)
	return h, nil
}

// hold makes moves known that join, before it is known where they begin.
func (h *hub) hold(in []*joiner) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, j := range in {
		h.drop(j.m.ID, errTaken)
		h.add(&sharer{move: j.m.ID, tenant: string(j.m.Tenant), joining: true, local: true})
	}
}

// joined says where moves begin that were held; 0: they do not.
func (h *hub) joined(moves []cells.MoveID, at pglogrepl.LSN) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range moves {
		sh := h.members[m]
		if sh == nil {
			continue
		}
		if at == 0 {
			h.drop(m, errTaken)
			continue
		}
		n := 0
		for n < len(sh.q) && sh.q[n].final < at {
			n++
		}
		sh.next = n
		sh.trim(n)
		sh.joining, sh.local = false, false
		sh.acked, sh.stored, sh.ackedAt, sh.base, sh.want = at, at, time.Now(), at, max(sh.want, at)
		h.version++
	}
}

// leave forgets a member that is captured no more, or alone.
func (h *hub) leave(move cells.MoveID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(move, errTaken)
}

// refresh reads who the members are: other processes change them, too.
func (h *hub) refresh(ctx context.Context) error {
	h.mu.Lock()
	version := h.version
	h.mu.Unlock()
	all, err := h.s.members(ctx, h.s.pool, h.id)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.version != version {
		return nil
	}
	there := map[cells.MoveID]bool{}
	for _, m := range all {
		at, joining, err := m.acked()
		if err != nil {
			return err
		}
		move := cells.MoveID(m.Move)
		there[move] = true
		sh := h.members[move]
		if sh == nil {
			// What it needs may have been read already: it is read for anew.
			sh = &sharer{move: move, tenant: m.Tenant, joining: joining, acked: at, stored: at, cold: true}
			h.add(sh)
		}
		if sh.back = m.Role != roleMove; sh.joining && !sh.local && !joining {
			sh.joining, sh.acked, sh.stored, sh.ackedAt, sh.cold = false, at, at, time.Now(), true
		}
	}
	for move, sh := range h.members {
		if !there[move] && !sh.local {
			h.drop(move, errTaken)
		}
	}
	return nil
}

// detach gives a member a slot of its own, so that it holds up nobody. mu is held.
func (h *hub) detach(sh *sharer) {
	sh.leaving, sh.tried = true, time.Now()
	move := sh.move
	h.s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := h.s.detach(ctx, h.id, move); err != nil {
			// No slot is free, perhaps: it stays, and is tried again.
			h.mu.Lock()
			sh.leaving = false
			h.mu.Unlock()
		}
	})
}

// tend looks after the members until the hub ends.
func (h *hub) tend() {
	t := time.NewTicker(hubEvery)
	defer t.Stop()
	for n := 1; ; n++ {
		select {
		case <-h.done:
			h.store()
			return
		case <-t.C:
		}
		h.store()
		if n%refreshEvery == 0 {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			_ = h.refresh(ctx) // tried again
			cancel()
		}
		h.look(time.Now())
	}
}

// store writes down what members have applied, for who reads next.
func (h *hub) store() {
	var moves, at []string
	h.mu.Lock()
	for _, sh := range h.members {
		if sh.acked > sh.stored {
			moves, at = append(moves, string(sh.move)), append(at, sh.acked.String())
			sh.stored = sh.acked
		}
	}
	h.mu.Unlock()
	if len(moves) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	// A value that is lost here comes again with the next, or is told by a later one.
	_, _ = h.s.pool.Exec(ctx, h.s.q("UPDATE @s.transfer_capture c SET applied = v.at::pg_lsn FROM unnest($1::text[], $2::text[]) AS v(move, at) WHERE c.move = v.move AND c.applied < v.at::pg_lsn"), moves, at)
}

// look finds members that are idle, that hold up the others, or that nobody reads for.
func (h *hub) look(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	reading := false
	var bytes int64
	var largest *sharer
	var ahead pglogrepl.LSN // the member that is furthest
	for _, sh := range h.members {
		ahead = max(ahead, sh.acked)
	}
	for _, sh := range h.members {
		bytes += sh.bytes
		if sh.sub != nil {
			reading = true
			if sh.sub.upto == 0 && h.pos > sh.sub.at {
				sh.sub.kick()
			}
		} else if largest == nil || sh.bytes > largest.bytes {
			largest = sh
		}
		patience := h.s.stall.move
		if sh.back {
			patience = h.s.stall.back
		}
		if !sh.joining && !sh.leaving && uint64(ahead-sh.acked) > h.s.stall.bytes && now.Sub(sh.ackedAt) > patience && now.Sub(sh.tried) > patience {
			h.detach(sh)
		}
	}
	if bytes > hubBytes && largest != nil {
		largest.chill()
	}
	if !reading && now.Sub(h.used) > hubLinger {
		h.cancel(errLingered)
	}
}
