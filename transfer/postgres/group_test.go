// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/postgres"
)

const noteDDL = "CREATE TABLE note (org text NOT NULL, id int NOT NULL, body text, PRIMARY KEY (org, id))"

var noteTables = []guard.Table{{Name: "note", TenantColumn: "org"}}

func grouped(ctx context.Context) context.Context { return transfer.ContextWithGroup(ctx, "g") }

func groupMove(n int) cells.MoveRef {
	return cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("m%d", n)), Tenant: cells.TenantID(fmt.Sprintf("t%d", n)), Source: "cell-a", Target: "cell-b", Base: 5}
}

func (r *rig) tenantOpen(m cells.MoveRef, at cells.Epoch) {
	r.t.Helper()
	if err := r.guard.OpenFence(r.t.Context(), cells.FenceOrder{Cell: r.id, Tenant: m.Tenant, Epoch: at, Floor: at, Move: m.ID}); err != nil {
		r.t.Fatal(err)
	}
}

// as runs statements that the guard lets pass for several tenants.
func (r *rig) as(tenants string, qs ...string) {
	r.t.Helper()
	tx, err := r.pool.Begin(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	defer tx.Rollback(r.t.Context()) //nolint:errcheck // after a commit
	for _, q := range qs {
		for _, t := range strings.Fields(tenants) {
			if _, err := tx.Exec(r.t.Context(), marker, t); err != nil {
				r.t.Fatal(err)
			}
		}
		if _, err := tx.Exec(r.t.Context(), q); err != nil {
			r.t.Fatalf("%s: %v", q, err)
		}
	}
	if err := tx.Commit(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) count(q string, args ...any) (n int) {
	r.t.Helper()
	if err := r.pool.QueryRow(r.t.Context(), q, args...).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

const (
	countSlots  = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND NOT temporary"
	countTraces = "SELECT (SELECT count(*) FROM pg_replication_slots WHERE database = current_database()) + (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM cell.transfer_capture) + (SELECT count(*) FROM cell.transfer_group)"
)

// reading reads a member's changes until stop is called.
func reading(t *testing.T, s *postgres.Store, ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) (done chan error, stop context.CancelFunc) {
	ctx, stop = context.WithCancel(ctx)
	done = make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { done <- s.Changes(ctx, m, from, yield) })
	t.Cleanup(func() { stop(); wg.Wait() })
	return done, stop
}

// TestGroupStall: a member that takes nothing gets a slot of its own; the group's goes
// on, and the member has missed nothing.
func TestGroupStall(t *testing.T) {
	ctx := t.Context()
	a := newRig(t, "cell-a", noteDDL, noteTables)
	a.store.Stall(16<<10, 10*time.Millisecond)
	var start [2]transfer.Position
	for n := range 2 {
		a.tenantOpen(groupMove(n), 5)
		var err error
		if start[n], err = a.store.Begin(grouped(ctx), groupMove(n)); err != nil {
			t.Fatal(err)
		}
	}
	if n := a.count(countSlots); n != 1 {
		t.Fatalf("%d slots for two members", n)
	}
	reading(t, a.store, ctx, groupMove(1), start[1], func(b transfer.Batch) error { return a.store.Applied(ctx, groupMove(1), b.Upto) })
	n := 0
	write := func() {
		n++
		for _, tenant := range []string{"t0", "t1"} {
			a.as(tenant, fmt.Sprintf("INSERT INTO note SELECT '%s', %d + g, repeat('x', 100) FROM generate_series(1, 100) g", tenant, 1000*n))
		}
	}
	waitFor(t, "the member that stalls to get a slot of its own", func() bool {
		write()
		// The slot is there a moment before the member is said to have it.
		h, err := a.store.Check(ctx, groupMove(1), transfer.Limits{})
		return err == nil && h.Shared == 1 && a.count(countSlots) == 2
	})
	if h, err := a.store.Check(ctx, groupMove(1), transfer.Limits{}); err != nil || h.Shared != 1 {
		t.Errorf("the other: %+v, %v", h, err)
	}
	if h, err := a.store.Check(ctx, groupMove(0), transfer.Limits{}); err != nil || h.Shared != 0 || h.Retained < 16<<10 {
		t.Errorf("the one that stalled: %+v, %v", h, err)
	}
	// It reads from where it was.
	var got int64
	head, err := a.store.Head(ctx, groupMove(0))
	if err != nil {
		t.Fatal(err)
	}
	err = a.store.Changes(ctx, groupMove(0), start[0], func(b transfer.Batch) error {
		if got += b.Count; b.End && b.Upto > head {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) || got != int64(100*n) {
		t.Errorf("%d changes of %d, %v", got, 100*n, err)
	}
	for n := range 2 {
		if err := a.store.Release(ctx, groupMove(n)); err != nil {
			t.Fatal(err)
		}
	}
	if n := a.count("SELECT (SELECT count(*) FROM pg_replication_slots WHERE database = current_database()) + (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM cell.transfer_group)"); n != 0 {
		t.Errorf("%d things are left", n)
	}
}

var errEnough = errors.New("enough")

// change is the next batch with changes: members hear how far the group is in between.
func change(t *testing.T, got chan transfer.Batch) transfer.Batch {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case b := <-got:
			if b.Count > 0 {
				return b
			}
		case <-deadline:
			t.Fatal("no changes")
		}
	}
}

// TestGroupElsewhere: another process of the cell finds the group's slot in use and does
// not take it; it captures alone what is asked of it, and takes over when the first ends.
func TestGroupElsewhere(t *testing.T) {
	ctx := t.Context()
	a := newRig(t, "cell-a", noteDDL, noteTables)
	other := a.open(noteTables)
	var start [3]transfer.Position
	for n := range 2 {
		a.tenantOpen(groupMove(n), 5)
		var err error
		if start[n], err = a.store.Begin(grouped(ctx), groupMove(n)); err != nil {
			t.Fatal(err)
		}
	}
	got := make(chan transfer.Batch, 100)
	done, _ := reading(t, a.store, ctx, groupMove(1), start[1], func(b transfer.Batch) error { got <- b; return nil })
	if err := other.Changes(ctx, groupMove(0), start[0], func(transfer.Batch) error { return nil }); !errors.Is(err, transfer.ErrElsewhere) {
		t.Fatalf("read by two processes: %v", err)
	}
	a.as("t0", "INSERT INTO note VALUES ('t0', 1, 'x')")
	_, stop := reading(t, other, transfer.ContextAlone(ctx), groupMove(0), start[0], func(b transfer.Batch) error { got <- b; return nil })
	if b := change(t, got); b.Count != 1 {
		t.Errorf("read alone: %+v", b)
	}
	stop()
	select {
	case err := <-done:
		t.Fatalf("the group's reader ended: %v", err)
	default:
	}
	a.tenantOpen(groupMove(2), 5)
	var err error
	if start[2], err = other.Begin(grouped(ctx), groupMove(2)); err != nil { // alone, too
		t.Fatal(err)
	}
	if n := a.count(countSlots); n != 3 {
		t.Errorf("%d slots", n)
	}
	if err := a.store.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
	a.as("t1", "INSERT INTO note VALUES ('t1', 1, 'x')")
	_, stop = reading(t, other, ctx, groupMove(1), start[1], func(b transfer.Batch) error { got <- b; return nil })
	if b := change(t, got); b.Count != 1 || !other.Reads() {
		t.Errorf("taken over: %+v", b)
	}
	stop()
	for n := range 3 {
		a.tenantOpen(groupMove(n), 7)
	}
	if err := other.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	if n := a.count(countTraces); n != 0 {
		t.Errorf("%d things are left", n)
	}
}

// TestGroupRowChangesHands: a row that goes from one member to another, or out of the
// group and into it, is deleted at one end and comes whole at the other.
func TestGroupRowChangesHands(t *testing.T) {
	ctx := t.Context()
	a, b := newRig(t, "cell-a", noteDDL, noteTables), newRig(t, "cell-b", noteDDL, noteTables)
	v := agentOf(t, b)
	for n := range 3 { // t2 does not move
		a.tenantOpen(groupMove(n), 5)
		a.as(fmt.Sprintf("t%d", n), fmt.Sprintf("INSERT INTO note SELECT 't%d', 100 * %d + g, repeat(md5(g::text), 400) FROM generate_series(1, 9) g", n, n))
	}
	for n := range 2 {
		if _, err := v.Prepare(grouped(ctx), groupMove(n), a.store, nil); err != nil {
			t.Fatal(err)
		}
	}
	// The guard refuses it; somebody at a prompt may turn that off.
	a.exec("ALTER TABLE note DISABLE TRIGGER USER")
	a.as("t0", "UPDATE note SET org = 't1' WHERE id = 1", "UPDATE note SET org = 't0' WHERE id = 101", "UPDATE note SET org = 't2' WHERE id = 2", "UPDATE note SET org = 't1' WHERE id = 201",
		"UPDATE note SET org = 't1', id = 77 WHERE id = 3")
	for n := range 2 {
		m := groupMove(n)
		if err := a.guard.CloseFence(ctx, cells.FenceOrder{Cell: "cell-a", Tenant: m.Tenant, Epoch: 6, Move: m.ID}); err != nil {
			t.Fatal(err)
		}
		if _, err := v.Finish(ctx, m, a.store, nil); err != nil {
			t.Fatal(err)
		}
		q := "SELECT count(*) FROM note WHERE org = $1"
		if x, y := a.count(q, string(m.Tenant)), b.count(q, string(m.Tenant)); x != y || x == 9 && n == 0 {
			t.Errorf("%s has %d rows at the source, %d at the target", m.Tenant, x, y)
		}
	}
}

// TestGroupCrashes ends joining and leaving at each point where a crash would leave
// something: made again it is found, and a sweep behind the moves' end frees it.
func TestGroupCrashes(t *testing.T) {
	ctx := t.Context()
	errCrash := errors.New("crashed")
	a := newRig(t, "cell-a", noteDDL, noteTables)
	e := cells.Epoch(5)
	for n, point := range []string{"group row", "group members", "group publication", "group slot", "released", "dropped", "group dropped"} {
		for again := range 2 {
			m := groupMove(2*n + again)
			m.Base = e
			a.tenantOpen(m, e)
			crashed := false
			a.store.Faults(func(at string) error {
				if at == point && !crashed {
					crashed = true
					return errCrash
				}
				return nil
			})
			_, err := a.store.Begin(grouped(ctx), m)
			if err == nil {
				err = a.store.Release(ctx, m)
			} else if again == 1 {
				if _, err := a.store.Begin(grouped(ctx), m); err != nil {
					t.Fatalf("%s: begin again: %v", point, err)
				}
				v, err := a.store.View(ctx, m)
				if err != nil {
					t.Fatalf("%s: %v", point, err)
				}
				if err := v.Close(); err != nil {
					t.Fatal(err)
				}
				if h, err := a.store.Check(ctx, m, transfer.Limits{}); err != nil || h.Shared != 1 {
					t.Errorf("%s: begun again: %+v, %v", point, h, err)
				}
			}
			if !errors.Is(err, errCrash) {
				t.Fatalf("%s: %v", point, err)
			}
			a.store.Faults(nil)
			if a.count(countTraces) == 0 {
				t.Fatalf("%s: the crash has left nothing to sweep", point)
			}
			a.tenantOpen(m, m.OpenEpoch())
			if err := a.store.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			if n := a.count(countTraces); n != 0 {
				t.Errorf("%s, again %d: %d things are left", point, again, n)
			}
		}
	}
}

// TestGroupCampaign moves many small tenants, some at once, as a campaign does.
func TestGroupCampaign(t *testing.T) {
	ctx := t.Context()
	a, b := newRig(t, "cell-a", noteDDL, noteTables), newRig(t, "cell-b", noteDDL, noteTables)
	const tenants, atOnce = 50, 8
	for n := range tenants {
		a.tenantOpen(groupMove(n), 5)
		a.as(fmt.Sprintf("t%d", n), fmt.Sprintf("INSERT INTO note SELECT 't%d', g, 'x' FROM generate_series(1, 20) g", n))
	}
	v := agentOf(t, b)
	var most, next int
	var mu sync.Mutex // guards most and next
	look := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		most = max(most, n)
	}
	move := func(m cells.MoveRef) error {
		if _, err := v.Prepare(grouped(ctx), m, a.store, nil); err != nil {
			return err
		}
		var slots int
		if err := a.pool.QueryRow(ctx, countSlots).Scan(&slots); err != nil {
			return err
		}
		look(slots)
		if err := a.guard.CloseFence(ctx, cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.CloseEpoch(), Move: m.ID}); err != nil {
			return err
		}
		if _, err := v.Finish(ctx, m, a.store, nil); err != nil {
			return err
		}
		if err := b.guard.OpenFence(ctx, cells.FenceOrder{Cell: m.Target, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}); err != nil {
			return err
		}
		return transferDiscard(ctx, a.store, m)
	}
	begun := time.Now()
	errs := make([]error, atOnce)
	var wg sync.WaitGroup
	for w := range atOnce {
		wg.Go(func() {
			for {
				mu.Lock()
				n := next
				next++
				mu.Unlock()
				if n >= tenants || errs[w] != nil {
					return
				}
				errs[w] = move(groupMove(n))
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Logf("%.1f moves a second", tenants/time.Since(begun).Seconds())
	if most != 1 {
		t.Errorf("%d slots at once for one pair of cells", most)
	}
	if n := b.count("SELECT count(*) FROM note"); n != 20*tenants {
		t.Errorf("%d rows arrived", n)
	}
	if err := b.store.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*rig{a, b} {
		waitFor(t, "nothing left of the campaign", func() bool { return r.count(countTraces) == 0 })
	}
}

func transferDiscard(ctx context.Context, s *postgres.Store, m cells.MoveRef) error {
	return s.Discard(ctx, m.Tenant, cells.Residue{Cell: m.Source, Epoch: m.CloseEpoch(), Move: m.ID}, transfer.RemoveOptions{BatchRows: 1000})
}
