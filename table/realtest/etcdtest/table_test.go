// SPDX-License-Identifier: Apache-2.0

package etcdtest_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/etcd"
	"github.com/cloister-dev/cloister/table/realtest/etcdtest"
	"github.com/cloister-dev/cloister/table/tabletest"
)

// server is the one that the tests share, each below a prefix of its own.
var (
	server   *etcdtest.Server
	prefixes atomic.Int64
)

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	before := goleak.IgnoreCurrent()
	dir, err := os.MkdirTemp("", "etcdtest")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	if server, err = etcdtest.Start(dir); err != nil {
		return 1, err
	}
	code := m.Run()
	server.Close()
	if code != 0 {
		return code, nil
	}
	return 0, goleak.Find(before)
}

func prefix() string { return fmt.Sprintf("/test/%d/", prefixes.Add(1)) }

func config(endpoints ...string) clientv3.Config { return clientv3.Config{Endpoints: endpoints} }

// open opens a table with a short way of telling that a watch is alive.
func open(tb tabletest.TB, cfg clientv3.Config, opts ...etcd.Option) *etcd.Table {
	tb.Helper()
	t, err := etcd.Open(tb.Context(), cfg, append([]etcd.Option{etcd.WithWatchIdle(20 * time.Millisecond)}, opts...)...)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() { _ = t.Close() })
	return t
}

// client is a bare client of a server.
func client(t testing.TB, s *etcdtest.Server) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.URL}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func row(id cells.TenantID) cells.TenantRoute {
	return cells.TenantRoute{TenantID: id, State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
}

func stamped(r cells.TenantRoute, stamp string) cells.TenantRoute { r.Stamp = stamp; return r }

// compact forgets everything up to the store's present revision. The changes of the
// revision of the compaction itself are kept, hence the write before it.
func compact(tb tabletest.TB, c *clientv3.Client) {
	res, err := c.Put(tb.Context(), "compacted", "")
	if err == nil {
		_, err = c.Compact(tb.Context(), res.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err != nil {
		tb.Fatalf("%v", err)
	}
}

func TestConformance(t *testing.T) {
	// A server of its own, of which nothing has been compacted.
	server, err := etcdtest.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	bare := client(t, server)
	prefixOf := sync.Map{} // table -> prefix
	at := func(tb tabletest.TB, p string) cells.RoutingTable {
		table := open(tb, config(server.URL), etcd.WithPrefix(p))
		prefixOf.Store(table, p)
		return table
	}
	same := func(tb tabletest.TB, table cells.RoutingTable) cells.RoutingTable {
		p, _ := prefixOf.Load(table)
		return at(tb, p.(string))
	}
	tabletest.Run(t, tabletest.Harness{
		Open:    func(tb tabletest.TB) cells.RoutingTable { return at(tb, prefix()) },
		Another: same,
		Reopen: func(tb tabletest.TB, table cells.RoutingTable) cells.RoutingTable {
			if err := table.(*etcd.Table).Close(); err != nil {
				tb.Fatalf("%v", err)
			}
			return same(tb, table)
		},
		Compact: func(tb tabletest.TB, _ cells.RoutingTable) { compact(tb, bare) },
	})
}

// follow takes updates until the view includes rev, which must be soon.
func follow(t *testing.T, w cells.RouteWatcher, rev cells.Revision) (rows map[cells.TenantID]cells.TenantRoute) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	rows = map[cells.TenantID]cells.TenantRoute{}
	for at := cells.Revision(0); at < rev; {
		up, err := w.Next(ctx)
		if err != nil {
			t.Fatalf("at revision %d, on the way to %d: %v", at, rev, err)
		}
		for _, r := range up.Routes {
			if r.Revision <= at || r.Revision > up.Revision {
				t.Fatalf("%s at revision %d in an update from %d to %d", r.TenantID, r.Revision, at, up.Revision)
			}
			at = r.Revision
			rows[r.TenantID] = r
		}
		at = up.Revision
	}
	return rows
}

// failure takes updates until the watch breaks.
func failure(t *testing.T, w cells.RouteWatcher) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		if _, err := w.Next(ctx); err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				t.Fatal("the watch goes on")
			}
			return err
		}
	}
}

func watch(t *testing.T, table cells.RoutingTable, from cells.Revision) cells.RouteWatcher {
	t.Helper()
	w, err := table.Watch(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return w
}

func cas(t *testing.T, table cells.RoutingTable, old cells.Revision, next cells.TenantRoute) cells.TenantRoute {
	t.Helper()
	r, err := table.CompareAndSet(t.Context(), old, next)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
