// SPDX-License-Identifier: Apache-2.0

package member

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/vitals"
)

// What a process counts of the requests that its gates tell of, over HTTP and gRPC.
func TestServed(t *testing.T) {
	type row struct{ requests, failed, refused, latencies int64 }
	var (
		none     = row{}
		answered = row{1, 0, 0, 1}
		stream   = row{1, 0, 0, 0}
		failed   = row{1, 1, 0, 0}
		refused  = row{1, 0, 1, 0}
	)
	type one struct {
		s    cells.Served
		want row
	}
	list := []one{
		{cells.Served{Status: 200}, answered}, {cells.Served{Status: 404}, answered}, {cells.Served{Status: 499}, answered},
		{cells.Served{Status: 500}, failed}, {cells.Served{Status: 503, Stream: true}, failed},
		{cells.Served{Status: 200, Stream: true}, stream}, {cells.Served{GRPC: codes.OK, Stream: true}, stream},
		// Whose client has gone says nothing, however it ended.
		{cells.Served{Status: 500, Gone: true}, none}, {cells.Served{GRPC: codes.Internal, Gone: true}, none}, {cells.Served{Answer: cells.CodeBackendUnavailable, Gone: true}, none},
		// The platform's answers: those that speak of the cell, and those that speak of moves and clients. Their status does not count.
		{cells.Served{Answer: cells.CodeBackendUnavailable, Status: 503}, refused}, {cells.Served{Answer: cells.CodeBackendTimeout}, refused},
		{cells.Served{Answer: cells.CodeTenancyRefused}, refused}, {cells.Served{Answer: cells.CodeAuthUnavailable, GRPC: codes.Unavailable}, refused},
		{cells.Served{Answer: cells.CodeMoving, Status: 503}, none}, {cells.Served{Answer: cells.CodeStaleRoute, GRPC: codes.Unavailable}, none},
		{cells.Served{Answer: cells.CodeWrongCell}, none}, {cells.Served{Answer: cells.CodeUnknownTenant}, none}, {cells.Served{Answer: cells.CodeTooLarge}, none},
	}
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		want := answered
		switch code {
		case codes.Unknown, codes.DeadlineExceeded, codes.Unimplemented, codes.Internal, codes.Unavailable, codes.DataLoss:
			want = failed
		}
		list = append(list, one{cells.Served{GRPC: code}, want})
	}
	for _, x := range list {
		t.Run(fmt.Sprintf("%s %d %s stream=%v gone=%v", x.s.Answer, x.s.Status, x.s.GRPC, x.s.Stream, x.s.Gone), func(t *testing.T) {
			m := &Member{cfg: Config{Cell: "a", Version: "v7"}}
			x.s.Took = 30 * time.Millisecond
			m.served(x.s)
			rows := m.vitals.Rows()
			if x.want == none {
				if len(rows) != 0 {
					t.Errorf("counted: %+v", rows)
				}
				return
			}
			if len(rows) != 1 || rows[0].Cell != "a" || rows[0].Version != "v7" {
				t.Fatalf("counted: %+v", rows)
			}
			r := rows[0]
			if got := (row{r.Requests, r.Failed, r.Refused, r.Latency.Total()}); got != x.want {
				t.Errorf("counted %+v, want %+v", got, x.want)
			}
			var h vitals.Histogram
			h.Add(x.s.Took)
			if x.want.latencies == 1 && r.Latency != h {
				t.Errorf("latencies %v", r.Latency)
			}
		})
	}
}
