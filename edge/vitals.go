// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"crypto/rand"
	"net/http"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member/vitals"
)

const (
	// vitalsEvery is how often it is reported how requests went.
	vitalsEvery = time.Second
	// vitalsWait is what one report may take.
	vitalsWait = 5 * time.Second
)

// VitalsReporter takes reports of how requests went; [client.EdgeClient] is one. It is
// called by one goroutine.
type VitalsReporter interface {
	ReportVitals(ctx context.Context, r api.VitalsReport) error
}

// versioned is what a view of the topology may know beside [topology.View].
type versioned interface {
	Version(cell cells.CellID) string
}

func (s *Server) version(cell cells.CellID) string {
	if v, ok := s.topo.(versioned); ok {
		return v.Version(cell)
	}
	return ""
}

// Vitals returns how the requests to each cell went, since the start.
func (s *Server) Vitals() []vitals.Row { return s.vitals.Rows() }

// reportVitals reports until ctx ends, and then once more. A report that fails is made
// up for by the next one: each has all counts.
func (s *Server) reportVitals(ctx context.Context) {
	tick := time.NewTicker(vitalsEvery)
	defer tick.Stop()
	instance, failing := rand.Text(), false
	var seq, sent int64
	report := func(ctx context.Context) {
		rows := s.vitals.Rows()
		var n int64
		for i := range rows {
			n += rows[i].Requests
		}
		if n == sent {
			return
		}
		seq++
		ctx, cancel := context.WithTimeout(ctx, vitalsWait)
		defer cancel()
		err := s.cfg.Vitals.ReportVitals(ctx, api.VitalsReport{Instance: instance, Seq: seq, Rows: rows})
		if err == nil {
			sent = n
		}
		if (err != nil) != failing && ctx.Err() == nil {
			s.log.Info("edge: whether the directory takes counts of requests has changed", "err", err)
		}
		failing = err != nil
	}
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			report(last)
			return
		case <-tick.C:
			report(ctx)
		}
	}
}

// count counts the request that has ended, if it says something about its cell.
func (x *exchange) count() {
	if x.cell == "" {
		return
	}
	o, took := vitals.NotCounted, time.Since(x.start)-x.heldFor
	switch {
	case x.outcome == outcomeForwarded:
		o = vitals.OfStatus(x.rec.status)
		if x.grpc {
			o = vitals.OfGRPC(grpcStatus(x.rec.Header()))
			// A call and a stream of messages look the same here: both are as fast as their
			// first message, with which the head comes.
			took = x.headAt.Sub(x.start) - x.heldFor
		}
	case x.outcome == outcomeGone:
		// Its client gave it up: that it was told so is no refusal.
	case x.outcome == outcomeCut:
		o = vitals.Failed
	case x.cause != nil:
		o = vitals.OfCode(x.cause.Code)
	}
	if x.upgrade || x.stream {
		took = -1
	}
	x.s.vitals.Observe(x.cell, x.s.version(x.cell), o, took)
}

// grpcStatus is how a call ended: in its trailers, or in the head of an answer that
// is nothing else. A call without one broke off.
func grpcStatus(h http.Header) int {
	for _, name := range []string{"Grpc-Status", http.TrailerPrefix + "Grpc-Status"} {
		if v := h.Get(name); v != "" {
			if n, err := strconv.Atoi(v); err == nil {
				return n
			}
		}
	}
	return 13
}
