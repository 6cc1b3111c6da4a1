// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cloister-dev/cloister/cells"
)

// How requests end at the gates is told once for each, over both protocols.
func TestServed(t *testing.T) {
	noLeaks(t)
	var mu sync.Mutex
	var got []cells.Served
	last := func(n int) cells.Served {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if len(got) != n {
			t.Fatalf("told of %d requests, want %d: %+v", len(got), n, got)
		}
		return got[n-1]
	}
	svc, _ := acmeService(t, cells.WithServed(func(s cells.Served) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, s)
	}))
	svc.http.Config.ErrorLog = nil
	for i, c := range []struct {
		name string
		h    http.Header
		do   http.HandlerFunc
		want cells.Served
	}{
		{"nothing written", toAcme, nil, cells.Served{Status: 200}},
		{"a body", toAcme, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "x") }, cells.Served{Status: 200}},
		{"an error", toAcme, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "x", 503) }, cells.Served{Status: 503}},
		{"a refusal by the handler", toAcme, func(w http.ResponseWriter, r *http.Request) {
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeBackendUnavailable})
		}, cells.Served{Answer: cells.CodeBackendUnavailable, Status: 503}},
		{"a refusal by the gate", hdr(cells.HeaderTenant, "nobody", cells.HeaderEpoch, "4"), nil, cells.Served{Answer: cells.CodeStaleRoute}},
		{"a panic", toAcme, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200); panic(http.ErrAbortHandler) }, cells.Served{Status: 500}},
		{"a stream", toAcme, func(_ http.ResponseWriter, r *http.Request) { cells.MarkStream(r.Context()) }, cells.Served{Status: 200, Stream: true}},
	} {
		svc.serveHTTP = c.do
		svc.overHTTP(t, http.MethodGet, c.h)
		idle(t, svc.gates)
		svc.http.CloseClientConnections()
		eventually(t, "it is told", func() bool { mu.Lock(); defer mu.Unlock(); return len(got) > i })
		s := last(i + 1)
		if s.Took < 0 || s.Answer != c.want.Answer || s.Status != c.want.Status || s.Stream != c.want.Stream || s.Gone {
			t.Errorf("%s: %+v", c.name, s)
		}
	}
	n := len(got)
	svc.serveUnary = func(context.Context) error { return status.Error(codes.DataLoss, "x") }
	svc.overUnary(t, toAcme)
	if s := last(n + 1); s.GRPC != codes.DataLoss || s.Status != 0 || s.Answer != "" || s.Stream {
		t.Errorf("a call: %+v", s)
	}
	svc.overStream(t, toAcme)
	eventually(t, "it is told", func() bool { mu.Lock(); defer mu.Unlock(); return len(got) > n+1 })
	if s := last(n + 2); s.GRPC != codes.OK || !s.Stream {
		t.Errorf("a stream of calls: %+v", s)
	}
	svc.overUnary(t, hdr(cells.HeaderTenant, "nobody", cells.HeaderEpoch, "4"))
	if s := last(n + 3); s.Answer != cells.CodeStaleRoute {
		t.Errorf("a refused call: %+v", s)
	}
}
