// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Outcome is how a request went.
type Outcome uint8

// The outcomes. NotCounted says nothing about the service.
const (
	NotCounted Outcome = iota
	Answered
	Failed
	Refused
)

// OfCode is the outcome of a request that the platform answered: whether it tells
// something about the cell that it was for.
func OfCode(c cells.Code) Outcome {
	switch c {
	case cells.CodeCellUnreachable, cells.CodeBackendUnavailable, cells.CodeBackendTimeout, cells.CodeTenancyRefused, cells.CodeAuthUnavailable:
		return Refused
	}
	return NotCounted
}

// OfStatus is the outcome of an answer of the service with an HTTP status.
func OfStatus(status int) Outcome {
	if status >= 500 {
		return Failed
	}
	return Answered
}

// OfGRPC is the outcome of a call that the service ended with a gRPC status code, as
// a number: those that blame the server are failures.
func OfGRPC(code int) Outcome {
	switch code {
	case 2, 4, 12, 13, 14, 15: // UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS
		return Failed
	}
	return Answered
}

type key struct {
	cell    cells.CellID
	version string
}

// counter is one row that requests are counted in.
type counter struct {
	answered, failed, refused atomic.Int64
	latency                   [Buckets]atomic.Int64
}

// Recorder counts the requests of one process. The zero value is ready to use; it is
// safe for concurrent use.
type Recorder struct {
	rows sync.Map // key -> *counter
	n    atomic.Int64
}

// Observe counts a request to a cell at a version. took is its latency; negative
// when it has none (a stream). Only that of an answered request counts.
func (r *Recorder) Observe(cell cells.CellID, version string, o Outcome, took time.Duration) {
	if o == NotCounted || cell == "" {
		return
	}
	k := key{cell, version}
	v, ok := r.rows.Load(k)
	if !ok {
		if r.n.Load() >= MaxRows {
			return
		}
		var was bool
		if v, was = r.rows.LoadOrStore(k, new(counter)); !was {
			r.n.Add(1)
		}
	}
	c := v.(*counter)
	switch o {
	case Failed:
		c.failed.Add(1)
	case Refused:
		c.refused.Add(1)
	case Answered:
		c.answered.Add(1)
		if took >= 0 {
			c.latency[bucket(took)].Add(1)
		}
	}
}

// Rows returns all counts since the start, by cell and version.
func (r *Recorder) Rows() []Row {
	var out []Row
	r.rows.Range(func(k, v any) bool {
		id, c := k.(key), v.(*counter)
		row := Row{Cell: id.cell, Version: id.version}
		// Latencies first: a request that ends meanwhile has no more latencies than requests.
		for i := range c.latency {
			row.Latency[i] = c.latency[i].Load()
		}
		row.Failed, row.Refused = c.failed.Load(), c.refused.Load()
		row.Requests = c.answered.Load() + row.Failed + row.Refused
		out = append(out, row)
		return true
	})
	slices.SortFunc(out, func(a, b Row) int { return cmp.Or(cmp.Compare(a.Cell, b.Cell), cmp.Compare(a.Version, b.Version)) })
	return out
}
