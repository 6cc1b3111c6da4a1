// SPDX-License-Identifier: Apache-2.0

package tenancytest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// testStates: in every combination of rows the store reads what is there, a writer
// that does not know of the check is refused exactly in Enforced and Partial, one
// that does never is, and Record writes exactly in Recording.
func testStates(e *env) {
	e.guarded()
	n := 0
	for _, first := range []*tenancy.First{nil, {First: true, Cell: "a"}, {First: false, Cell: "a"}} {
		for _, mode := range []tenancy.Mode{"", tenancy.Recording, tenancy.Enforced} {
			for _, self := range []*tenancy.Self{nil, selfOf("a")} {
				for _, row := range []bool{false, true} {
					n++
					want := tenancy.Rows{First: first, Mode: mode, Self: self, AnyTenancy: row}
					name := fmt.Sprintf("first %v, mode %q, self %t, tenancy %t", first, mode, self != nil, row)
					e.no(e.db.SetRows(e.ctx, first, mode, self, row), name)
					got, err := e.store.Read(e.ctx)
					e.no(err, name)
					if got.State() != want.State() || got.Mode != mode || (got.First == nil) != (first == nil) || first != nil && *got.First != *first ||
						(got.Self == nil) != (self == nil) || got.AnyTenancy != row {
						e.Errorf("%s: read %+v", name, got)
					}
					closed := want.State() == tenancy.StateEnforced || want.State() == tenancy.StatePartial
					if err := e.exec(false, `INSERT INTO notes VALUES ($1, $2)`, "unheld", n); (err != nil) != closed || err != nil && !errors.Is(err, tenancy.ErrRefused) {
						e.Errorf("%s (%s): a row of an unheld tenant: %v", name, want.State(), err)
					}
					if err := e.exec(false, `INSERT INTO notes VALUES ($1, $2)`, "held", n); (err != nil) != (closed && !row) {
						e.Errorf("%s (%s): a row of the held tenant: %v", name, want.State(), err)
					}
					e.no(e.exec(true, `INSERT INTO notes VALUES ($1, $2)`, "marked", n), name+": a marked session")
					tenant := cells.TenantID(fmt.Sprintf("rec-%d", n))
					m, held, err := e.store.Record(e.ctx, tenant)
					recording := want.State() == tenancy.StateRecording
					if err != nil || m != want.EffectiveMode() || held != recording || e.held(tenant) != recording {
						e.Errorf("%s (%s): record gave %q, %t, %v", name, want.State(), m, held, err)
					}
				}
			}
		}
	}
}

func testPrepare(e *env) {
	p := tenancy.Preparation{First: tenancy.First{First: true, Cell: "a"}, Mode: tenancy.Recording, Self: selfOf("old")}
	for _, bad := range []tenancy.Preparation{{First: tenancy.First{Cell: "A_"}, Mode: tenancy.Recording}, {First: p.First}, {First: p.First, Mode: "x"}, {First: p.First, Mode: p.Mode, Self: &tenancy.Self{}}} {
		if _, err := e.store.Prepare(e.ctx, bad); !errors.Is(err, cells.ErrInvalid) {
			e.Errorf("%+v: %v", bad, err)
		}
	}
	rows, err := e.store.Read(e.ctx)
	if e.no(err, "read"); rows.State() != tenancy.StateOpen {
		e.Fatalf("a new database is %s", rows.State())
	}
	rows, err = e.store.Prepare(e.ctx, p)
	if e.no(err, "prepare"); rows.State() != tenancy.StateRecording || *rows.First != p.First || !rows.Self.Current.Equal(Print("old")) {
		e.Fatalf("prepared: %+v", rows)
	}
	// A present row stays as it is.
	again := tenancy.Preparation{First: p.First, Mode: tenancy.Enforced, Self: selfOf("new")}
	if rows, err = e.store.Prepare(e.ctx, again); err != nil || rows.Mode != tenancy.Recording || !rows.Self.Current.Equal(Print("old")) {
		e.Fatalf("again: %+v, %v", rows, err)
	}
	again.ReplaceSelf = true
	next := Print("next")
	again.Self.Next = &next
	if rows, err = e.store.Prepare(e.ctx, again); err != nil || !rows.Self.Current.Equal(Print("new")) || rows.Self.Next == nil || !rows.Self.Next.Equal(next) {
		e.Fatalf("replaced: %+v, %v", rows, err)
	}
	// Another first row is refused, and nothing of the rest is written.
	for _, first := range []tenancy.First{{First: false, Cell: "a"}, {First: true, Cell: "b"}} {
		if _, err := e.store.Prepare(e.ctx, tenancy.Preparation{First: first, Mode: tenancy.Enforced, Self: selfOf("x"), ReplaceSelf: true}); !errors.Is(err, tenancy.ErrOtherRow) {
			e.Errorf("first row %+v: %v", first, err)
		}
	}
	if rows, err = e.store.Read(e.ctx); err != nil || !rows.Self.Current.Equal(Print("new")) {
		e.Fatalf("after refusals: %+v, %v", rows, err)
	}
	// What is missing is written back.
	e.no(e.db.SetRows(e.ctx, &p.First, "", nil, true), "rows lost")
	if rows, err = e.store.Prepare(e.ctx, again); err != nil || rows.State() != tenancy.StateEnforced {
		e.Fatalf("written back: %+v, %v", rows, err)
	}
}

func testSelf(e *env) {
	if err := e.store.SetSelf(e.ctx, tenancy.Self{}); !errors.Is(err, cells.ErrInvalid) {
		e.Errorf("no current: %v", err)
	}
	current, next := Print("a"), Print("b")
	for _, s := range []tenancy.Self{{Current: &current}, {Current: &current, Next: &next}, {Current: &next}} {
		e.no(e.store.SetSelf(e.ctx, s), "set")
		rows, err := e.other().Read(e.ctx)
		if err != nil || rows.Self == nil || !rows.Self.Current.Equal(*s.Current) || (rows.Self.Next == nil) != (s.Next == nil) {
			e.Fatalf("read %+v, %v", rows.Self, err)
		}
	}
}

func testHold(e *env) {
	for _, bad := range []cells.TenantID{"", "-", "*", "a b"} {
		if err := e.store.Hold(e.ctx, "ok", bad); !errors.Is(err, cells.ErrInvalid) {
			e.Errorf("%q: %v", bad, err)
		}
	}
	e.no(e.store.Hold(e.ctx), "nothing")
	e.no(e.store.Hold(e.ctx, "b", "a", "b"), "hold")
	e.no(e.other().Hold(e.ctx, "a", "c"), "again")
	got, err := e.store.Tenants(e.ctx)
	if err != nil || !slices.Equal(got, []cells.TenantID{"a", "b", "c"}) {
		e.Fatalf("tenants %v, %v", got, err)
	}
	for tenant, want := range map[cells.TenantID]bool{"a": true, "A": false, "d": false, "": false} {
		if got, err := e.store.Held(e.ctx, tenant); err != nil || got != want {
			e.Errorf("held %q: %t, %v", tenant, got, err)
		}
	}
}

func testHeartbeats(e *env) {
	f := Print("a")
	a := tenancy.Heartbeat{Instance: "i-1", Cell: "a", Mode: tenancy.Enforced, Fingerprint: &f, Build: "v2", Workers: true, Lease: "l", CacheFor: 2500 * time.Millisecond,
		Settings: tenancy.Settings{"drain": "5s", "publish": ""}}
	b := tenancy.Heartbeat{Instance: "i-2", Gated: "why"}
	e.no(e.store.Beat(e.ctx, b), "beat")
	e.no(e.other().Beat(e.ctx, a), "beat")
	got, err := e.store.Heartbeats(e.ctx, time.Hour)
	e.no(err, "list")
	if len(got) != 2 || got[0].Instance != "i-1" || !got[0].Fingerprint.Equal(f) || got[0].Cell != "a" || got[0].Mode != tenancy.Enforced || !got[0].Workers ||
		got[0].Lease != "l" || got[0].CacheFor != a.CacheFor || got[1].CacheFor != 0 || !maps.Equal(got[0].Settings, a.Settings) || len(got[1].Settings) != 0 || got[0].Build != "v2" || got[1].Gated != "why" || got[1].Fingerprint != nil || got[1].At.IsZero() {
		e.Fatalf("heartbeats %+v", got)
	}
	a.Mode, a.Workers = tenancy.Recording, false
	e.no(e.store.Beat(e.ctx, a), "beat again")
	e.no(e.exec(true, `UPDATE @s.heartbeats SET at = at - interval '1 minute' WHERE instance = 'i-2'`), "age")
	if got, err = e.store.Heartbeats(e.ctx, 30*time.Second); err != nil || len(got) != 1 || got[0].Mode != tenancy.Recording || got[0].Workers {
		e.Fatalf("live %+v, %v", got, err)
	}
	e.no(e.store.Leave(e.ctx, "i-1"), "leave")
	if got, err = e.store.Heartbeats(e.ctx, time.Hour); err != nil || len(got) != 1 || got[0].Instance != "i-2" {
		e.Fatalf("after leaving %+v, %v", got, err)
	}
	for _, h := range []tenancy.Heartbeat{{Instance: "no name"}, {Instance: "i-3", Settings: tenancy.Settings{"no name": ""}}} {
		if err := e.store.Beat(e.ctx, h); !errors.Is(err, cells.ErrInvalid) {
			e.Errorf("malformed %+v: %v", h, err)
		}
	}
}

// testFirstRow: nobody changes, removes or empties the first row, in any mode of the
// session.
func testFirstRow(e *env) {
	e.become(true, tenancy.Enforced)
	for _, role := range []string{"origin", "replica", "local"} {
		s := e.session(true)
		e.no(s.Exec(e.ctx, `SET session_replication_role = `+role), "role")
		for _, q := range []string{`UPDATE @s.own_first SET first = false`, `UPDATE @s.own_first SET cell = 'b'`, `DELETE FROM @s.own_first`, `TRUNCATE @s.own_first`,
			`INSERT INTO @s.own_first (first, cell) VALUES (true, 'a') ON CONFLICT (one) DO UPDATE SET cell = 'b'`} {
			if err := s.Exec(e.ctx, q); err == nil {
				e.Errorf("as %s: %s was done", role, q)
			}
		}
		s.Close()
	}
	rows, err := e.store.Read(e.ctx)
	if err != nil || *rows.First != (tenancy.First{First: true, Cell: "a"}) {
		e.Fatalf("%+v, %v", rows.First, err)
	}
	// Disabled and removed ones are found and put back, in any state.
	e.no(e.db.SetRows(e.ctx, rows.First, tenancy.Recording, selfOf("a"), false), "rows")
	for what, q := range map[string]string{
		tenancy.DefectDisabled:  `ALTER TABLE @s.own_first DISABLE TRIGGER own_first_row`,
		tenancy.DefectNotAlways: `ALTER TABLE @s.own_first ENABLE TRIGGER own_first_truncate`,
		tenancy.DefectMissing:   `DROP TRIGGER own_first_row ON @s.own_first`,
	} {
		e.no(e.exec(true, q), q)
		d, err := e.store.TriggerDefects(e.ctx)
		if err != nil || len(d) != 1 || d[0].What != what {
			e.Errorf("%s: %+v, %v", q, d, err)
		}
		if _, err := e.store.EnsureTriggers(e.ctx); err != nil {
			e.Errorf("%s: %v", q, err)
		}
		if d, err := e.store.TriggerDefects(e.ctx); err != nil || len(d) != 0 {
			e.Errorf("after a repair: %+v, %v", d, err)
		}
	}
}

func testSurvey(e *env) {
	e.become(true, tenancy.Recording)
	e.no(e.exec(true, table), "table")
	e.no(e.exec(true, `CREATE TABLE loose (tenant text, note text)`), "table without a key")
	e.no(e.exec(true, `CREATE TABLE other (k int PRIMARY KEY, owner text)`), "table without a tenant")
	e.no(e.exec(true, `INSERT INTO notes VALUES ('a', 1), ('a', 2), ('b', 1), ('*', 1), ('-', 1), ('', 1)`), "rows")
	e.no(e.exec(true, `INSERT INTO loose VALUES ('c', ''), (NULL, ''), ('b', '')`), "rows")
	e.no(e.exec(true, `INSERT INTO other VALUES (1, 'z')`), "rows")
	e.no(e.store.Hold(e.ctx, "a", "empty"), "hold")
	all, err := e.store.TenantsOfEveryTable(e.ctx)
	if err != nil || !slices.Equal(all, []string{"a", "b", "c", "empty"}) {
		e.Errorf("tenants of every table %v, %v", all, err)
	}
	unheld, err := e.store.Unheld(e.ctx)
	if err != nil || len(unheld) != 2 || unheld[0].Tenant != "b" || len(unheld[0].Tables) != 2 || unheld[1].Tenant != "c" || len(unheld[1].Tables) != 1 {
		e.Errorf("unheld %+v, %v", unheld, err)
	}
	empty, err := e.store.Empty(e.ctx)
	if err != nil || !slices.Equal(empty, []cells.TenantID{"empty"}) {
		e.Errorf("empty %v, %v", empty, err)
	}
}
