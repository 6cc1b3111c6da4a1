// SPDX-License-Identifier: Apache-2.0

// Package pgtest gives each test a database of its own on a real Postgres. One
// private cluster is started for each test binary, on first use, and ends with
// it; no test sees another's database.
package pgtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/internal/pgcluster"
)

var (
	mu      sync.Mutex
	shared  *pgcluster.Cluster
	dirs    []string
	all     []*pgcluster.Cluster
	counter atomic.Int64
)

// Main runs the tests of a package and stops its clusters. A package that uses
// pgtest has: func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }.
func Main(m interface{ Run() int }) int {
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range all {
			_ = c.Stop()
		}
		for _, d := range dirs {
			_ = os.RemoveAll(d)
		}
	}()
	return m.Run()
}

// Cluster returns the cluster that this test binary shares (fsync off).
func Cluster(tb testing.TB) *pgcluster.Cluster {
	tb.Helper()
	mu.Lock()
	defer mu.Unlock()
	if shared == nil {
		shared = start(tb, pgcluster.Options{NoSync: true})
	}
	return shared
}

// NewCluster starts another cluster, with the given options (Dir is set here).
func NewCluster(tb testing.TB, o pgcluster.Options) *pgcluster.Cluster {
	tb.Helper()
	mu.Lock()
	defer mu.Unlock()
	return start(tb, o)
}

func start(tb testing.TB, o pgcluster.Options) *pgcluster.Cluster {
	tb.Helper()
	// Not below tb.TempDir: its parents are closed to the server's user.
	dir, err := os.MkdirTemp("", "cell-pg-")
	if err != nil {
		tb.Fatal(err)
	}
	dirs = append(dirs, dir)
	o.Dir = filepath.Join(dir, "c")
	if err := os.Chmod(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := pgcluster.Start(ctx, o)
	if err != nil {
		tb.Fatalf("private Postgres: %v", err)
	}
	all = append(all, c)
	return c
}

// DB makes a new database on the shared cluster and returns its URL.
func DB(tb testing.TB) string {
	tb.Helper()
	return NewDB(tb, Cluster(tb))
}

// NewDB makes a new database on c and returns its URL.
func NewDB(tb testing.TB, c *pgcluster.Cluster) string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	name := fmt.Sprintf("t%d_%d", os.Getpid(), counter.Add(1))
	if err := c.CreateDatabase(ctx, name); err != nil {
		tb.Fatalf("create database: %v", err)
	}
	return c.URL(name)
}
