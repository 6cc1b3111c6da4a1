// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// groupMax bounds the members of a group that are captured at the same time: they are
// listed in the publication's row filters.
const groupMax = 500

// gatherJoins is how long a move that joins a running group waits for others to join with it.
const gatherJoins = 60 * time.Millisecond

// errApart: the move cannot join its group and is captured alone.
var errApart = errors.New("transfer/postgres: not together")

// groupID is the key of a group's row: one id serves all pairs of cells.
func groupID(g transfer.GroupID, m cells.MoveRef) string {
	return strings.Join([]string{string(g), string(m.Source), string(m.Target)}, " ")
}

// groupName is the name of a group's slot and publication.
func (s *Store) groupName(id string) string {
	sum := sha256.Sum256([]byte(s.pool.Config().ConnConfig.Database + "\x00" + id))
	return "cell_group_" + hex.EncodeToString(sum[:10])
}

func groupLock(id string) string { return "cell transfer group " + id }

// queue are the moves that wait to join a group in this process.
type queue struct {
	turn    chan struct{} // held by who lets all of them in
	waiting []*joiner     // guarded by Store.mu
}

// joiner is a move that joins.
type joiner struct {
	m     cells.MoveRef
	cat   *catalog
	shape string
	view  bool // a view follows
	done  chan struct{}
	at    pglogrepl.LSN
	err   error
}

// join captures the move by its group's slot. Moves that wait for one another join
// together: the publication is altered once and one snapshot is made, which is exported
// for all their first views.
func (s *Store) join(ctx context.Context, conn *pgxpool.Conn, g transfer.GroupID, m cells.MoveRef, cat *catalog, shape string) (transfer.Position, error) {
	if err := g.Validate(); err != nil {
		return "", err
	}
	id := groupID(g, m)
	j := &joiner{m: m, cat: cat, shape: shape, view: !transfer.Viewless(ctx), done: make(chan struct{})}
	s.mu.Lock()
	q := s.joins[id]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1)}
		s.joins[id] = q
	}
	q.waiting = append(q.waiting, j)
	s.mu.Unlock()
	select {
	case <-j.done:
		return positionOf(j.at), j.err
	case <-ctx.Done():
		s.mu.Lock()
		q.waiting = slices.DeleteFunc(q.waiting, func(o *joiner) bool { return o == j })
		s.mu.Unlock()
		return "", context.Cause(ctx)
	case q.turn <- struct{}{}:
		defer func() { <-q.turn }()
	}
	if s.hub(id) != nil {
		// Others are on their way: what is made for one serves all who come in a moment.
		t := time.NewTimer(gatherJoins)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			// The next in the queue makes the snapshot, unless somebody has it.
			s.mu.Lock()
			mine := slices.Contains(q.waiting, j)
			q.waiting = slices.DeleteFunc(q.waiting, func(o *joiner) bool { return o == j })
			s.mu.Unlock()
			if mine {
				return "", context.Cause(ctx)
			}
		}
	}
	s.mu.Lock()
	var all []*joiner
	if slices.Contains(q.waiting, j) {
		all, q.waiting = q.waiting, nil
	}
	s.mu.Unlock()
	if all == nil { // somebody has let it in meanwhile
		<-j.done
		return positionOf(j.at), j.err
	}
	err := s.letIn(ctx, conn, id, all)
	for _, o := range all {
		if o.err == nil && err != nil {
			if o.err = err; o != j && ctx.Err() != nil {
				o.err = fmt.Errorf("%w: transfer/postgres: who made the group's snapshot gave up", cells.ErrUnavailable)
			}
		}
		close(o.done)
	}
	return positionOf(j.at), j.err
}

// letIn makes moves members of a group. The rows come first: whatever a crash leaves is
// found by them.
//
// A member begins at the consistent point of a slot that is made after the publication
// has been altered: making it waits for every transaction that was open, and so might
// have been decoded with the filter of before.
func (s *Store) letIn(ctx context.Context, conn *pgxpool.Conn, id string, all []*joiner) error {
	return holding(ctx, conn, groupLock(id), func() error {
		name := s.groupName(id)
		if _, err := conn.Exec(ctx, s.q("INSERT INTO @s.transfer_group (id, name) VALUES ($1, $2) ON CONFLICT DO NOTHING"), id, name); err != nil {
			return err
		}
		if err := s.fault("group row"); err != nil {
			return err
		}
		in, tenants, err := s.room(ctx, conn, id, name, all)
		if err != nil || len(in) == 0 {
			return err
		}
		moves := make([]cells.MoveID, len(in))
		ids := make([]string, len(in))
		for i, j := range in {
			moves[i], ids[i] = j.m.ID, string(j.m.ID)
			if _, err := conn.Exec(ctx, s.q("INSERT INTO @s.transfer_capture AS c (move, tenant, base, start, shape, grp) VALUES ($1, $2, $3, '0/0', $4, $5) "+
				"ON CONFLICT (move) DO UPDATE SET grp = $5, alone = false, objects = '', shape = EXCLUDED.shape"), ids[i], string(j.m.Tenant), int64(j.m.Base), j.shape, id); err != nil {
				return err
			}
		}
		if err := s.fault("group members"); err != nil {
			return err
		}
		h := s.hub(id)
		if h != nil {
			// From here on nothing is forgotten that they may need.
			h.hold(in)
		}
		e, err := s.begin(ctx, conn, name, in[0].cat, tenants)
		if err == nil {
			err = s.fault("group slot")
			if err == nil {
				_, err = conn.Exec(ctx, s.q("UPDATE @s.transfer_capture SET start = $2::pg_lsn WHERE move = ANY ($1)"), ids, e.at.String())
			}
			if err != nil {
				hangUp(e.repl)
			}
		}
		if h != nil {
			at := pglogrepl.LSN(0)
			if err == nil {
				at = e.at
			}
			h.joined(moves, at)
		}
		if err != nil {
			return err
		}
		var viewers []cells.MoveID
		for _, j := range in {
			if j.at = e.at; j.view {
				viewers = append(viewers, j.m.ID)
			}
		}
		s.share(e, viewers)
		if h == nil {
			// Now, so that members do not wait for those that join next. Who reads tries again.
			_, _ = s.openHub(ctx, conn, id, in[0].m.Source)
		}
		return nil
	})
}

// room decides who can join, and returns the tenants that are published then. The rest
// get errApart.
func (s *Store) room(ctx context.Context, conn *pgxpool.Conn, id, name string, all []*joiner) (in []*joiner, tenants []string, err error) {
	apart := func(why string, js []*joiner) {
		for _, j := range js {
			j.err = fmt.Errorf("%w: %s", errApart, why)
		}
	}
	rows, err := conn.Query(ctx, s.q("SELECT move, tenant, start <> '0/0' AND NOT alone FROM @s.transfer_capture WHERE grp = $1 AND NOT released AND ended = ''"), id)
	if err != nil {
		return nil, nil, err
	}
	type known struct {
		Move, Tenant string
		Reads        bool
	}
	members, err := pgx.CollectRows(rows, pgx.RowToStructByPos[known])
	if err != nil {
		return nil, nil, err
	}
	var there, good bool
	var pid int64
	if err := conn.QueryRow(ctx, "SELECT count(*) > 0, coalesce(bool_and(wal_status IS DISTINCT FROM 'lost'), false), coalesce(max(active_pid), 0) FROM pg_replication_slots WHERE slot_name = $1", name).
		Scan(&there, &good, &pid); err != nil {
		return nil, nil, err
	}
	of := map[string]string{} // the move of a tenant
	reads := false
	for _, k := range members {
		of[k.Tenant] = k.Move
		reads = reads || k.Reads
		tenants = append(tenants, k.Tenant)
	}
	switch {
	case reads && !(there && good):
		apart("the group's slot is gone", all)
		return nil, nil, nil
	case pid != 0 && s.hub(id) == nil:
		apart("another process reads for the group", all)
		return nil, nil, nil
	}
	if there && !reads {
		// Left by a crash, or lost with nobody in it.
		if err := s.dropSlot(ctx, conn, name); err != nil {
			return nil, nil, err
		}
	}
	n := len(members)
	for _, j := range all {
		t := string(j.m.Tenant)
		switch other, ok := of[t]; {
		case ok && other != string(j.m.ID):
			apart("the tenant is captured for another move", []*joiner{j})
		case !ok && n >= groupMax:
			apart("the group is full", []*joiner{j})
		default:
			if !ok {
				of[t] = string(j.m.ID)
				tenants = append(tenants, t)
				n++
			}
			in = append(in, j)
		}
	}
	return in, tenants, nil
}

// begin publishes the tenants and exports a snapshot behind that: of the group's slot if
// there is none yet, otherwise of a temporary one.
func (s *Store) begin(ctx context.Context, conn *pgxpool.Conn, name string, c *catalog, tenants []string) (*exported, error) {
	values := list(tenants, ", ", func(_ int, t string) string { return literal(t) })
	tables := make([]string, len(c.tables))
	for i, t := range c.tables {
		tables[i] = fmt.Sprintf("TABLE %s WHERE (%s IN (%s))", t.sql(), ident(t.TenantColumn), values)
	}
	var there, published bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1), EXISTS (SELECT FROM pg_publication WHERE pubname = $1)", name).Scan(&there, &published); err != nil {
		return nil, err
	}
	var err error
	if published {
		_, err = conn.Exec(ctx, fmt.Sprintf("ALTER PUBLICATION %s SET %s", ident(name), strings.Join(tables, ", ")))
	} else {
		_, err = conn.Exec(ctx, fmt.Sprintf("CREATE PUBLICATION %s FOR %s WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = true)", ident(name), strings.Join(tables, ", ")))
	}
	if err == nil {
		err = s.fault("group publication")
	}
	if err != nil {
		return nil, err
	}
	if there {
		return s.export(ctx, viewName(name), true)
	}
	return s.export(ctx, name, false)
}

// parted ends the group behind its last member. The move is one no more.
func (s *Store) parted(ctx context.Context, conn *pgxpool.Conn, id string, move cells.MoveID) error {
	s.unshare(move)
	if h := s.hub(id); h != nil {
		h.leave(move)
	}
	// While there are others the last of them ends the group: each of them is out of it
	// before it looks here, so that one sees nobody. Who joins holds the lock for long.
	live, err := s.live(ctx, conn, id)
	if err != nil || live {
		return err
	}
	return holding(ctx, conn, groupLock(id), func() error { return s.endGroup(ctx, conn, id) })
}

// live reports whether anything is captured for a group.
func (s *Store) live(ctx context.Context, conn *pgxpool.Conn, id string) (live bool, err error) {
	err = conn.QueryRow(ctx, s.q("SELECT EXISTS (SELECT FROM @s.transfer_capture WHERE grp = $1 AND NOT released AND ended = '')"), id).Scan(&live)
	return live, err
}

// endGroup removes what a group has if nothing of it is captured any more. The group's
// lock is held.
func (s *Store) endGroup(ctx context.Context, conn *pgxpool.Conn, id string) error {
	if live, err := s.live(ctx, conn, id); err != nil || live {
		return err
	}
	if h := s.hub(id); h != nil {
		h.cancel(errTaken)
		select {
		case <-h.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	name := s.groupName(id)
	if err := s.dropSlot(ctx, conn, name); err != nil {
		return err
	}
	if err := s.fault("group dropped"); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "DROP PUBLICATION IF EXISTS "+ident(name)); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, s.q("DELETE FROM @s.transfer_group WHERE id = $1"), id)
	return err
}

// sweepGroups ends the groups that a crash has left without a member.
func (s *Store) sweepGroups(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, s.q("SELECT id FROM @s.transfer_group g WHERE NOT EXISTS (SELECT FROM @s.transfer_capture c WHERE c.grp = g.id AND NOT c.released AND c.ended = '')"))
	if err != nil {
		return translate(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(all) == 0 {
		return translate(err)
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return translate(err)
	}
	defer conn.Release()
	for _, id := range all {
		err = errors.Join(err, translate(holding(ctx, conn, groupLock(id), func() error { return s.endGroup(ctx, conn, id) })))
	}
	return err
}

// detach gives a member a slot of its own, which begins where the group's is.
func (s *Store) detach(ctx context.Context, id string, move cells.MoveID) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return translate(err)
	}
	defer conn.Release()
	err = holding(ctx, conn, groupLock(id), func() error {
		c, err := s.capture(ctx, conn, move)
		if err != nil || !c.together() || c.released || c.ended != "" {
			return err
		}
		// What the group's slot has forgotten, the member has applied.
		_, err = conn.Exec(ctx, "SELECT pg_copy_logical_replication_slot($1, $2, false)", c.name, s.objectName(move))
		switch sqlState(err) {
		case stateExists: // of a crash; it begins earlier
		case stateUndefined, stateNotReady:
			return fmt.Errorf("%w: transfer/postgres: the slot of the group of move %s cannot be copied: %w", transfer.ErrCaptureLost, move, err)
		default:
			if err != nil {
				return err
			}
		}
		if err := s.fault("copied"); err != nil {
			return err
		}
		_, err = conn.Exec(ctx, s.q("UPDATE @s.transfer_capture SET alone = true, objects = $2 WHERE move = $1"), string(move), s.objectName(move))
		return err
	})
	if err != nil {
		return translate(err)
	}
	if h := s.hub(id); h != nil {
		h.leave(move)
	}
	return nil
}
