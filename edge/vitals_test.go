// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/member/vitals"
)

// counted is what an edge has counted of cell a.
func (f *fleet) counted() vitals.Row {
	for _, r := range f.edge.Vitals() {
		if r.Cell == "a" {
			return r
		}
	}
	return vitals.Row{}
}

// counts waits until the edge has counted so much of cell a, and holds it to that.
func (f *fleet) counts(what string, requests, failed, refused, latencies int64) {
	f.t.Helper()
	f.wait(func() bool { return f.counted().Requests >= requests }, "%s is counted; there is %+v", what, f.counted())
	r := f.counted()
	if r.Requests != requests || r.Failed != failed || r.Refused != refused || r.Latency.Total() != latencies {
		f.t.Errorf("%s: %d requests, %d failed, %d refused, %d latencies; want %d, %d, %d, %d", what, r.Requests, r.Failed, r.Refused, r.Latency.Total(), requests, failed, refused, latencies)
	}
}

// What an edge counts of a request says how the service did, and nothing of what
// clients, moves and the edge itself did.
func TestVitals(t *testing.T) {
	f := newFleet(t, fleetOptions{cfg: edge.Config{ConnectWait: 50 * time.Millisecond}, version: "v7", handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch what := r.URL.Path[1:]; what {
		case "cut":
			_, _ = io.WriteString(w, "part")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		case "events":
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: x\n\n")
		case "store":
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeTenancyRefused})
		case "wait":
			<-r.Context().Done()
		default:
			code, _ := strconv.Atoi(what)
			w.WriteHeader(code)
		}
	})})
	f.place("acme", "a")
	ask := func(path, who string) { _, _ = f.do(f.http, "GET", "/"+path, nil, tenant(who)) }
	for _, x := range []struct {
		path, who                            string
		requests, failed, refused, latencies int64
	}{
		{"200", "acme", 1, 0, 0, 1},
		{"404", "acme", 2, 0, 0, 2}, // a client's fault is answered well
		{"500", "acme", 3, 1, 0, 2},
		{"503", "acme", 4, 2, 0, 2},
		{"cut", "acme", 5, 3, 0, 2},
		{"events", "acme", 6, 3, 0, 2}, // a stream has no latency
		{"store", "acme", 7, 3, 1, 2},  // the cell refused in the service's place
		{"200", "nobody", 7, 3, 1, 2},  // no cell's
		{"200", "bad/tenant", 7, 3, 1, 2},
	} {
		ask(x.path, x.who)
		f.counts(x.path+" for "+x.who, x.requests, x.failed, x.refused, x.latencies)
	}
	// A client that gives up says nothing, however long it has waited.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := f.do(f.http, "GET", "/wait", nil, tenant("acme"), func(r *http.Request) { *r = *r.WithContext(ctx) }); err == nil {
		t.Error("it was answered")
	}
	f.wait(func() bool { return f.process("a").gates.Total() == 0 }, "it has ended")
	ask("200", "acme")
	f.counts("a client that gives up", 8, 3, 1, 3)
	// Nor does a move: what is held is counted when it is answered, without the time that it was held.
	release := f.paused("acme", "a", "b")
	done := make(chan error, 1)
	go func() {
		_, err := f.do(f.http, "GET", "/200", nil, tenant("acme"))
		done <- err
	}()
	begun := time.Now()
	f.wait(func() bool { return f.held("acme") == 1 && time.Since(begun) > 300*time.Millisecond }, "it is held")
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	f.counts("a move", 8, 3, 1, 3)
	rows := f.edge.Vitals()
	f.wait(func() bool { rows = f.edge.Vitals(); return len(rows) == 2 }, "cell b has answered")
	if rows[1].Cell != "b" || rows[1].Requests != 1 || rows[1].Latency.Total() != 1 || rows[1].Latency.Above(200*time.Millisecond) != 0 {
		t.Errorf("what was held: %+v", rows[1])
	}
	// A cell that is not there refuses.
	f.place("other", "a")
	f.topo.Set("a", "http://"+closedAddr(t))
	ask("200", "other")
	f.counts("a cell that is away", 9, 3, 2, 3)
	for _, r := range f.edge.Vitals() {
		if r.Version != "v7" {
			t.Errorf("counted for version %q", r.Version)
		}
		if err := r.Validate(); err != nil {
			t.Error(err)
		}
	}
}

// Over gRPC the status decides, wherever it stands, and the head is when an answer came.
func TestVitalsGRPC(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{cfg: edge.Config{ConnectWait: 50 * time.Millisecond}})
	f.place("acme", "a")
	var requests, failed int64
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		text := fmt.Sprintf("code %d", code)
		if code == codes.OK {
			text = "hello"
		}
		if _, err := say(t, cc, "acme", code.String(), text); status.Code(err) != code {
			t.Fatalf("%v, want %s", err, code)
		}
		requests++
		switch code {
		case codes.Unknown, codes.DeadlineExceeded, codes.Unimplemented, codes.Internal, codes.Unavailable, codes.DataLoss:
			failed++
		}
		f.counts(code.String(), requests, failed, 0, requests-failed)
	}
	_, _ = say(t, cc, "nobody", "no", "x")
	f.counts("no cell's", requests, failed, 0, requests-failed)

	// A stream that goes on is as fast as its first message.
	ctx, cancel := callCtx(t, "acme", "stream")
	defer cancel()
	ss, err := cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/test.Echo/Talk")
	if err != nil {
		t.Fatal(err)
	}
	exchange := func() {
		t.Helper()
		if err := ss.SendMsg(wrapperspb.String("x")); err != nil {
			t.Fatal(err)
		}
		if err := ss.RecvMsg(new(wrapperspb.StringValue)); err != nil {
			t.Fatal(err)
		}
	}
	exchange()
	begun := time.Now()
	f.wait(func() bool { return time.Since(begun) > 600*time.Millisecond }, "time passes")
	exchange()
	_ = ss.CloseSend()
	if err := ss.RecvMsg(new(wrapperspb.StringValue)); err != io.EOF {
		t.Fatal(err)
	}
	requests++
	f.counts("a stream", requests, failed, 0, requests-failed)
	r := f.counted()
	if n := r.Latency.Above(512 * time.Millisecond); n != 0 {
		t.Errorf("%d calls took longer than their first message", n)
	}

	f.topo.Set("a", "http://"+closedAddr(t))
	if _, err := say(t, cc, "acme", "away", "x"); err == nil {
		t.Fatal("an answer from nowhere")
	}
	f.counts("a cell that is away", requests+1, failed, 1, requests-failed)
}
