// SPDX-License-Identifier: Apache-2.0

package pgcluster

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func connect(ctx context.Context, url string) error {
	c, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return c.Close(ctx)
}

// A server that dies is started again on its port; one that is stopped is not. Data
// that was made without a password gets one.
func TestSuperviseAndPassword(t *testing.T) {
	parent, err := os.MkdirTemp("", "cell-pgcluster-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(parent) })
	if err := os.Chmod(parent, 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	o := Options{Dir: filepath.Join(parent, "c"), NoSync: true}
	c, err := Start(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop() })
	if err := connect(ctx, c.PublicURL("postgres")); err == nil {
		t.Fatal("no password is needed")
	}
	if err := c.Restart(ctx); err == nil {
		t.Fatal("a second server was started")
	}

	life, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	told := make(chan string, 100)
	wg.Go(func() { c.Supervise(life, func(what string, _ error) { told <- what }) })
	defer func() { end(); wg.Wait() }()
	pid := c.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for what := ""; what != "Postgres runs again"; {
		select {
		case what = <-told:
		case <-ctx.Done():
			t.Fatal("the dead server was not started again")
		}
	}
	if c.PID() == pid || connect(ctx, c.URL("postgres")) != nil {
		t.Fatal("the server does not run again")
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	end()
	wg.Wait()
	if len(told) > 0 || c.PID() != 0 {
		t.Fatalf("a stopped server was started again: %s", <-told)
	}

	hbaFile, secret := filepath.Join(o.Dir, "data", "pg_hba.conf"), filepath.Join(o.Dir, "password")
	if err := os.WriteFile(hbaFile, []byte(strings.ReplaceAll(hba, "scram-sha-256", "trust")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(secret); err != nil {
		t.Fatal(err)
	}
	old := c.URL("postgres")
	if c, err = Start(ctx, o); err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	if c.URL("postgres") == old || connect(ctx, c.PublicURL("postgres")) == nil {
		t.Error("the old data is still open")
	}
	if err := connect(ctx, c.URL("postgres")); err != nil {
		t.Error(err)
	}
}
