// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/directory/postgres"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func exec(t *testing.T, url string, queries ...string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	for _, q := range queries {
		if _, err := conn.Exec(t.Context(), q); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
}

// A build that knows the schema before this one runs every query of its own on a
// database that this build has migrated, beside it.
func TestOlderBuildRunsOn(t *testing.T) {
	url := pgtest.DB(t)
	n := 0
	directorytest.Run(t, func(t *testing.T) directorytest.Harness {
		n++
		o := postgres.Options{Schema: fmt.Sprintf("s%d", n), AllowAsynchronous: true, Connections: 6}
		now, err := postgres.Open(t.Context(), url, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = now.Close() })
		return directorytest.Harness{Open: func(ctx context.Context) (directory.Store, error) { return postgres.OpenAs(ctx, url, o, 9) }}
	})
	// A build that is too old for the schema, or for one that does not say.
	o := postgres.Options{Schema: "s1", AllowAsynchronous: true}
	exec(t, url, `UPDATE s1.meta SET value = 10 WHERE name = 'needs_schema'`)
	if _, err := postgres.OpenAs(t.Context(), url, o, 9); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "newer build") {
		t.Errorf("a build that is too old: %v", err)
	}
	exec(t, url, `DELETE FROM s1.meta WHERE name = 'needs_schema'`)
	if _, err := postgres.OpenAs(t.Context(), url, o, 9); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a schema that says nothing: %v", err)
	}
}

// Members of a cell's document that a newer build has written survive this build's
// changes.
func TestNewerMembersAreKept(t *testing.T) {
	url := pgtest.DB(t)
	s, err := postgres.Open(t.Context(), url, postgres.Options{AllowAsynchronous: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	audit := api.AuditEntry{At: time.Now(), Action: "test"}
	change := func(r deploy.Rule) {
		t.Helper()
		if _, err := s.Deployments().Change(t.Context(), "one", r, audit); err != nil {
			t.Fatal(err)
		}
	}
	yes := true
	change(deploy.Register(deploytest.First("one")))
	exec(t, url, `UPDATE directory.deployment_cells SET doc = jsonb_set(doc::jsonb, '{later}', '"kept"')::json`)
	change(deploy.Limit(&yes, nil))
	no := false
	change(deploy.Limit(&no, nil))
	var later, closed string
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRowContext(t.Context(), `SELECT doc ->> 'later', coalesce(doc ->> 'closed', 'absent') FROM directory.deployment_cells`).Scan(&later, &closed); err != nil || later != "kept" || closed != "absent" {
		t.Errorf("the document has later %q, closed %q, %v", later, closed, err)
	}
}

// The database itself keeps placements, receipts and the audit as they are.
func TestNeverChanged(t *testing.T) {
	url := pgtest.DB(t)
	s, err := postgres.Open(t.Context(), url, postgres.Options{AllowAsynchronous: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	audit := api.AuditEntry{At: time.Now(), Action: "test"}
	a := deploy.Attachment{Current: deploytest.Fingerprint("one", "app.example.com"), Tenants: []cells.TenantID{"t"}}
	for _, r := range []deploy.Rule{deploy.Register(deploytest.First("one")), deploy.Attach(a)} {
		if _, err := s.Deployments().Change(t.Context(), "one", r, audit); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	for _, q := range []string{
		`UPDATE directory.deployment_placements SET actor = 'x'`, `DELETE FROM directory.deployment_placements`,
		`TRUNCATE directory.deployment_placements`, `DELETE FROM directory.deployment_cells`, `UPDATE directory.audit SET actor = 'x'`,
		`DELETE FROM directory.audit`, `TRUNCATE directory.audit`,
	} {
		if _, err := conn.Exec(t.Context(), `SET search_path = directory; `+q); err == nil || !strings.Contains(err.Error(), "never") {
			t.Errorf("%s: %v", q, err)
		}
	}
}

// Without a synchronous standby the store is not opened, or says so; one that goes
// away makes it unready.
func TestStandbyIsRequired(t *testing.T) {
	primary := pgtest.NewCluster(t, pgcluster.Options{NoSync: true, Settings: []string{"wal_level=logical", "max_wal_senders=10", "hot_standby=on"}})
	url := pgtest.NewDB(t, primary)
	open := func(allow bool, log *bytes.Buffer) (*postgres.Store, error) {
		return postgres.Open(t.Context(), url, postgres.Options{AllowAsynchronous: allow, Logger: slog.New(slog.NewTextHandler(log, nil))})
	}
	var log bytes.Buffer
	if _, err := open(false, &log); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "synchronous standby") {
		t.Fatalf("no standby: %v", err)
	}
	s, err := open(true, &log)
	if err != nil || !strings.Contains(log.String(), "level=ERROR") {
		t.Fatalf("no standby, allowed: %v, %s", err, log.String())
	}
	if err := errors.Join(s.Ping(t.Context()), s.Close()); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "cell-pg-standby-") // not below t.TempDir: the server's user cannot go there
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	standby, err := primary.Standby(t.Context(), filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = standby.Stop() }()
	exec(t, url, `ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'`, `SELECT pg_reload_conf()`)
	until := func(what string, ok func() bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for !ok() {
			select {
			case <-ctx.Done():
				t.Fatalf("waited for %s", what)
			case <-tick.C:
			}
		}
	}
	var strict *postgres.Store
	log.Reset()
	until("the configuration", func() bool {
		var err error
		strict, err = open(false, &log)
		return err == nil
	})
	defer strict.Close()
	until("a standby that streams", func() bool { return strict.Ping(t.Context()) == nil })
	log.Reset()
	if err := errors.Join(strict.Ping(t.Context()), strict.AppendAudit(t.Context(), api.AuditEntry{At: time.Now(), Action: "x"})); err != nil || log.Len() > 0 {
		t.Errorf("with a standby: %v, %s", err, log.String())
	}
	if err := standby.Kill(); err != nil {
		t.Fatal(err)
	}
	until("unreadiness", func() bool { return errors.Is(strict.Ping(t.Context()), cells.ErrUnavailable) })
	// A change waits for the standby, and its outcome is then unknown.
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := strict.AppendAudit(ctx, api.AuditEntry{At: time.Now(), Action: "y"}); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a change without the standby: %v", err)
	}
	// A process that starts now does start, and says so.
	late, err := open(false, &log)
	if err != nil || !strings.Contains(log.String(), "0 of 1 synchronous standbys") {
		t.Fatalf("started without the standby: %v, %s", err, log.String())
	}
	if _, err := late.Deployments().Read(t.Context()); err != nil {
		t.Error(err)
	}
	if err := late.Close(); err != nil {
		t.Error(err)
	}
	if list, err := strict.Audit(t.Context(), directory.AuditFilter{}); err != nil || len(list) < 1 {
		t.Errorf("reads go on: %v, %v", list, err)
	}
}

// A directory that stands still in a change holds the others up for a bounded time.
func TestStuckChange(t *testing.T) {
	url := pgtest.DB(t)
	s, err := postgres.Open(t.Context(), url, postgres.Options{AllowAsynchronous: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var wg sync.WaitGroup
	holding, release := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		_, _ = s.Deployments().Change(t.Context(), "one", func(*deploy.Change) error {
			close(holding)
			<-release
			return errors.New("given up")
		}, api.AuditEntry{})
	})
	<-holding
	began := time.Now()
	err = s.AppendAudit(t.Context(), api.AuditEntry{At: time.Now(), Action: "x"})
	if took := time.Since(began); !errors.Is(err, cells.ErrUnavailable) || took < time.Second || took > 15*time.Second {
		t.Errorf("another change: %v after %v, want ErrUnavailable after the lock's timeout", err, took)
	}
	if _, err := s.Deployments().Read(t.Context()); err != nil {
		t.Errorf("reads take no lock: %v", err)
	}
	close(release)
	wg.Wait()
	if err := s.AppendAudit(t.Context(), api.AuditEntry{At: time.Now(), Action: "x"}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
