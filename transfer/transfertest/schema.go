// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// migration changes the schema of a cell, and back.
type migration struct {
	name     string
	do, undo []string
	// spoils: the cell's database is not what it was, even after undo.
	spoils bool
	// empties the table part.
	empties bool
}

// Spoil makes a table which says that the database must not serve another test.
const Spoil = `CREATE TABLE spoiled (n integer)`

func migrations(engine string) []migration {
	part := Schema(engine)[1]
	out := []migration{
		{name: "add a column", do: []string{`ALTER TABLE part ADD COLUMN extra text`}, undo: []string{`ALTER TABLE part DROP COLUMN extra`}},
		{name: "drop a column", do: []string{`ALTER TABLE item DROP COLUMN ratio`}, undo: []string{`ALTER TABLE item ADD COLUMN ratio double precision`}},
		{name: "make a table of tenants", do: []string{`CREATE TABLE late (tenant text NOT NULL, id text NOT NULL, PRIMARY KEY (tenant, id))`}, undo: []string{`DROP TABLE late`}},
		{name: "make a table that refers to one", do: []string{`CREATE TABLE late (id text PRIMARY KEY, whose text, what text, FOREIGN KEY (whose, what) REFERENCES item (tenant, id))`}, undo: []string{`DROP TABLE late`}},
		{name: "make a table anew", do: []string{`DROP TABLE part`, part}, spoils: true, empties: true},
	}
	if engine == "postgres" {
		return append(out,
			migration{name: "change a type", do: []string{`ALTER TABLE item ALTER COLUMN slot TYPE numeric`}, undo: []string{`ALTER TABLE item ALTER COLUMN slot TYPE bigint`}},
			migration{name: "truncate", do: []string{`ALTER TABLE part DISABLE TRIGGER USER`, `TRUNCATE part`, `ALTER TABLE part ENABLE TRIGGER USER`}, empties: true},
			migration{name: "come and go", do: []string{`ALTER TABLE part ADD COLUMN extra text`, `ALTER TABLE part DROP COLUMN extra`}})
	}
	return append(out, migration{name: "change a type", do: []string{`ALTER TABLE part DROP COLUMN note`, `ALTER TABLE part ADD COLUMN note blob`},
		undo: []string{`ALTER TABLE part DROP COLUMN note`, `ALTER TABLE part ADD COLUMN note text`}, spoils: true})
}

// Moments at which a schema changes.
const (
	inSnapshot = "in the snapshot" // a view is open, nothing is read from it yet
	inCatchUp  = "in the catch-up" // all is copied
	beforeCut  = "before the cut"  // prepared
	inCut      = "in the cut"      // everything is applied and compared, the mark is not recorded
)

// testSchemaChanges changes the schema of either side at every moment of a move: the
// move fails, the source serves again, and nothing is left behind.
func testSchemaChanges(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(300)
	e := base
	n := 0
	for _, mig := range migrations(h.Engine) {
		for _, side := range []Cell{w.a, w.b} {
			for _, moment := range []string{inSnapshot, inCatchUp, beforeCut, inCut} {
				if moment == inCut && side == w.a {
					continue // what the source becomes behind its mark is no part of the move
				}
				n++
				if moment != beforeCut && n%4 != 0 {
					continue // one in four, for the time that it takes
				}
				m := cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("m%d", n)), Tenant: w.tenant, Source: w.a.ID(), Target: w.b.ID(), Base: e}
				w.schemaChange(m, mig, side, moment)
				e = m.OpenEpoch()
			}
		}
	}
	w.must(w.b.Sink().Sweep(tb.Context()))
	w.gone(w.b)
}

func (w *world) schemaChange(m cells.MoveRef, mig migration, side Cell, moment string) {
	w.tb.Helper()
	ctx := w.tb.Context()
	what := fmt.Sprintf("%s at %s %s", mig.name, side.ID(), moment)
	if mig.empties && side == w.a {
		w.must(w.a.Write(ctx, w.tenant, m.Base, "", func(x Exec) error { return putPart(x, w.tenant, "k00000", 7, string(m.ID)) }))
	}
	before := w.dump(w.a)
	migrate := func(statements []string) {
		w.tb.Helper()
		w.must(side.Raw(ctx, w.tenant, func(x Exec) error {
			for _, q := range statements {
				if err := x(q); err != nil {
					return fmt.Errorf("%s: %q: %w", what, q, err)
				}
			}
			return nil
		}))
	}
	done, copied := false, false
	change := func() {
		if !done {
			done = true
			migrate(mig.do)
		}
	}
	v := w.h.agent(w.tb, w.b, transfer.WithCheckEvery(20*time.Millisecond), transfer.WithFault(func(point string) error {
		if point == "aligned" && moment == inSnapshot || point == "compared" && moment == inCut {
			change()
		}
		return nil
	}))
	_, err := v.Prepare(ctx, m, w.a.Source(), func(p cells.Progress) {
		// The view that was copied from is closed by then.
		if copied = copied || p.Phase == "verify"; copied && p.Phase == "catchup" && moment == inCatchUp {
			change()
		}
	})
	if moment == inSnapshot || moment == inCatchUp {
		w.wantErr(what, err, transfer.ErrSchemaChanged)
		// The driver tries again: no better.
		_, err = v.Prepare(ctx, m, w.a.Source(), nil)
		w.wantErr(what+", again", err, cells.ErrInvalid)
	} else {
		if err != nil {
			w.tb.Fatalf("%s: %v", what, err)
		}
		if moment == beforeCut {
			change()
		}
		w.close(m)
		_, err = v.Finish(ctx, m, w.a.Source(), nil)
		w.wantErr(what, err, transfer.ErrSchemaChanged)
	}
	if !done {
		w.tb.Fatalf("%s: it was not done", what)
	}
	// What a driver does then.
	w.must(w.a.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}))
	w.must(v.Discard(ctx, w.tenant, cells.Residue{Cell: w.b.ID(), Epoch: m.OpenEpoch(), Move: m.ID}, nil))
	w.must(w.h.agent(w.tb, w.a).Sweep(ctx))
	w.gone(w.a)
	w.gone(w.b)
	migrate(mig.undo)
	if mig.spoils {
		spoiled(side, w)
	}
	w.must(w.a.Write(ctx, w.tenant, m.OpenEpoch(), "", func(x Exec) error { return setN(x, w.tenant, "k00001", int64(m.Base)) }))
	if after := w.dump(w.a); side == w.b && len(after) != len(before) {
		w.tb.Fatalf("%s: %d rows at the source, there were %d", what, len(after), len(before))
	}
	if d := w.dump(w.b); len(d) > 0 {
		w.tb.Fatalf("%s: %d rows at the target", what, len(d))
	}
}

// spoiled notes that the cell's database is not what it was.
func spoiled(c Cell, w *world) {
	w.tb.Helper()
	_ = c.Raw(w.tb.Context(), w.tenant, func(x Exec) error { return x(Spoil) }) // there already: good
}

// testRetention: a move for which more is kept than it may is given up, by the agent
// that prepares it and, when there is none, by the source.
func testRetention(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(1200)
	ctx := tb.Context()
	m := w.move("m1")
	source := w.a.Source()
	if h.source != nil {
		source = h.source(source)
	}
	grow := func(e cells.Epoch) {
		tb.Helper()
		for n := range 2 {
			w.must(w.a.Write(ctx, w.tenant, e, "", func(x Exec) error {
				for k := range 50 {
					if err := setBig(x, w.tenant, fmt.Sprintf("k%05d", k), uint64(n)); err != nil {
						return err
					}
				}
				return nil
			}))
		}
	}
	limited := func(bytes int64) func(v *transfer.Mover, m cells.MoveRef) error {
		return func(v *transfer.Mover, m cells.MoveRef) error {
			_, err := v.Prepare(transfer.ContextWithLimits(ctx, transfer.Limits{MaxRetained: bytes}), m, source, nil)
			return err
		}
	}
	grown := false
	v := h.agent(tb, w.b, transfer.WithCheckEvery(10*time.Millisecond), transfer.WithFollow(0), transfer.WithFault(func(point string) error {
		if point == "aligned" && !grown {
			grown = true
			grow(m.Base)
		}
		return nil
	}))
	w.wantErr("a move that keeps much", limited(64<<10)(v, m), transfer.ErrRetention)
	// The driver rolls back, and nothing is left.
	w.must(w.a.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}))
	w.must(v.Discard(ctx, w.tenant, cells.Residue{Cell: w.b.ID(), Epoch: m.OpenEpoch(), Move: m.ID}, nil))
	w.must(w.h.agent(tb, w.a).Sweep(ctx))
	w.gone(w.a)
	w.gone(w.b)

	// The next is prepared within its limit, and then left alone by its driver.
	m = cells.MoveRef{ID: "m2", Tenant: w.tenant, Source: w.a.ID(), Target: w.b.ID(), Base: m.OpenEpoch()}
	h2, err := source.Begin(ctx, m)
	w.must(err)
	if h2 == "" {
		tb.Fatalf("no position")
	}
	health, err := source.Check(ctx, m, transfer.Limits{MaxRetained: 8 << 20})
	w.must(err)
	kept := health.Retained
	w.must(w.a.Sink().Sweep(ctx))
	_, err = source.Check(ctx, m, transfer.Limits{MaxRetained: 8 << 20})
	w.must(err)
	grow(m.Base)
	health, err = source.Check(ctx, m, transfer.Limits{MaxRetained: -1})
	w.must(err)
	if health.Retained <= kept {
		tb.Errorf("%d bytes are kept after many changes, %d were before", health.Retained, kept)
	}
	w.must(w.a.Sink().Sweep(ctx)) // without a limit
	_, err = source.Check(ctx, m, transfer.Limits{MaxRetained: -1})
	w.must(err)
	_, err = source.Check(ctx, m, transfer.Limits{MaxRetained: 64 << 10})
	w.wantErr("a check with a small limit", err, transfer.ErrRetention)
	w.must(w.a.Sink().Sweep(ctx))
	_, err = source.Begin(ctx, m)
	w.wantErr("a capture that was ended", err, transfer.ErrRetention)
	if view, err := source.View(ctx, m); err == nil {
		w.must(view.Close())
		tb.Errorf("a view of a capture that was ended")
	}
	_, err = v.Prepare(ctx, m, source, nil)
	w.wantErr("prepare of a capture that was ended", err, transfer.ErrRetention)
	w.must(w.a.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}))
	w.must(w.a.Sink().Sweep(ctx))
	w.gone(w.a)
}
