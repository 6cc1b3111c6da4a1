// SPDX-License-Identifier: Apache-2.0

package kubetest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/kube"
	"github.com/cloister-dev/cloister/table/realtest/kubetest"
	"github.com/cloister-dev/cloister/table/tabletest"
)

// server is the one that the tests share, each in a namespace of its own.
var (
	server     *kubetest.Server
	namespaces atomic.Int64
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "kubetest")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	if server, err = kubetest.Start(dir); err != nil {
		return 1, err
	}
	defer server.Close()
	if err := server.Install(context.Background(), kube.CRD()); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

func namespace() string { return fmt.Sprintf("ns-%d", namespaces.Add(1)) }

func open(tb tabletest.TB, ns string, opts ...kube.Option) *kube.Table {
	tb.Helper()
	t, err := kube.Open(tb.Context(), server.Config, ns, append([]kube.Option{kube.WithWatchPeriod(3 * time.Second)}, opts...)...)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	tb.Cleanup(func() { _ = t.Close() })
	return t
}

func row(id cells.TenantID) cells.TenantRoute {
	return cells.TenantRoute{TenantID: id, State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
}

func stamped(r cells.TenantRoute, stamp string) cells.TenantRoute { r.Stamp = stamp; return r }

func cas(t *testing.T, table cells.RoutingTable, old cells.Revision, next cells.TenantRoute) cells.TenantRoute {
	t.Helper()
	r, err := table.CompareAndSet(t.Context(), old, next)
	if err != nil {
		t.Fatal(err)
	}
	return r
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

func TestConformance(t *testing.T) {
	namespaceOf := sync.Map{} // table -> namespace
	at := func(tb tabletest.TB, ns string) cells.RoutingTable {
		table := open(tb, ns)
		namespaceOf.Store(table, ns)
		return table
	}
	same := func(tb tabletest.TB, table cells.RoutingTable) cells.RoutingTable {
		ns, _ := namespaceOf.Load(table)
		return at(tb, ns.(string))
	}
	h := tabletest.Harness{
		Open:    func(tb tabletest.TB) cells.RoutingTable { return at(tb, namespace()) },
		Another: same,
		Reopen: func(tb tabletest.TB, table cells.RoutingTable) cells.RoutingTable {
			if err := table.(*kube.Table).Close(); err != nil {
				tb.Fatalf("%v", err)
			}
			return same(tb, table)
		},
		// The server's cache keeps the changes of about a minute, within which a slow
		// machine has to write these; TestGone lists more than one chunk.
		Backlog: 150,
	}
	// The cases wait for bookmarks, one every few seconds, rather than for the machine.
	for _, c := range tabletest.Cases(h) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			c.Run(t, h)
		})
	}
}
