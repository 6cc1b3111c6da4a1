// SPDX-License-Identifier: Apache-2.0

package kubetest_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"k8s.io/client-go/rest"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/kube"
	"github.com/cloister-dev/cloister/table/realtest/kubetest"
)

type tripper func(*http.Request) (*http.Response, error)

func (f tripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A compare-and-set whose answer is lost takes its own write for its own, and no
// other.
func TestLostAnswer(t *testing.T) {
	other := func(t *testing.T, table *kube.Table, then ...string) {
		cur, err := table.Get(t.Context(), "t")
		if errors.Is(err, cells.ErrNotFound) {
			cur, err = row("t"), nil
		}
		if err != nil {
			t.Error(err)
		}
		for _, stamp := range then {
			cur = cas(t, table, cur.Revision, stamped(cur, stamp))
		}
	}
	for name, c := range map[string]struct {
		stamp     string
		send      bool // the request is carried out before its answer is lost
		meanwhile func(t *testing.T, table *kube.Table)
		want      error
	}{
		"carried out":                 {stamp: "mine", send: true},
		"not carried out":             {stamp: "mine", want: cells.ErrUnavailable},
		"another won":                 {stamp: "mine", want: cells.ErrConflict, meanwhile: func(t *testing.T, table *kube.Table) { other(t, table, "other") }},
		"carried out and overwritten": {stamp: "mine", send: true, want: cells.ErrUnavailable, meanwhile: func(t *testing.T, table *kube.Table) { other(t, table, "other") }},
		"without a stamp":             {send: true, want: cells.ErrUnavailable},
	} {
		for _, create := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/create=%v", name, create), func(t *testing.T) {
				ns := namespace()
				direct := open(t, ns)
				armed := false
				cfg := rest.CopyConfig(server.Config)
				cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
					return tripper(func(r *http.Request) (*http.Response, error) {
						if !armed || r.Method != http.MethodPut || !strings.HasSuffix(r.URL.Path, "/status") {
							return next.RoundTrip(r)
						}
						armed = false
						if c.send {
							res, err := next.RoundTrip(r)
							if err != nil || res.StatusCode != http.StatusOK {
								t.Errorf("%+v, %v", res, err)
							} else {
								_ = res.Body.Close()
							}
						}
						if c.meanwhile != nil {
							c.meanwhile(t, direct)
						}
						return nil, errors.New("the answer was lost")
					})
				})
				table, err := kube.Open(t.Context(), cfg, ns)
				if err != nil {
					t.Fatal(err)
				}
				defer table.Close()
				next := row("t")
				if !create {
					next = cas(t, table, 0, stamped(next, "first"))
				}
				old := next.Revision
				next.EventMark, next.Stamp = 9, c.stamp
				armed = true
				got, err := table.CompareAndSet(t.Context(), old, next)
				if armed {
					t.Fatal("no change was sent")
				}
				if !errors.Is(err, c.want) {
					t.Fatalf("%+v, %v; want %v", got, err, c.want)
				}
				if c.want == cells.ErrUnavailable && (!strings.Contains(err.Error(), "unknown") || !strings.Contains(err.Error(), "the answer was lost")) {
					t.Errorf("the error says %q", err)
				}
				if now, getErr := direct.Get(t.Context(), "t"); err == nil && (getErr != nil || now.Revision != got.Revision || now.Stamp != "mine") {
					t.Errorf("the table has %+v, %v; want revision %d", now, getErr, got.Revision)
				}
			})
		}
	}
}

// What the server's store has compacted is Gone: a watch says so, and a list that
// was under way begins again.
func TestGone(t *testing.T) {
	t.Parallel()
	s, err := kubetest.Start(t.TempDir(), "--watch-cache=false")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if _, err := kube.Open(t.Context(), s.Config, "fleet"); !errors.Is(err, cells.ErrUnavailable) || !strings.Contains(err.Error(), "CRD") {
		t.Errorf("without the CRD: %v", err)
	}
	// An older CRD: a field that it does not know is refused, not dropped.
	old := bytes.Replace(kube.CRD(), []byte("                    stamp: {type: string, maxLength: 128}\n"), nil, 1)
	if bytes.Equal(old, kube.CRD()) {
		t.Fatal("the CRD has no field to take away")
	}
	if err := s.Install(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	table, err := kube.Open(t.Context(), s.Config, "fleet", kube.WithWatchPeriod(3*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = table.Close() })
	if _, err := table.CompareAndSet(t.Context(), 0, stamped(row("t"), "novel")); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "stamp") {
		t.Errorf("a field that the CRD does not know: %v, want ErrInvalid", err)
	}
	if _, err := table.Get(t.Context(), "t"); !errors.Is(err, cells.ErrNotFound) {
		t.Errorf("the refused row is there: %v", err)
	}
	if err := s.Install(t.Context(), kube.CRD()); err != nil {
		t.Fatal(err)
	}
	const n = 520 // the second page needs a request of its own
	var first, last cells.TenantRoute
	for i := range n {
		last = cas(t, table, 0, row(cells.TenantID(fmt.Sprintf("t-%03d", i))))
		if i == 0 {
			first = last
		}
	}
	page, err := table.List(t.Context(), cells.ListOptions{Limit: 400})
	if err != nil || len(page.Routes) != 400 || page.Next == "" {
		t.Fatalf("%d rows, %v", len(page.Routes), err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Etcd.URL}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	last = cas(t, table, last.Revision, last)
	changed := cas(t, table, last.Revision, last)
	if _, err := c.Compact(t.Context(), int64(changed.Revision), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	rest, err := table.List(t.Context(), cells.ListOptions{Limit: 400, After: page.Next})
	if err != nil || len(rest.Routes) != n-400 || rest.Next != "" || rest.Routes[len(rest.Routes)-1].Revision != changed.Revision || rest.Revision < changed.Revision {
		t.Errorf("the second page after a compaction at %d (the first was of %d): %d rows at %d, next %q, %v; the last row is %+v", changed.Revision, page.Revision, len(rest.Routes), rest.Revision, rest.Next, err, rest.Routes[len(rest.Routes)-1])
	}
	if err := failure(t, watch(t, table, first.Revision)); !errors.Is(err, cells.ErrCompacted) {
		t.Errorf("a watch of what was compacted: %v, want ErrCompacted", err)
	}
	// Without a watch cache, too, a quiet watch says how far it is.
	w := watch(t, table, changed.Revision)
	if up, err := w.Next(t.Context()); err != nil || len(up.Routes) != 0 || up.Revision < changed.Revision {
		t.Errorf("a quiet watch: %+v, %v", up, err)
	}
}

// A server that does not answer is given up in bounded time.
func TestSilentServer(t *testing.T) {
	ns := namespace()
	cas(t, open(t, ns), 0, row("t"))
	cfg := rest.CopyConfig(server.Config)
	silent := false
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return tripper(func(r *http.Request) (*http.Response, error) {
			if silent {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			return next.RoundTrip(r)
		})
	})
	table, err := kube.Open(t.Context(), cfg, ns, kube.WithTimeout(200*time.Millisecond), kube.WithWatchPeriod(3*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	w := watch(t, table, 0)
	silent = true
	_, getErr := table.Get(t.Context(), "t")
	_, listErr := table.List(t.Context(), cells.ListOptions{})
	_, casErr := table.CompareAndSet(t.Context(), 0, row("u"))
	for what, err := range map[string]error{"Get": getErr, "List": listErr, "CompareAndSet": casErr, "Watch": failure(t, w)} {
		if !errors.Is(err, cells.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", what, err)
		}
	}
}

// Where the server's store says nothing about its progress, bookmarks stand still
// while others write: a list brings the view up, and loses nothing.
func TestBookmarksStandStill(t *testing.T) {
	t.Parallel()
	cfg := rest.CopyConfig(server.Config)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return tripper(func(r *http.Request) (*http.Response, error) {
			if q := r.URL.Query(); q.Get("watch") != "" { // without bookmarks, and of what never changes
				q.Set("allowWatchBookmarks", "false")
				q.Set("fieldSelector", "metadata.name=none")
				r = r.Clone(r.Context())
				r.URL.RawQuery = q.Encode()
			}
			return next.RoundTrip(r)
		})
	})
	table, err := kube.Open(t.Context(), cfg, namespace(), kube.WithWatchPeriod(3*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = table.Close() })
	first := cas(t, table, 0, row("t"))
	w := watch(t, table, first.Revision)
	changed := cas(t, table, first.Revision, stamped(first, "unseen"))
	for signs := 0; ; signs++ {
		up, err := w.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(up.Routes) == 1 && up.Routes[0].Revision == changed.Revision && up.Revision >= changed.Revision {
			return
		}
		if len(up.Routes) != 0 || up.Revision != first.Revision || signs > 5 {
			t.Fatalf("after %d signs of life: %+v", signs, up)
		}
	}
}
