// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
)

// Refused answers a request whose transaction was refused by the fence, or could not
// be made because the store is away, and reports whether it did. It does so only when
// nothing was written, with an answer that edges understand: they look the tenant up
// again and repeat the request where it is served now. For every other error,
// [ErrCommitUnknown] and nil included, it writes nothing and returns false.
//
//	err := g.Write(r.Context(), ...)
//	if guard.Refused(w, r, err) {
//		return
//	}
func Refused(w http.ResponseWriter, r *http.Request, err error) bool {
	a := Refusal(r.Context(), err)
	if a == nil {
		return false
	}
	cells.WriteProblem(w, r, a)
	return true
}

// Refusal returns the answer of [Refused] for the work under ctx, or nil. Over gRPC:
// return cells.AnswerStatus(a).Err().
func Refusal(ctx context.Context, err error) *cells.Answer {
	if !NothingWritten(err) {
		return nil
	}
	if a := cells.AnswerOf(err); a != nil {
		return a
	}
	switch {
	case errors.Is(err, ErrNoAdmission):
		return &cells.Answer{Code: cells.CodeTenancyRefused, Detail: "the request carries no admission of this cell", Err: err}
	case errors.Is(err, cells.ErrFenced):
		if a, ok := cells.AdmissionFromContext(ctx); ok {
			return a.Refusal(err)
		}
		return &cells.Answer{Code: cells.CodeStaleRoute, Detail: "the tenant's fence refused the request", Err: err}
	case errors.Is(err, ErrContended):
		return &cells.Answer{Code: cells.CodeOverloaded, Detail: "the database gave the transaction up in favour of others", Err: err}
	case errors.Is(err, cells.ErrUnavailable):
		return &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "the cell's database did not answer", Err: err}
	}
	return nil
}
