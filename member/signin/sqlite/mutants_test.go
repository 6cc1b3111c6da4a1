// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/cloister-dev/cloister/member/signin/signintest"
	"github.com/cloister-dev/cloister/member/signin/sqlite"
)

// recorder is a test that only notes that it failed.
type recorder struct {
	ctx    context.Context
	failed atomic.Bool
}

func (r *recorder) Helper()                  {}
func (r *recorder) Context() context.Context { return r.ctx }
func (r *recorder) Error(...any)             { r.failed.Store(true) }
func (r *recorder) Errorf(string, ...any)    { r.failed.Store(true) }
func (r *recorder) Fatal(...any)             { r.failed.Store(true); runtime.Goexit() }

// Stores that are broken in one way each, by a trigger in their database: the suite has
// to find every one of them.
func TestSuiteFindsFaults(t *testing.T) {
	for name, m := range map[string]struct{ of, trigger string }{
		"deleted emails are forgotten":        {"Emails", `AFTER INSERT ON tombstones BEGIN DELETE FROM tombstones; END`},
		"an email that is back stays deleted": {"Emails", `BEFORE DELETE ON tombstones BEGIN SELECT RAISE(IGNORE); END`},
		"work addresses are never taken out":  {"Emails", `BEFORE DELETE ON user_work BEGIN SELECT RAISE(IGNORE); END`},
		"nobody is ever deactivated":          {"Emails", `AFTER UPDATE ON users BEGIN UPDATE users SET active = 1; END`},
		"versions do not grow":                {"OneWinner", `AFTER UPDATE ON users BEGIN UPDATE users SET version = old.version WHERE id = old.id; END`},
		"groups are everybody's":              {"Groups", `AFTER INSERT ON principal_groups WHEN new.tenant = 't1' BEGIN UPDATE principal_groups SET tenant = 't2', name_key = new.id WHERE id = new.id; END`},
		"revocations are taken back":          {"Accounts", `AFTER UPDATE OF revoked ON accounts BEGIN UPDATE accounts SET revoked = 0; END`},
		"the newest token is forgotten":       {"Accounts", `AFTER UPDATE OF last_issued ON accounts BEGIN UPDATE accounts SET last_issued = old.last_issued WHERE issuer = old.issuer AND subject = old.subject; END`},
		"accounts keep an email that is left": {"Accounts", `BEFORE DELETE ON account_emails BEGIN SELECT RAISE(IGNORE); END`},
		"the lineage is lost":                 {"ServiceAccounts", `AFTER UPDATE OF lineage ON service_accounts BEGIN UPDATE service_accounts SET lineage = old.lineage; END`},
		"challenges are not used up":          {"ChallengesOnce", `AFTER DELETE ON challenges BEGIN INSERT INTO challenges VALUES (old.hash, old.bot, old.expires); END`},
		"tokens outlive their key":            {"Bots", `BEFORE DELETE ON bot_tokens BEGIN SELECT RAISE(IGNORE); END`},
		"uses are not in the audit":           {"Bots", `AFTER INSERT ON audit WHEN new.action = 'used' BEGIN DELETE FROM audit WHERE id = new.id; END`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "s.db")
			s, err := sqlite.Open(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			db, err := sql.Open("sqlite", "file:"+path)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if _, err := db.ExecContext(t.Context(), `CREATE TRIGGER mutant `+m.trigger); err != nil {
				t.Fatal(err)
			}
			r := &recorder{ctx: t.Context()}
			done := make(chan struct{})
			go func() { defer close(done); signintest.Cases()[m.of](r, s) }()
			<-done
			if !r.failed.Load() {
				t.Errorf("%s does not find that %s", m.of, name)
			}
		})
	}
}
