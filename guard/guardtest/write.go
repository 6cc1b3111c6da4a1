// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// testProtected: the store refuses writes that the transaction is not admitted
// for, whatever statement makes them.
func testProtected(e *env, iso string) {
	if e.h.Unprotected {
		return
	}
	mine, other := newTenant(), newTenant()
	e.open(mine, 1)
	e.open(other, 1)
	for _, t := range []cells.TenantID{mine, other} {
		e.must(e.a.InTx(e.as(t, 1), iso, func(ctx context.Context, tx Tx) error {
			if _, err := tx.Emit(ctx, "put", "k"); err != nil {
				return err
			}
			return put(ctx, tx, t, "k", "v")
		}), "write")
	}
	before := e.state(mine) + e.state(other)
	outbox := e.a.MovedTables()[0].Name
	published := e.a.MovedTables()[1].Name
	statements := []struct {
		sql  string
		args []any
	}{
		{`INSERT INTO guardtest_rows VALUES ($1, 'new', 'v')`, []any{string(other)}},
		{`UPDATE guardtest_rows SET value = 'w' WHERE tenant = $1`, []any{string(other)}},
		{`UPDATE guardtest_rows SET tenant = $2, key = 'moved' WHERE tenant = $1`, []any{string(other), string(mine)}},
		{`DELETE FROM guardtest_rows WHERE tenant = $1`, []any{string(other)}},
		{`INSERT INTO guardtest_rows VALUES ($1, 'k', 'w') ON CONFLICT (tenant, key) DO UPDATE SET value = excluded.value`, []any{string(other)}},
		{`TRUNCATE guardtest_rows`, nil},
		{`DELETE FROM ` + outbox + ` WHERE tenant = $1`, []any{string(other)}},
		{`UPDATE ` + outbox + ` SET event_seq = event_seq + 10 WHERE tenant = $1`, []any{string(other)}},
		{`INSERT INTO ` + published + ` VALUES ($1, 7)`, []any{string(other)}},
		{`TRUNCATE ` + outbox, nil},
	}
	foreign := []struct {
		sql  string
		args []any
	}{
		{`UPDATE guardtest_rows SET tenant = $2, key = 'moved' WHERE tenant = $1`, []any{string(mine), string(other)}},
	}
	for _, admitted := range []bool{false, true} {
		list := statements
		if admitted {
			list = append(slices.Clone(statements), foreign...)
		}
		for _, s := range list {
			tx := e.begin(e.a, iso)
			if admitted {
				e.must(tx.Admit(e.ctx, mine, 1), "admit")
			}
			err := tx.Exec(e.ctx, s.sql, s.args...)
			if err == nil {
				err = tx.Commit(e.ctx)
			}
			tx.Rollback()
			e.wantErr(err, cells.ErrFenced, "admitted %t: %s", admitted, s.sql)
		}
	}
	if after := e.state(mine) + e.state(other); after != before {
		e.Errorf("refused statements changed %s to %s", before, after)
	}
	tx := e.begin(e.a, iso)
	defer tx.Rollback()
	_, err := tx.Emit(e.ctx, "put", "k")
	e.wantErr(err, cells.ErrFenced, "emit without an admission")
}

// testImports: rows are imported and removed while the fence is closed at exactly
// one epoch, by one move.
func testImports(e *env, iso string) {
	tenant := newTenant()
	load := func(p Process, epoch cells.Epoch, move cells.MoveID, key string) error {
		tx := e.begin(p, iso)
		defer tx.Rollback()
		if err := tx.AdmitClosed(e.ctx, tenant, epoch, move); err != nil {
			return err
		}
		if err := put(e.ctx, tx, tenant, key, "v"); err != nil {
			return err
		}
		return tx.Commit(e.ctx)
	}
	e.wantErr(load(e.a, 2, "m", "k"), cells.ErrStaleOrder, "an import without a fence")
	e.open(tenant, 1)
	e.wantErr(load(e.a, 1, "m", "k"), cells.ErrStaleOrder, "an import while open")
	e.close(tenant, 4)
	e.must(load(e.a, 4, "m", "k"), "an import by the move")
	e.wantErr(load(e.a, 4, "other", "k"), cells.ErrStaleOrder, "an import by another move")
	e.wantErr(load(e.a, 3, "m", "k"), cells.ErrStaleOrder, "an import at a lower epoch")
	e.wantErr(load(e.a, 5, "m", "k"), cells.ErrStaleOrder, "an import at a higher epoch")
	e.must(load(e.a, 4, "", "k2"), "a removal, by whichever move")

	// An import that is under way holds the opening up.
	tx := e.begin(e.a, iso)
	defer tx.Rollback()
	e.must(tx.AdmitClosed(e.ctx, tenant, 4, "m"), "import")
	e.must(put(e.ctx, tx, tenant, "k3", "v"), "import a row")
	var atOpen string
	opening := async(func() error {
		err := e.b.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 5, Floor: 5, Move: "m"})
		if err == nil {
			atOpen = e.state(tenant)
		}
		return err
	})
	if opening.ended(blocked) {
		e.Errorf("open did not wait for an import: %v", opening.err)
	}
	e.must(tx.Commit(e.ctx), "commit of the import")
	e.must(opening.wait(e, "open"), "open")
	e.wantErr(load(e.a, 4, "m", "late"), cells.ErrStaleOrder, "an import by a driver that slept")
	e.wantErr(load(e.a, 4, "", "late"), cells.ErrStaleOrder, "a removal by a driver that slept")
	e.wantErr(load(e.a, 5, "m", "late"), cells.ErrStaleOrder, "an import at the epoch that is open")
	e.wantErr(load(e.a, 5, "", "late"), cells.ErrStaleOrder, "a removal at the epoch that is open")
	if now := e.state(tenant); now != atOpen {
		e.Errorf("when open returned there was %s, now there is %s", atOpen, now)
	}

	// A driver that slept with an old snapshot.
	other := newTenant()
	tenant = other
	e.close(tenant, 2)
	late := e.begin(e.a, iso)
	defer late.Rollback()
	e.must(late.Read(e.ctx), "read")
	opened := async(func() error {
		return e.b.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 3, Floor: 3})
	})
	if opened.ended(5 * blocked) {
		e.must(opened.err, "open")
		err := late.AdmitClosed(e.ctx, tenant, 2, "m")
		if err == nil {
			err = put(e.ctx, late, tenant, "late", "v")
		}
		if err == nil {
			err = late.Commit(e.ctx)
		}
		if err == nil {
			e.Errorf("an import with a snapshot from before the opening committed")
		}
		late.Rollback()
	}
	late.Rollback()
	e.must(opened.wait(e, "open"), "open")

	// An import may not emit: the events that it brings have their numbers.
	tenant = newTenant()
	e.close(tenant, 2)
	tx = e.begin(e.a, iso)
	defer tx.Rollback()
	e.must(tx.AdmitClosed(e.ctx, tenant, 2, "m"), "import")
	_, err := tx.Emit(e.ctx, "put", "k")
	e.wantErr(err, cells.ErrFenced, "emit in an import")
}

func testInTx(e *env) {
	iso := e.h.Isolations[0]
	tenant := newTenant()
	e.open(tenant, 1)
	err := e.a.InTx(e.ctx, iso, func(context.Context, Tx) error { return nil })
	e.wantErr(err, guard.ErrNoAdmission, "a transaction without an admission")
	if guard.RetryElsewhere(err) {
		e.Errorf("it is said to be worth a try elsewhere")
	}
	err = e.a.InTx(guard.WithTenant(e.ctx, tenant), iso, func(context.Context, Tx) error { return nil })
	e.wantErr(err, guard.ErrNoAdmission, "a tenant without an admission, in a cell")

	mine := errors.New("mine")
	err = e.a.InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) error {
		if err := put(ctx, tx, tenant, "k", "v"); err != nil {
			return err
		}
		if _, err := tx.Emit(ctx, "put", "k"); err != nil {
			return err
		}
		return fmt.Errorf("wrapped: %w", mine)
	})
	e.wantErr(err, mine, "fn's own error")
	if got := e.state(tenant); got != fmt.Sprint(map[string]string{}, []int{}) {
		e.Errorf("a transaction whose fn failed left %s", got)
	}
	var seq cells.EventSeq
	err = e.a.InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) (err error) {
		seq, err = tx.Emit(ctx, "put", map[string]string{"key": "k"})
		return err
	})
	e.must(err, "emit")
	events, err := e.b.Events(e.ctx, tenant, 0, 10)
	e.must(err, "events")
	if len(events) != 1 || seq != 1 {
		e.Fatalf("emit returned %d, the outbox has %+v", seq, events)
	}
	ev := events[0]
	if ev.Seq != 1 || ev.Epoch != 1 || ev.Cell != "here" || ev.Tenant != tenant || ev.Type != "put" || string(ev.Payload) != `{"key":"k"}` || ev.ID == "" || ev.At.IsZero() {
		e.Errorf("the event is %+v with payload %s", ev, ev.Payload)
	}
	err = e.a.InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) error {
		_, err := tx.Emit(ctx, "", nil)
		e.wantErr(err, cells.ErrInvalid, "an event without a type")
		_, err = tx.Emit(ctx, "put", make(chan int))
		e.wantErr(err, cells.ErrInvalid, "a payload that is no JSON")
		return nil
	})
	e.must(err, "a transaction that handled its errors")
}

// testGapless: many writers, some of which give up after they have emitted.
func testGapless(e *env, iso string) {
	tenant := newTenant()
	e.open(tenant, 1)
	errGiveUp := errors.New("give up")
	var mu sync.Mutex
	given := map[cells.EventSeq]string{}
	const writers, each = 8, 12
	var aborted atomic.Int64
	err := group(writers, func(i int) error {
		for n := range each {
			var seqs []cells.EventSeq
			name := fmt.Sprintf("%d-%d", i, n)
			for {
				err := []Process{e.a, e.b}[i%2].InTx(e.as(tenant, 1), iso, func(ctx context.Context, tx Tx) error {
					seqs = nil
					for range 1 + n%2 {
						seq, err := tx.Emit(ctx, "put", name)
						if err != nil {
							return err
						}
						seqs = append(seqs, seq)
					}
					if (i+n)%4 == 0 {
						return errGiveUp
					}
					return put(ctx, tx, tenant, name, "v")
				})
				if errors.Is(err, errGiveUp) {
					aborted.Add(1)
					seqs = nil
				} else if errors.Is(err, guard.ErrContended) {
					continue
				} else if err != nil {
					return err
				}
				break
			}
			mu.Lock()
			for _, s := range seqs {
				if given[s] != "" {
					e.Errorf("event_seq %d was given to %s and %s", s, given[s], name)
				}
				given[s] = name
			}
			mu.Unlock()
		}
		return nil
	})
	e.must(err, "writers")
	events, err := e.a.Events(e.ctx, tenant, 0, 10000)
	e.must(err, "events")
	if len(events) != len(given) {
		e.Errorf("%d events were acknowledged, %d are there", len(given), len(events))
	}
	for i, ev := range events {
		if ev.Seq != cells.EventSeq(i+1) {
			e.Fatalf("event %d has event_seq %d", i, ev.Seq)
		}
		if want := fmt.Sprintf("%q", given[ev.Seq]); string(ev.Payload) != want {
			e.Errorf("event %d is of %s, its writer was told %s", ev.Seq, ev.Payload, want)
		}
	}
	if f := e.fence(tenant); f.Seq != cells.EventSeq(len(given)) {
		e.Errorf("the last event_seq given out is %d, want %d", f.Seq, len(given))
	}
	if aborted.Load() == 0 {
		e.Errorf("no writer gave up")
	}
}
