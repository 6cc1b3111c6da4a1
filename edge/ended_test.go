// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
)

// export writes numbered lines behind ?after= until ?upto=, or until its gate
// closes; it tries to say that somebody has ended it.
func export(w http.ResponseWriter, r *http.Request) {
	ctx := cells.MarkStream(r.Context())
	a, _ := cells.AdmissionFromContext(ctx)
	after, _ := strconv.Atoi(r.URL.Query().Get("after"))
	upto, _ := strconv.Atoi(r.URL.Query().Get("upto"))
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Trailer", "X-Rows")
	w.Header().Set(cells.HeaderStreamEnd, "FORGED")
	n := after
	for upto == 0 || n < upto {
		n++
		fmt.Fprintf(w, "{\"n\":%d,\"cell\":%q}\n", n, a.Cell)
		if http.NewResponseController(w).Flush() != nil {
			return
		}
		if ctx.Err() != nil {
			break
		}
		if upto == 0 {
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
		}
	}
	w.Header().Set("X-Rows", strconv.Itoa(n-after))
	w.Header().Set(http.TrailerPrefix+cells.HeaderStreamEnd, "FORGED")
}

// A response that goes on while its tenant moves ends cleanly, in chunks and over
// HTTP/2, and says in a trailer that it was ended; what was whole does not. The
// client goes on in the other cell where it was.
func TestExportThroughMoves(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(export)})
	f.place("acme", "a")
	from, to := cells.CellID("a"), cells.CellID("b")
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		last := 0
		read := func(query string, moved func()) (rows int, cell cells.CellID, trailer http.Header) {
			t.Helper()
			r, err := http.NewRequestWithContext(t.Context(), "GET", f.url+"/export?after="+strconv.Itoa(last)+query, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("X-Tenant", "acme")
			resp, err := c.Do(r)
			if err != nil || resp.StatusCode != 200 || resp.Header.Get(cells.HeaderStreamEnd) != "" {
				t.Fatalf("%s: %v %v", name, resp, err)
			}
			defer resp.Body.Close()
			body := bufio.NewReader(resp.Body)
			for {
				line, err := body.ReadBytes('\n')
				if errors.Is(err, io.EOF) && len(line) == 0 {
					return rows, cell, resp.Trailer
				}
				var n int
				if _, serr := fmt.Sscanf(string(line), "{\"n\":%d,\"cell\":%q}", &n, &cell); err != nil || serr != nil || n != last+1 {
					t.Fatalf("%s: %q after %d: %v %v", name, line, last, err, serr)
				}
				last = n
				if rows++; rows == 5 && moved != nil {
					go moved()
				}
			}
		}
		for range 2 {
			done := make(chan struct{})
			rows, cell, trailer := read("", func() { defer close(done); f.move("acme", from, to) })
			if got := trailer.Values(cells.HeaderStreamEnd); len(got) != 1 || got[0] != string(cells.CodeMoving) {
				t.Errorf("%s: a response that was ended has the trailers %v", name, trailer)
			}
			if cell != from || trailer.Get("X-Rows") != strconv.Itoa(rows) {
				t.Errorf("%s: %d rows from %s, trailers %v", name, rows, cell, trailer)
			}
			<-done
			from, to = to, from
		}
		rows, cell, trailer := read("&upto="+strconv.Itoa(last+30), nil)
		if rows != 30 || cell != from || trailer.Get("X-Rows") != "30" || len(trailer.Values(cells.HeaderStreamEnd)) != 0 {
			t.Errorf("%s: a whole response has %d rows from %s and the trailers %v", name, rows, cell, trailer)
		}
	}
}

// A WebSocket whose handler knows nothing of moves is closed with 1012 all the same,
// and the client finds the other cell.
func TestWebSocketIsClosedForItsHandler(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		a, _ := cells.AdmissionFromContext(r.Context())
		for {
			kind, p, err := c.Read(context.WithoutCancel(r.Context()))
			if err != nil || c.Write(context.WithoutCancel(r.Context()), kind, append([]byte(string(a.Cell)+" "), p...)) != nil {
				return
			}
		}
	})})
	f.place("acme", "a")
	c, _, err := f.dialWS("acme")
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	if got := wsSay(t, c, "x"); got != "a x" {
		t.Fatal(got)
	}
	moved := make(chan struct{})
	go func() { defer close(moved); f.move("acme", "a", "b") }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusServiceRestart {
		t.Fatalf("at the cut: %v", err)
	}
	c2, _, err := f.dialWS("acme")
	if err != nil {
		t.Fatal(err)
	}
	defer c2.CloseNow()
	if got := wsSay(t, c2, "x"); got != "b x" {
		t.Fatal(got)
	}
	<-moved
}

// A gRPC stream ends with UNAVAILABLE and the answer as its detail; a retry of the
// whole stream is the client's to decide, since it had begun.
func TestGRPCStreamEndsWithTheAnswer(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	for i, from := range []cells.CellID{"a", "b"} {
		ctx, cancel := callCtx(t, "acme", fmt.Sprint("op", i))
		defer cancel()
		s, err := cc.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Talk")
		if err != nil {
			t.Fatal(err)
		}
		out := new(wrapperspb.StringValue)
		if err := s.SendMsg(wrapperspb.String("x")); err != nil {
			t.Fatal(err)
		}
		if err := s.RecvMsg(out); err != nil || out.Value != string(from)+" x" {
			t.Fatalf("%q %v", out.Value, err)
		}
		f.move("acme", from, map[cells.CellID]cells.CellID{"a": "b", "b": "a"}[from])
		err = s.RecvMsg(out)
		a, ok := cells.AnswerFromStatus(status.Convert(err))
		if status.Code(err) != codes.Unavailable || !ok || a.Code != cells.CodeMoving || a.Tenant != "acme" || a.RetryAfter <= 0 || a.Revision == 0 || !errors.Is(a, cells.ErrGateClosed) {
			t.Fatalf("%v: %+v", err, a)
		}
	}
}
