// SPDX-License-Identifier: Apache-2.0

package tenancytest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Mutant is a deliberately broken store that the suite must fail.
type Mutant struct {
	Name string
	// Only names the sections of which at least one has to notice.
	Only  []string
	Break func(Database, tenancy.Store) tenancy.Store
}

// Check runs the mutant's sections and fails t if none of them fails.
func (m Mutant) Check(t *testing.T, h Harness) {
	t.Helper()
	t.Run(m.Name, func(t *testing.T) {
		t.Parallel()
		h := h
		h.Only, h.Break = m.Only, m.Break
		report := guardtest.Record(t.Context(), func(t T) { Run(t, h) })
		if !report.Failed() {
			t.Fatalf("the suite does not notice (sections %v)", m.Only)
		}
		if strings.Contains(report.Failures[0], cannotOpen) {
			t.Fatalf("the mutant does not even start: %s", report.Failures[0])
		}
		t.Logf("noticed: %s", report.Failures[0])
	})
}

// mutant replaces methods of a store.
type mutant struct {
	tenancy.Store
	record  func(context.Context, cells.TenantID) (tenancy.Mode, bool, error)
	hold    func(context.Context, ...cells.TenantID) error
	prepare func(context.Context, tenancy.Preparation) (tenancy.Rows, error)
	mode    func(context.Context, tenancy.Mode, tenancy.ModeWrite) (tenancy.Mode, error)
	ensure  func(context.Context) (tenancy.Report, error)
	defects func(context.Context) ([]tenancy.Defect, error)
	open    func(context.Context, string) ([]tenancy.Blocker, error)
	read    func(context.Context) (tenancy.Rows, error)
	beats   func(context.Context, time.Duration) ([]tenancy.Heartbeat, error)
	all     func(context.Context) ([]string, error)
}

func (m mutant) Record(ctx context.Context, t cells.TenantID) (tenancy.Mode, bool, error) {
	if m.record != nil {
		return m.record(ctx, t)
	}
	return m.Store.Record(ctx, t)
}

func (m mutant) Hold(ctx context.Context, t ...cells.TenantID) error {
	if m.hold != nil {
		return m.hold(ctx, t...)
	}
	return m.Store.Hold(ctx, t...)
}

func (m mutant) Prepare(ctx context.Context, p tenancy.Preparation) (tenancy.Rows, error) {
	if m.prepare != nil {
		return m.prepare(ctx, p)
	}
	return m.Store.Prepare(ctx, p)
}

func (m mutant) SetMode(ctx context.Context, mode tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
	if m.mode != nil {
		return m.mode(ctx, mode, w)
	}
	return m.Store.SetMode(ctx, mode, w)
}

func (m mutant) EnsureTriggers(ctx context.Context) (tenancy.Report, error) {
	if m.ensure != nil {
		return m.ensure(ctx)
	}
	return m.Store.EnsureTriggers(ctx)
}

func (m mutant) TriggerDefects(ctx context.Context) ([]tenancy.Defect, error) {
	if m.defects != nil {
		return m.defects(ctx)
	}
	return m.Store.TriggerDefects(ctx)
}

func (m mutant) OpenBefore(ctx context.Context, s string) ([]tenancy.Blocker, error) {
	if m.open != nil {
		return m.open(ctx, s)
	}
	return m.Store.OpenBefore(ctx, s)
}

func (m mutant) Read(ctx context.Context) (tenancy.Rows, error) {
	if m.read != nil {
		return m.read(ctx)
	}
	return m.Store.Read(ctx)
}

func (m mutant) Heartbeats(ctx context.Context, d time.Duration) ([]tenancy.Heartbeat, error) {
	if m.beats != nil {
		return m.beats(ctx, d)
	}
	return m.Store.Heartbeats(ctx, d)
}

func (m mutant) TenantsOfEveryTable(ctx context.Context) ([]string, error) {
	if m.all != nil {
		return m.all(ctx)
	}
	return m.Store.TenantsOfEveryTable(ctx)
}

// raw runs a statement behind the store's back.
func raw(ctx context.Context, db Database, query string, args ...any) error {
	s, err := db.Session(ctx, true)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Exec(ctx, query, args...)
}

// spoiled runs statements after each EnsureTriggers.
func spoiled(queries ...string) func(Database, tenancy.Store) tenancy.Store {
	return func(db Database, s tenancy.Store) tenancy.Store {
		return mutant{Store: s, ensure: func(ctx context.Context) (tenancy.Report, error) {
			r, err := s.EnsureTriggers(ctx)
			for _, q := range queries {
				if err == nil {
					err = raw(ctx, db, q)
				}
			}
			return r, err
		}}
	}
}

func stateSQL(body string) string {
	return `CREATE OR REPLACE FUNCTION @s.tenancy_state() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER AS $f$ ` + body + ` $f$`
}

const oldTrigger = `DROP TRIGGER zz_cell_tenancy_%s ON notes`

// Mutants are the broken variants that can be made of any store on Postgres.
func Mutants() []Mutant {
	return []Mutant{
		{"record in any mode", []string{"record", "states"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, record: func(ctx context.Context, t cells.TenantID) (tenancy.Mode, bool, error) {
				return tenancy.Recording, true, s.Hold(ctx, t)
			}}
		}},
		{"record that reads the mode first", []string{"record-during", "record-stream"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, record: func(ctx context.Context, t cells.TenantID) (tenancy.Mode, bool, error) {
				rows, err := s.Read(ctx)
				if err != nil || rows.State() != tenancy.StateRecording {
					return rows.EffectiveMode(), false, err
				}
				return tenancy.Recording, true, s.Hold(ctx, t)
			}}
		}},
		{"record that says held for what is there", []string{"record"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, record: func(ctx context.Context, t cells.TenantID) (tenancy.Mode, bool, error) {
				m, held, err := s.Record(ctx, t)
				if err == nil && !held {
					held, err = s.Held(ctx, t)
				}
				return m, held, err
			}}
		}},
		{"a write of the mode without its lock", []string{"record-running"}, func(db Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, mode: func(ctx context.Context, m tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
				// A new row, past the row locks of running inserts.
				return m, raw(ctx, db, `ALTER TABLE @s.own_mode DISABLE TRIGGER USER; DO $$ BEGIN INSERT INTO @s.own_mode (one, mode) VALUES (true, 'enforced')
					ON CONFLICT (one) DO NOTHING; END $$`)
			}}
		}},
		{"a write of the mode that ignores its deadline", []string{"mode-late"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, mode: func(ctx context.Context, m tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
				w.Deadline = time.Time{}
				return s.SetMode(ctx, m, w)
			}}
		}},
		{"a write that says what was wanted", []string{"mode-late", "mode-absent"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, mode: func(ctx context.Context, m tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
				_, err := s.SetMode(ctx, m, w)
				return m, err
			}}
		}},
		{"hold of the first tenant only", []string{"hold"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, hold: func(ctx context.Context, t ...cells.TenantID) error { return s.Hold(ctx, t[:min(1, len(t))]...) }}
		}},
		{"prepare that always replaces the own row", []string{"prepare"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, prepare: func(ctx context.Context, p tenancy.Preparation) (tenancy.Rows, error) {
				p.ReplaceSelf = true
				return s.Prepare(ctx, p)
			}}
		}},
		{"prepare that raises the mode", []string{"prepare"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, prepare: func(ctx context.Context, p tenancy.Preparation) (tenancy.Rows, error) {
				if _, err := s.Prepare(ctx, p); err != nil {
					return tenancy.Rows{}, err
				}
				if _, err := s.SetMode(ctx, p.Mode, tenancy.ModeWrite{}); err != nil {
					return tenancy.Rows{}, err
				}
				return s.Read(ctx)
			}}
		}},
		{"a read that takes a missing mode for recording", []string{"states"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, read: func(ctx context.Context) (tenancy.Rows, error) {
				r, err := s.Read(ctx)
				if r.Mode == "" && r.First != nil {
					r.Mode = tenancy.Recording
				}
				return r, err
			}}
		}},
		{"heartbeats of the dead", []string{"heartbeats"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, beats: func(ctx context.Context, _ time.Duration) ([]tenancy.Heartbeat, error) {
				return s.Heartbeats(ctx, 24*time.Hour)
			}}
		}},
		{"ensure that does nothing", []string{"triggers", "triggers-ensure"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, ensure: func(context.Context) (tenancy.Report, error) { return tenancy.Report{}, nil }}
		}},
		{"defects that are missing triggers only", []string{"first-row", "triggers-ensure"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, defects: func(ctx context.Context) ([]tenancy.Defect, error) {
				all, err := s.TriggerDefects(ctx)
				var out []tenancy.Defect
				for _, d := range all {
					if d.What == tenancy.DefectMissing {
						out = append(out, d)
					}
				}
				return out, err
			}}
		}},
		{"nothing is ever open", []string{"snapshots"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, open: func(context.Context, string) ([]tenancy.Blocker, error) { return nil, nil }}
		}},
		{"whatever is open now", []string{"snapshots"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, open: func(ctx context.Context, _ string) ([]tenancy.Blocker, error) {
				now, err := s.Snapshot(ctx)
				if err != nil {
					return nil, err
				}
				return s.OpenBefore(ctx, now)
			}}
		}},
		{"a survey without tenancy rows", []string{"survey"}, func(_ Database, s tenancy.Store) tenancy.Store {
			return mutant{Store: s, all: func(ctx context.Context) ([]string, error) {
				u, err := s.Unheld(ctx)
				var out []string
				for _, t := range u {
					out = append(out, t.Tenant)
				}
				return out, err
			}}
		}},
		{"a state that takes a later cell's recording at its word", []string{"states"}, spoiled(stateSQL(
			`SELECT CASE WHEN (SELECT mode FROM @s.own_mode) = 'recording' THEN 'recording' WHEN EXISTS (SELECT FROM @s.own_first) THEN 'enforced' ELSE 'open' END`))},
		{"a state that is open without a mode row", []string{"states"}, spoiled(stateSQL(`SELECT CASE WHEN NOT EXISTS (SELECT FROM @s.own_mode) THEN 'open' ELSE 'enforced' END`))},
		{"a trigger for every update", []string{"triggers"}, spoiled(strings.ReplaceAll(oldTrigger, "%s", "update"),
			`CREATE TRIGGER zz_cell_tenancy_update AFTER UPDATE ON notes FOR EACH ROW WHEN (current_setting('@s.tenancy_checked', true) IS DISTINCT FROM 'on') EXECUTE FUNCTION @s.tenancy_refuse('tenant')`)},
		{"no trigger for updates", []string{"triggers"}, spoiled(strings.ReplaceAll(oldTrigger, "%s", "update"))},
		{"a trigger before the conflict is known", []string{"triggers"}, spoiled(strings.ReplaceAll(oldTrigger, "%s", "insert"),
			`CREATE FUNCTION @s.early() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NOT EXISTS (SELECT FROM @s.tenancy WHERE tenant = NEW.tenant) AND NEW.tenant NOT IN ('', '-', '*') THEN RAISE EXCEPTION USING ERRCODE = 'LT010', MESSAGE = 'early'; END IF; RETURN NEW; END $$`,
			`CREATE TRIGGER early BEFORE INSERT ON notes FOR EACH ROW WHEN (current_setting('@s.tenancy_checked', true) IS DISTINCT FROM 'on') EXECUTE FUNCTION @s.early()`)},
		{"a trigger that refuses marked sessions", []string{"triggers", "states"}, spoiled(strings.ReplaceAll(oldTrigger, "%s", "insert"),
			`CREATE TRIGGER zz_cell_tenancy_insert AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION @s.tenancy_refuse('tenant')`)},
		{"a trigger that replicas fire too", []string{"triggers"}, spoiled(`ALTER TABLE notes ENABLE ALWAYS TRIGGER zz_cell_tenancy_insert`)},
	}
}
