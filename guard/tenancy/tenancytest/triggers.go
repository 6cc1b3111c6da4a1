// SPDX-License-Identifier: Apache-2.0

package tenancytest

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/guard/tenancy"
)

// testTriggers: what an unmarked session of an enforced cell may do.
func testTriggers(e *env) {
	e.guarded()
	e.no(e.store.Hold(e.ctx, "held", "held2"), "hold")
	e.no(e.exec(true, `INSERT INTO notes VALUES ('held', 1), ('unheld', 1), ('gone', 1)`), "a marked session")
	for _, c := range []struct {
		query   string
		refused bool
	}{
		{`INSERT INTO notes VALUES ('held', 2)`, false},
		{`INSERT INTO notes VALUES ('unheld', 2)`, true},
		{`INSERT INTO notes VALUES ('held', 3), ('unheld', 3)`, true},
		{`INSERT INTO notes SELECT 'unheld', 4`, true},
		{`INSERT INTO notes VALUES ('', 1), ('-', 1), ('*', 1)`, false},
		{`INSERT INTO notes VALUES ('unheld', 1) ON CONFLICT (tenant, k) DO UPDATE SET v = 'x'`, false}, // hits a row
		{`INSERT INTO notes VALUES ('unheld', 9) ON CONFLICT (tenant, k) DO UPDATE SET v = 'x'`, true},  // inserts
		{`INSERT INTO notes VALUES ('unheld', 1) ON CONFLICT (tenant, k) DO NOTHING`, false},
		{`INSERT INTO notes VALUES ('held', 1) ON CONFLICT (tenant, k) DO UPDATE SET tenant = 'other'`, true}, // moves it
		{`UPDATE notes SET v = 'y' WHERE tenant = 'unheld'`, false},
		{`UPDATE notes SET tenant = 'unheld' WHERE tenant = 'unheld'`, false},
		{`UPDATE notes SET tenant = 'elsewhere' WHERE tenant = 'held' AND k = 1`, true},
		{`UPDATE notes SET tenant = 'held2' WHERE tenant = 'held' AND k = 1`, false},
		{`DELETE FROM notes WHERE tenant = 'gone'`, false},
		{`WITH x AS (INSERT INTO notes VALUES ('unheld', 11) RETURNING 1) SELECT * FROM x`, true},
	} {
		err := e.exec(false, c.query)
		if (err != nil) != c.refused || err != nil && !errors.Is(err, tenancy.ErrRefused) {
			e.Errorf("%s: %v", c.query, err)
		}
	}
	// The marker is for the process's life: a pool's reset of the session keeps it.
	s := e.session(true)
	defer s.Close()
	for _, reset := range []string{`RESET ALL`, `DISCARD ALL`} {
		e.no(s.Exec(e.ctx, reset), reset)
		e.no(s.Exec(e.ctx, `INSERT INTO notes VALUES ('marked', (SELECT count(*) FROM notes))`), "after "+reset)
	}
	// An origin trigger: what replicates is not refused.
	r := e.session(false)
	defer r.Close()
	e.no(r.Exec(e.ctx, `SET session_replication_role = replica`), "role")
	e.no(r.Exec(e.ctx, `INSERT INTO notes VALUES ('replicated', 1)`), "as a replica")
}

// testEnsure: no trigger before the cell is enforced; then on every table, whatever
// it is called; disabled and altered ones are found in any state and put back.
func testEnsure(e *env) {
	e.no(e.exec(true, table), "table")
	e.no(e.exec(true, `CREATE SCHEMA "Odd Schema"`), "schema")
	e.no(e.exec(true, `CREATE TABLE "Odd Schema"."Odd ""Table" (k int, tenant varchar(9))`), "table")
	e.no(e.exec(true, `CREATE TABLE parts (tenant text, k int, PRIMARY KEY (tenant, k)) PARTITION BY LIST (tenant)`), "partitioned")
	e.no(e.exec(true, `CREATE TABLE parts_rest PARTITION OF parts DEFAULT`), "partition")
	partial := func() { e.no(e.db.SetRows(e.ctx, nil, "", selfOf("a"), false), "rows") }
	for name, become := range map[string]func(){
		"open":      func() { e.no(e.db.SetRows(e.ctx, nil, "", nil, false), "rows") },
		"recording": func() { e.become(true, tenancy.Recording) }, "partial": partial,
	} {
		become()
		r, err := e.store.EnsureTriggers(e.ctx)
		if err != nil || len(r.Created)+len(r.Repaired)+len(r.Skipped) > 0 {
			e.Errorf("%s: %+v, %v", name, r, err)
		}
		if d, err := e.defects(); err != nil || len(d) != 0 {
			e.Errorf("%s: defects %v, %v", name, d, err)
		}
	}
	e.become(false, tenancy.Enforced)
	if d, err := e.defects(); err != nil || len(d) != 2*e.tables() {
		e.Errorf("enforced, none made yet: defects %v, %v", d, err)
	}
	r, err := e.store.EnsureTriggers(e.ctx)
	if err != nil || len(r.Created) != 2*e.tables() || len(r.Skipped) > 0 {
		e.Fatalf("ensure: %+v, %v", r, err)
	}
	if r, err := e.store.EnsureTriggers(e.ctx); err != nil || len(r.Created)+len(r.Repaired)+len(r.Skipped) != 0 {
		e.Errorf("again: %+v, %v", r, err)
	}
	for i, q := range []string{`INSERT INTO notes VALUES ('x', 1)`, `INSERT INTO "Odd Schema"."Odd ""Table" VALUES (1, 'x')`, `INSERT INTO parts VALUES ('x', 1)`} {
		if err := e.exec(false, q); !errors.Is(err, tenancy.ErrRefused) {
			e.Errorf("%d: %v", i, err)
		}
	}
	const other = `CREATE TRIGGER zz_cell_tenancy_insert AFTER INSERT ON notes FOR EACH ROW WHEN (%s) EXECUTE FUNCTION %s`
	for _, c := range []struct {
		what  string
		spoil []string
	}{
		{tenancy.DefectDisabled, []string{`ALTER TABLE notes DISABLE TRIGGER zz_cell_tenancy_insert`}},
		{tenancy.DefectNotOrigin, []string{`ALTER TABLE notes ENABLE ALWAYS TRIGGER zz_cell_tenancy_update`}},
		{tenancy.DefectNotOrigin, []string{`ALTER TABLE notes ENABLE REPLICA TRIGGER zz_cell_tenancy_update`}},
		{tenancy.DefectMissing, []string{`DROP TRIGGER zz_cell_tenancy_update ON notes`}},
		{tenancy.DefectAltered, []string{`DROP TRIGGER zz_cell_tenancy_insert ON notes`, fmt.Sprintf(other, `false`, `@s.tenancy_refuse('tenant')`)}},
		{tenancy.DefectAltered, []string{`DROP TRIGGER zz_cell_tenancy_insert ON notes`,
			fmt.Sprintf(other, `current_setting('@s.tenancy_checked', true) IS DISTINCT FROM 'on'`, `@s.tenancy_refuse('k')`)}},
		{tenancy.DefectAltered, []string{`DROP TRIGGER zz_cell_tenancy_insert ON notes`,
			fmt.Sprintf(other, `current_setting('@s.tenancy_checked', true) IS DISTINCT FROM 'off'`, `@s.tenancy_refuse('tenant')`)}},
		{tenancy.DefectAltered, []string{`CREATE OR REPLACE FUNCTION @s.tenancy_refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`}},
		{tenancy.DefectAltered, []string{`CREATE OR REPLACE FUNCTION @s.tenancy_state() RETURNS text LANGUAGE sql AS $$SELECT 'open'$$`}},
	} {
		for _, q := range c.spoil {
			e.no(e.exec(true, q), q)
		}
		last := c.spoil[len(c.spoil)-1]
		// Whatever the state: only a missing one is none before the cell is enforced.
		e.become(true, tenancy.Recording)
		want := 1
		if c.what == tenancy.DefectMissing {
			want = 0
		}
		if d, err := e.defects(); err != nil || len(d) != want {
			e.Errorf("%s: in recording: %v, %v", last, d, err)
		}
		e.become(true, tenancy.Enforced)
		if d, err := e.defects(); err != nil || len(d) != 1 || d[0].What != c.what {
			e.Errorf("%s: %v, %v", last, d, err)
		}
		if r, err := e.store.EnsureTriggers(e.ctx); err != nil || len(r.Repaired)+len(r.Created) != 1 {
			e.Errorf("%s: repaired %+v, %v", last, r, err)
		}
		if d, err := e.defects(); err != nil || len(d) != 0 {
			e.Errorf("%s: after the repair %v, %v", last, d, err)
		}
		if err := e.exec(false, `INSERT INTO notes VALUES ('x', 1)`); !errors.Is(err, tenancy.ErrRefused) {
			e.Errorf("%s: after the repair: %v", last, err)
		}
	}
	e.testBusy()
}

// testBusy: a table that is locked is left within seconds and named, with who holds
// it; the others are done.
func (e *env) testBusy() {
	e.no(e.exec(true, `CREATE TABLE busy (tenant text)`), "table")
	e.no(e.exec(true, `CREATE TABLE idle (tenant text)`), "table")
	s := e.session(true)
	defer s.Close()
	e.no(s.Exec(e.ctx, `BEGIN`), "begin")
	e.no(s.Exec(e.ctx, `INSERT INTO busy VALUES ('held')`), "a writer")
	begun := time.Now()
	r, err := e.store.EnsureTriggers(e.ctx)
	if err != nil || len(r.Created) != 2 || len(r.Skipped) != 1 || r.Skipped[0].Why != "locked" || len(r.Skipped[0].Holders) != 1 || time.Since(begun) > 15*time.Second {
		e.Errorf("beside a busy table: %+v, %v, after %s", r, err, time.Since(begun))
	}
	e.no(s.Exec(e.ctx, `COMMIT`), "commit")
	if r, err := e.store.EnsureTriggers(e.ctx); err != nil || len(r.Created) != 2 || len(r.Skipped) != 0 {
		e.Errorf("afterwards: %+v, %v", r, err)
	}
}

// defects leaves out the partitioned table, which is named in any state.
func (e *env) defects() ([]tenancy.Defect, error) {
	all, err := e.store.TriggerDefects(e.ctx)
	var out []tenancy.Defect
	named := false
	for _, d := range all {
		if d.What == tenancy.DefectUnsupported {
			named = true
			continue
		}
		out = append(out, d)
	}
	if err == nil && !named {
		e.Errorf("the partitioned table is not named")
	}
	return out, err
}

// tables are notes, the odd one, the partition, and what the guard has.
func (e *env) tables() int { return 3 }

// testSnapshots: what a transaction of an unmarked session that began before the mode
// was enforced still may, and that it is found.
func testSnapshots(e *env) {
	e.guarded()
	for i, iso := range e.h.Isolations {
		e.become(true, tenancy.Recording)
		old := e.session(false)
		e.no(old.Exec(e.ctx, `BEGIN ISOLATION LEVEL `+iso), iso)
		e.no(old.Exec(e.ctx, `SELECT count(*) FROM notes`), iso)
		if m, err := e.store.SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{}); err != nil || m != tenancy.Enforced {
			e.Fatalf("%s: enforce: %q, %v", iso, m, err)
		}
		snap, err := e.store.Snapshot(e.ctx)
		e.no(err, "snapshot")
		open := func() int {
			b, err := e.store.OpenBefore(e.ctx, snap)
			e.no(err, "open transactions")
			return len(b)
		}
		if open() != 1 {
			e.Errorf("%s: the transaction from before is not found", iso)
		}
		young := e.session(false)
		e.no(young.Exec(e.ctx, `BEGIN ISOLATION LEVEL `+iso), iso)
		e.no(young.Exec(e.ctx, `SELECT count(*) FROM notes`), iso)
		if open() != 1 {
			e.Errorf("%s: a transaction from after counts", iso)
		}
		if err := young.Exec(e.ctx, `INSERT INTO notes VALUES ('young', 1)`); !errors.Is(err, tenancy.ErrRefused) {
			e.Errorf("%s: a transaction from after: %v", iso, err)
		}
		young.Close()
		// With the old snapshot it still reads recording; READ COMMITTED reads again.
		err = old.Exec(e.ctx, `INSERT INTO notes VALUES ('old', $1)`, i)
		if lowest := i == 0; (err != nil) != lowest {
			e.Errorf("%s: a transaction from before: %v", iso, err)
		}
		if i > 0 && open() != 1 {
			e.Errorf("%s: it is not found after it wrote", iso)
		}
		end := `COMMIT`
		if i == 0 {
			end = `ROLLBACK`
		}
		e.no(old.Exec(e.ctx, end), end)
		old.Close()
		e.until(iso+": it has ended", func() bool { return open() == 0 })
		unheld, err := e.store.Unheld(e.ctx)
		found := false
		for _, u := range unheld {
			found = found || u.Tenant == "old"
		}
		if err != nil || found != (i > 0) {
			e.Errorf("%s: its rows are listed as unheld: %+v, %v", iso, unheld, err)
		}
		e.no(e.exec(true, `DELETE FROM notes`), "clean")
	}
	if _, err := e.store.OpenBefore(e.ctx, "1; DROP"); err == nil {
		e.Errorf("a malformed snapshot is taken")
	}
}
