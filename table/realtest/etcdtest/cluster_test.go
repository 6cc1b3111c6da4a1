// SPDX-License-Identifier: Apache-2.0

package etcdtest_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"context"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/etcd"
	"github.com/cloister-dev/cloister/table/realtest/etcdtest"
)

func cluster(t *testing.T) ([]*etcdtest.Server, []string) {
	t.Helper()
	members, err := etcdtest.StartCluster(t.TempDir(), 3)
	if err != nil {
		t.Fatal(err)
	}
	var urls []string
	for _, m := range members {
		t.Cleanup(func() { m.Close() })
		urls = append(urls, m.URL)
	}
	return members, urls
}

// leader returns the index of the member that leads, once one does.
func leader(t *testing.T, members []*etcdtest.Server) int {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-tick.C {
		for i, m := range members {
			if m.Server.Leader() == m.Server.MemberID() {
				return i
			}
		}
	}
	t.Fatal("nobody leads")
	return 0
}

// add adds one to the tenant's EventMark for certain: after an unknown outcome it
// looks for its own stamp. It says how often that was needed.
func add(ctx context.Context, table cells.RoutingTable, id cells.TenantID, stamp string) (unknown int, err error) {
	for try := 0; ; try++ {
		r, err := table.Get(ctx, id)
		switch {
		case errors.Is(err, cells.ErrNotFound):
			r = row(id)
		case errors.Is(err, cells.ErrUnavailable):
			continue
		case err != nil:
			return unknown, err
		}
		if r.Stamp == stamp {
			return unknown, nil
		}
		old := r.Revision
		r.EventMark++
		r.Stamp = stamp
		_, err = table.CompareAndSet(ctx, old, r)
		switch {
		case err == nil:
			return unknown, nil
		case errors.Is(err, cells.ErrUnavailable):
			unknown++
		case !errors.Is(err, cells.ErrConflict):
			return unknown, err
		}
	}
}

// While the leadership is handed over, and while the leader is stopped, every
// change that was acknowledged is kept once, and a watch misses none.
func TestLeaderChange(t *testing.T) {
	members, urls := cluster(t)
	table := open(t, config(urls...), etcd.WithTimeout(2*time.Second))
	w := watch(t, table, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	const writers = 3
	counts, errs := [writers]cells.EventSeq{}, [writers]error{}
	var mu sync.Mutex // guards progress
	progress := 0
	for n := range writers {
		wg.Go(func() {
			// A tenant of its own each, so that nobody overwrites a stamp that is looked for.
			id := cells.TenantID(fmt.Sprintf("t%d", n))
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if _, errs[n] = add(ctx, table, id, fmt.Sprintf("%d-%d", n, i)); errs[n] != nil {
					return
				}
				counts[n]++
				mu.Lock()
				progress++
				mu.Unlock()
			}
		})
	}
	// more waits until changes go through again.
	more := func() {
		t.Helper()
		mu.Lock()
		from := progress
		mu.Unlock()
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for deadline := time.Now().Add(60 * time.Second); ; <-tick.C {
			mu.Lock()
			now := progress
			mu.Unlock()
			if now >= from+30 {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d changes since, %v", now-from, errs)
			}
		}
	}
	more()
	for range 2 {
		at := leader(t, members)
		to := members[(at+1)%3].Server.MemberID()
		if err := members[at].Server.MoveLeader(ctx, uint64(members[at].Server.MemberID()), uint64(to)); err != nil {
			t.Fatal(err)
		}
		more()
	}
	stopped := leader(t, members)
	members[stopped].Close()
	more()
	if err := members[stopped].Restart(); err != nil {
		t.Fatal(err)
	}
	more()
	close(stop)
	wg.Wait()
	page, err := table.List(ctx, cells.ListOptions{})
	if err != nil || len(page.Routes) != writers {
		t.Fatalf("%+v, %v", page, err)
	}
	for n, r := range page.Routes {
		if errs[n] != nil || r.EventMark != counts[n] {
			t.Errorf("%s: %d changes were acknowledged, the row counts %d (%v)", r.TenantID, counts[n], r.EventMark, errs[n])
		}
	}
	// The watch may have broken with the leader; whoever follows begins again from
	// where it was.
	at, seen := cells.Revision(0), map[cells.TenantID]cells.TenantRoute{}
	for at < page.Revision {
		up, err := w.Next(ctx)
		if errors.Is(err, cells.ErrUnavailable) {
			_ = w.Close()
			w = watch(t, table, at)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range up.Routes {
			if seen[r.TenantID].EventMark+1 != r.EventMark {
				t.Fatalf("%s went from %d to %d in the watch", r.TenantID, seen[r.TenantID].EventMark, r.EventMark)
			}
			seen[r.TenantID] = r
		}
		at = up.Revision
	}
}

// Without a majority nothing is acknowledged and no watch pretends to be current.
func TestNoMajority(t *testing.T) {
	members, urls := cluster(t)
	table := open(t, config(urls...), etcd.WithTimeout(time.Second), etcd.WithSilence(2*time.Second))
	r := cas(t, table, 0, row("t"))
	w := watch(t, table, r.Revision)
	members[1].Close()
	members[2].Close()
	next := stamped(r, "without a majority")
	if _, err := table.CompareAndSet(t.Context(), r.Revision, next); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a change without a majority: %v, want ErrUnavailable", err)
	}
	if _, err := table.Get(t.Context(), "t"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a read without a majority: %v, want ErrUnavailable", err)
	}
	if err := failure(t, w); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a watch without a majority: %v, want ErrUnavailable", err)
	}
	if err := members[1].Restart(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if _, err := add(ctx, table, "t", "with one"); err != nil {
		t.Fatal(err)
	}
}

// A client on a path that swallows answers: reads and watches end in bounded time,
// the change that was made meanwhile is found by its stamp.
func TestPartition(t *testing.T) {
	proxy, err := etcdtest.NewProxy(strings.TrimPrefix(server.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	p := prefix()
	direct := open(t, config(server.URL), etcd.WithPrefix(p))
	table := open(t, config("http://"+proxy.Addr()), etcd.WithPrefix(p), etcd.WithTimeout(500*time.Millisecond), etcd.WithSilence(500*time.Millisecond))
	r := cas(t, table, 0, row("t"))
	w := watch(t, table, r.Revision)
	if _, err := w.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	proxy.Mute(true)
	begun := time.Now()
	if _, err := table.Get(t.Context(), "t"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a read: %v, want ErrUnavailable", err)
	}
	if _, err := table.CompareAndSet(t.Context(), r.Revision, stamped(r, "lost")); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a change: %v, want ErrUnavailable", err)
	}
	if err := failure(t, w); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a watch: %v, want ErrUnavailable", err)
	}
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("that took %s", took)
	}
	other := cas(t, direct, 0, row("u"))
	proxy.Mute(false)
	proxy.Cut(true)
	proxy.Cut(false)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for err = cells.ErrUnavailable; errors.Is(err, cells.ErrUnavailable); {
		_, err = table.Get(ctx, "t")
	}
	if err != nil {
		t.Fatal(err)
	}
	if rows := follow(t, watch(t, table, r.Revision), other.Revision); rows["u"].Revision != other.Revision {
		t.Errorf("a watch from before the partition sees %+v", rows)
	}
}
