// SPDX-License-Identifier: Apache-2.0

package tenancytest

import (
	"context"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// T is the suite's view of a test; see guardtest.
type T = guardtest.T

// Database is one database of its own for a section.
type Database interface {
	// Store returns the store of another process. The database closes it.
	Store() tenancy.Store
	// Session opens a writer's session; marked says that it runs the tenancy check.
	Session(ctx context.Context, marked bool) (Session, error)
	// SetRows writes the cell's own rows behind the store's back: nil, "" and false
	// are absent rows. The tenancy row, if any, is of the tenant "held".
	SetRows(ctx context.Context, first *tenancy.First, mode tenancy.Mode, self *tenancy.Self, tenancyRow bool) error
	// Close ends the stores and the database.
	Close()
}

// Session is one connection that speaks the database's SQL. The suite uses what is
// common: BEGIN, COMMIT, ROLLBACK, CREATE TABLE, INSERT, UPDATE, DELETE. "@s" in a
// statement is the schema of the cell's own rows.
type Session interface {
	Exec(ctx context.Context, query string, args ...any) error
	Close()
}

// Harness says how to run the suite.
type Harness struct {
	// Open makes a database in which the store was installed.
	Open func(ctx context.Context) (Database, error)
	// Isolations are the levels that transactions may have, as BEGIN ISOLATION LEVEL
	// names them; the first is the lowest.
	Isolations []string
	// Only names the sections to run; all of them when empty.
	Only []string
	// Break, if set, wraps every store: a mutant's.
	Break func(Database, tenancy.Store) tenancy.Store
}

type env struct {
	T
	ctx   context.Context
	h     *Harness
	db    Database
	store tenancy.Store
	plain tenancy.Store    // never a mutant
	spare map[bool]Session // for statements of their own, by marked
}

var sections = []struct {
	name string
	run  func(*env)
}{
	{"states", testStates},
	{"prepare", testPrepare},
	{"self", testSelf},
	{"hold", testHold},
	{"record", testRecord},
	{"record-running", testRecordRunning},
	{"record-during", testRecordDuring},
	{"record-stream", testRecordStream},
	{"mode-late", testModeLate},
	{"mode-absent", testModeAbsent},
	{"heartbeats", testHeartbeats},
	{"first-row", testFirstRow},
	{"triggers", testTriggers},
	{"triggers-ensure", testEnsure},
	{"snapshots", testSnapshots},
	{"survey", testSurvey},
}

// Sections lists the names that [Harness.Only] takes.
func Sections() []string {
	var out []string
	for _, s := range sections {
		out = append(out, s.name)
	}
	return out
}

const cannotOpen = "cannot open a database: "

// Run runs the suite.
func Run(t T, h Harness) {
	for _, only := range h.Only {
		if !slices.Contains(Sections(), only) {
			t.Fatalf("there is no section %q", only)
		}
	}
	for _, s := range sections {
		if len(h.Only) > 0 && !slices.Contains(h.Only, s.name) {
			continue
		}
		t.Run(s.name, func(t T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			db, err := h.Open(ctx)
			if err != nil {
				t.Fatalf(cannotOpen+"%v", err)
			}
			defer db.Close()
			e := &env{T: t, ctx: ctx, h: &h, db: db, spare: map[bool]Session{}}
			defer func() {
				for _, s := range e.spare {
					s.Close()
				}
			}()
			e.store, e.plain = e.other(), db.Store()
			s.run(e)
		})
	}
}

// other is the store of another process.
func (e *env) other() tenancy.Store {
	if e.h.Break != nil {
		return e.h.Break(e.db, e.db.Store())
	}
	return e.db.Store()
}

func (e *env) no(err error, what string) {
	e.Helper()
	if err != nil {
		e.Fatalf("%s: %v", what, err)
	}
}

func (e *env) session(marked bool) Session {
	e.Helper()
	s, err := e.db.Session(e.ctx, marked)
	e.no(err, "session")
	return s
}

// exec runs a statement that is its own transaction.
func (e *env) exec(marked bool, query string, args ...any) error {
	e.Helper()
	if e.spare[marked] == nil {
		e.spare[marked] = e.session(marked)
	}
	return e.spare[marked].Exec(e.ctx, query, args...)
}

func (e *env) held(tenant cells.TenantID) bool {
	e.Helper()
	ok, err := e.plain.Held(e.ctx, tenant)
	e.no(err, "held")
	return ok
}

// until polls, without a sleep that says how long something takes.
func (e *env) until(what string, ok func() bool) {
	e.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			e.Fatalf("waited in vain: %s", what)
		}
		<-tick.C
	}
}

// Print is a fingerprint that differs from others by its host.
func Print(host string) tenancy.Fingerprint {
	return tenancy.Fingerprint{Schema: 1, Fields: map[tenancy.Field][]string{tenancy.FieldHosts: {host}}}
}

// selfOf is an own row of one value.
func selfOf(host string) *tenancy.Self { f := Print(host); return &tenancy.Self{Current: &f} }

// first writes complete rows.
func (e *env) become(first bool, mode tenancy.Mode) {
	e.Helper()
	e.no(e.db.SetRows(e.ctx, &tenancy.First{First: first, Cell: "a"}, mode, selfOf("a"), false), "rows")
}

const table = `CREATE TABLE notes (tenant text NOT NULL, k int NOT NULL, v text, PRIMARY KEY (tenant, k))`

// guarded makes the table notes and its triggers, in an enforced cell.
func (e *env) guarded() {
	e.Helper()
	e.become(true, tenancy.Enforced)
	e.no(e.exec(true, table), "table")
	if r, err := e.store.EnsureTriggers(e.ctx); err != nil || len(r.Skipped) > 0 {
		e.Fatalf("ensure: %+v, %v", r, err)
	}
}
