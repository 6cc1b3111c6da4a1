// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Served is how one request, stream or call ended at the gates.
type Served struct {
	// Answer is the code when the platform answered: the gate, or a handler by
	// [WriteProblem]. "" when the service did.
	Answer Code
	// Status is the service's HTTP status, or 0 over gRPC; GRPC is the code of a call.
	Status int
	GRPC   codes.Code
	// Stream: it was one, so that Took is no latency.
	Stream bool
	// Gone: its client had given up, so that how it ended says nothing.
	Gone bool
	// Took is from its arrival at the gates to the end of its answer.
	Took time.Duration
}

// WithServed has f called at the end of each request over HTTP and each call over
// gRPC that came to the gates' middlewares, those that were refused included; not for
// what [WithUnguarded] lets through, and not for jobs. f must not block.
func WithServed(f func(Served)) GateOption {
	return func(c *gatesConfig) { c.served = f }
}

// servedHTTP reports the end of a request; panicked is what its handler panicked with.
func (g *Gates) servedHTTP(r *http.Request, w *admittedWriter, stream bool, begun time.Time, panicked bool) {
	if g.cfg.served == nil {
		return
	}
	s := Served{Answer: w.answer, Status: w.status, Stream: stream || w.admission.isStream(), Gone: r.Context().Err() != nil, Took: time.Since(begun)}
	switch {
	case panicked:
		s.Status = http.StatusInternalServerError // the answer broke off, whatever its head said
	case s.Status == 0:
		s.Status = http.StatusOK
	}
	g.cfg.served(s)
}

// isStream reports whether the admission was ever one of a stream.
func (a *Admission) isStream() bool {
	a.gate.mu.Lock()
	defer a.gate.mu.Unlock()
	return a.long != nil
}

// servedCall reports the end of a call over gRPC, as it goes out.
func (g *Gates) servedCall(ctx context.Context, stream bool, begun time.Time, err error) {
	if g.cfg.served == nil {
		return
	}
	s := Served{GRPC: status.Code(err), Stream: stream, Gone: ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled), Took: time.Since(begun)}
	if st, ok := status.FromError(err); ok && err != nil {
		if a, ok := AnswerFromStatus(st); ok {
			s.Answer = a.Code
		}
	}
	g.cfg.served(s)
}
