// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	guardpostgres "github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/postgres"
)

// TestReplicaLag moves a tenant into a server with a standby that replays nothing for a
// while: copying waits, says for what, and goes on when the standby does.
func TestReplicaLag(t *testing.T) {
	if testing.Short() {
		t.Skip("starts two servers of its own")
	}
	ctx := t.Context()
	primary := pgtest.NewCluster(t, pgcluster.Options{NoSync: true})
	dir, err := os.MkdirTemp("", "cell-standby-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	standby, err := primary.Standby(ctx, filepath.Join(dir, "standby"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = standby.Stop() })

	a := newRig(t, "cell-a", toasted, toastedTables)
	if err := a.guard.OpenFence(ctx, cells.FenceOrder{Cell: "cell-a", Tenant: "t", Epoch: 5, Floor: 5}); err != nil {
		t.Fatal(err)
	}
	a.write("INSERT INTO doc SELECT 't', g, g, 'x' FROM generate_series(1, 50) g")
	url := pgtest.NewDB(t, primary)
	b := newRigAt(t, url, "cell-b", toasted, toastedTables)
	lag := func() time.Duration {
		t.Helper()
		d, err := b.store.ReplicaLag(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	waitFor(t, "the standby to have replayed everything", func() bool { return lag() < 100*time.Millisecond })
	// A lag of nothing is also that of a standby which has not begun to replay.
	var onStandby *pgx.Conn
	waitFor(t, "the standby to have the database", func() bool {
		onStandby, err = pgx.Connect(ctx, strings.Replace(url, "127.0.0.1:"+portOf(primary), "127.0.0.1:"+portOf(standby), 1))
		return err == nil
	})
	defer onStandby.Close(context.Background())
	replay := func(what string) {
		t.Helper()
		if _, err := onStandby.Exec(ctx, "SELECT pg_wal_replay_"+what+"()"); err != nil {
			t.Fatal(err)
		}
	}
	replay("pause")
	waitFor(t, "the lag to be seen", func() bool {
		b.exec("SELECT pg_logical_emit_message(true, 'test', 'something to replay')")
		return lag() > 300*time.Millisecond
	})
	waiting, copied := make(chan string, 1), make(chan struct{}, 1)
	done := make(chan error, 1)
	v := agentOf(t, b, transfer.WithCheckEvery(10*time.Millisecond), transfer.WithFollow(0))
	go func() {
		_, err := v.Prepare(transfer.ContextWithLimits(ctx, transfer.Limits{MaxReplicaLag: 200 * time.Millisecond}), shapeMove, a.store, func(p cells.Progress) {
			if p.Waiting != "" {
				select {
				case waiting <- p.Waiting:
				default:
				}
				return
			}
			if p.Done > 0 {
				select {
				case copied <- struct{}{}:
				default:
				}
			}
		})
		done <- err
	}()
	select {
	case w := <-waiting:
		if !strings.HasPrefix(w, "a standby of cell cell-b is ") {
			t.Errorf("it waits: %s", w)
		}
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	}
	replay("resume")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	<-copied
	finish(t, v, a)
	equalTables(t, a, b, toastedTables)

	// The standby itself can be no end of a move.
	pool, err := pgxpool.New(ctx, onStandby.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	g, err := guardpostgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	waitFor(t, "the schema at the standby", func() bool {
		var there bool
		return pool.QueryRow(ctx, "SELECT to_regclass('cell.transfer_key') IS NOT NULL").Scan(&there) == nil && there
	})
	s, err := postgres.Open(ctx, postgres.Config{Pool: pool, Keeper: g, Admit: g.AdmitClosed, Tables: toastedTables})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	out, err := s.Survey(ctx, "t")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(out.Findings, func(f cells.Finding) bool { return f.Code == transfer.FindStandby && f.Blocking }) {
		t.Errorf("findings of a standby: %+v", out.Findings)
	}
}

// TestBlockers: a transaction that holds a view up is named while the view waits, without
// what it does.
func TestBlockers(t *testing.T) {
	ctx := t.Context()
	a, b := pairOf(t, toasted, toastedTables)
	a.write("INSERT INTO doc SELECT 't', g, g, 'x' FROM generate_series(1, 50) g")
	a.store.Patience(time.Millisecond)
	cfg := a.pool.Config().ConnConfig.Copy()
	cfg.RuntimeParams["application_name"] = "nightly report"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(ctx, "BEGIN; CREATE TABLE slow (v text); INSERT INTO slow VALUES ('secret value')"); err != nil {
		t.Fatal(err)
	}
	waiting, done := make(chan string, 1), make(chan error, 1)
	v := agentOf(t, b, transfer.WithCheckEvery(10*time.Millisecond))
	go func() {
		_, err := v.Prepare(ctx, shapeMove, a.store, func(p cells.Progress) {
			if strings.Contains(p.Waiting, "nightly report") {
				select {
				case waiting <- p.Waiting:
				default:
				}
			}
		})
		done <- err
	}()
	select {
	case w := <-waiting:
		for _, want := range []string{"a view of cell cell-a waits", "pid ", "user postgres", "application nightly report", "idle in transaction", "last statement at "} {
			if !strings.Contains(w, want) {
				t.Errorf("%q does not say %q", w, want)
			}
		}
		if strings.Contains(w, "secret") || strings.Contains(w, "INSERT") {
			t.Errorf("it tells what the transaction does: %s", w)
		}
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	}
	if _, err := conn.Exec(ctx, "COMMIT"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func portOf(c *pgcluster.Cluster) string { return strconv.Itoa(c.Port) }
