// SPDX-License-Identifier: Apache-2.0

package etcdtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/etcd"
	"github.com/cloister-dev/cloister/table/realtest/etcdtest"
)

// streams reports the begin and the end of each watch stream of a client.
func streams(cfg *clientv3.Config) (begun, ended chan struct{}) {
	begun, ended = make(chan struct{}, 1000), make(chan struct{}, 1000)
	cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainStreamInterceptor(
		func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if !strings.HasSuffix(method, "/Watch") {
				return streamer(ctx, desc, cc, method, opts...)
			}
			s, err := streamer(ctx, desc, cc, method, opts...)
			if err == nil {
				begun <- struct{}{}
				context.AfterFunc(s.Context(), func() { ended <- struct{}{} })
			}
			return s, err
		}))
	return begun, ended
}

// now is the table's revision. Other tests compact what was before.
func now(t *testing.T, table cells.RoutingTable) cells.Revision {
	t.Helper()
	page, err := table.List(t.Context(), cells.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return page.Revision
}

func soon(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(time.Minute):
		t.Fatalf("not seen: %s", what)
	}
}

// A watch that nobody reads gives its stream up, and goes on from there when it is
// read again.
func TestSlowWatcher(t *testing.T) {
	p := prefix()
	cfg := config(server.URL)
	begun, ended := streams(&cfg)
	table := open(t, cfg, etcd.WithPrefix(p), etcd.WithWatchQueue(16))
	from := now(t, table)
	w := watch(t, table, from)
	soon(t, "the stream", begun)
	other := open(t, config(server.URL), etcd.WithPrefix(p))
	fast := watch(t, other, from) // is not held up
	const n = 300
	want := map[cells.TenantID]cells.Revision{}
	var last cells.Revision
	for i := range n {
		r := cas(t, other, 0, row(cells.TenantID(fmt.Sprintf("t%03d", i))))
		want[r.TenantID], last = r.Revision, r.Revision
	}
	soon(t, "the end of the stream that nobody reads", ended)
	select {
	case <-begun:
		t.Error("the stream is begun again although nobody reads")
	default:
	}
	for name, rows := range map[string]map[cells.TenantID]cells.TenantRoute{"fast": follow(t, fast, last), "slow": follow(t, w, last)} {
		if len(rows) != n {
			t.Errorf("the %s watch saw %d rows, want %d", name, len(rows), n)
		}
		for id, rev := range want {
			if rows[id].Revision != rev {
				t.Errorf("the %s watch has %s at revision %d, want %d", name, id, rows[id].Revision, rev)
			}
		}
	}
	soon(t, "the stream that goes on", begun)
}

// Compaction beyond where a slow watch is: it hands out what it has and then says
// so; nothing is passed over in silence.
func TestCompactionDuringWatch(t *testing.T) {
	p := prefix()
	bare := client(t, server)
	cfg := config(server.URL)
	begun, ended := streams(&cfg)
	table := open(t, cfg, etcd.WithPrefix(p), etcd.WithWatchQueue(4))
	w := watch(t, table, now(t, table))
	soon(t, "the stream", begun)
	var last cells.Revision
	for i := range 4 {
		last = cas(t, table, 0, row(cells.TenantID(fmt.Sprintf("t%d", i)))).Revision
	}
	soon(t, "the end of the stream", ended)
	r := cas(t, table, last, row("t3"))
	cas(t, table, r.Revision, row("t3"))
	compact(t, bare)
	up, err := w.Next(t.Context())
	if err != nil || len(up.Routes) == 0 || up.Revision > last {
		t.Fatalf("what was received before the compaction: %+v, %v", up, err)
	}
	if err := failure(t, w); !errors.Is(err, cells.ErrCompacted) {
		t.Fatalf("after the compaction: %v, want ErrCompacted", err)
	}
}

// A router that was cut off while the table changed and was compacted lists again
// and agrees with the table.
func TestRouterAfterCompaction(t *testing.T) {
	proxy, err := etcdtest.NewProxy(strings.TrimPrefix(server.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	p := prefix()
	direct := open(t, config(server.URL), etcd.WithPrefix(p))
	r := cas(t, direct, 0, row("t"))
	router := cells.NewRouter(open(t, config("http://"+proxy.Addr()), etcd.WithPrefix(p), etcd.WithSilence(100*time.Millisecond)))
	if err := router.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = router.Close() })
	proxy.Cut(true)
	for range 3 {
		r.EventMark++
		r = cas(t, direct, r.Revision, r)
	}
	compact(t, client(t, server))
	proxy.Cut(false)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if _, err := router.Wait(ctx, "t", r.Revision-1); err != nil {
		t.Fatal(err)
	}
	if got := router.Lookup("t"); got.Route.EventMark != 3 || got.Revision < r.Revision {
		t.Fatalf("the router has %+v, want revision %d", got, r.Revision)
	}
}

// A row that was removed by other means ends the watch, so that whoever follows
// lists again. Rows that hang on a lease are refused before that.
func TestLease(t *testing.T) {
	bare := client(t, server)
	p := prefix()
	table := open(t, config(server.URL), etcd.WithPrefix(p))
	r := cas(t, table, 0, row("t"))
	w := watch(t, table, r.Revision)
	lease, err := bare.Grant(t.Context(), 60)
	if err != nil {
		t.Fatal(err)
	}
	stored, err := bare.Get(t.Context(), p+"routes/t")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bare.Put(t.Context(), p+"routes/t", string(stored.Kvs[0].Value), clientv3.WithLease(lease.ID)); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Get(t.Context(), "t"); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "lease") {
		t.Errorf("a row with a lease: %v, want ErrInvalid", err)
	}
	if err := failure(t, w); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("watching a row with a lease: %v, want ErrInvalid", err)
	}
	res, err := bare.Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	w = watch(t, table, cells.Revision(res.Header.Revision))
	if _, err := bare.Revoke(t.Context(), lease.ID); err != nil {
		t.Fatal(err)
	}
	if err := failure(t, w); !errors.Is(err, cells.ErrCompacted) {
		t.Errorf("watching a row that vanished with its lease: %v, want ErrCompacted", err)
	}
}
