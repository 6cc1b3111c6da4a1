// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// ErrForbidden: the peer's certificate does not allow the call, or the routes do
// not say that the tenant's rows are on their way to it. Returned by AgentClient.
var ErrForbidden = errors.New("member: not allowed")

// kinds are the errors that keep their meaning over the wire; the first that
// matches names an error.
var kinds = []struct {
	kind   string
	err    error
	status int
}{
	{"forbidden", ErrForbidden, http.StatusForbidden},
	{"mismatch", transfer.ErrMismatch, http.StatusConflict},
	{"return_lost", cells.ErrReturnLost, http.StatusGone},
	{"schema_changed", transfer.ErrSchemaChanged, http.StatusConflict},
	{"retention", transfer.ErrRetention, http.StatusConflict},
	{"stale_order", cells.ErrStaleOrder, http.StatusConflict},
	{"fenced", cells.ErrFenced, http.StatusConflict},
	{"other_move", cells.ErrOtherMove, http.StatusConflict},
	{"not_applicable", cells.ErrNotApplicable, http.StatusConflict},
	{"conflict", cells.ErrConflict, http.StatusConflict},
	{"not_found", cells.ErrNotFound, http.StatusNotFound},
	{"invalid", cells.ErrInvalid, http.StatusBadRequest},
	{"unavailable", cells.ErrUnavailable, http.StatusServiceUnavailable},
	{"timeout", context.DeadlineExceeded, http.StatusGatewayTimeout},
}

// stepError says an error so that it can travel. ctx is that of the call: when it
// was cancelled, nothing but that is known about the step.
func stepError(ctx context.Context, err error) (*StepError, int) {
	if cause := context.Cause(ctx); cause != nil && errors.Is(cause, errLeaving) {
		return &StepError{Kind: "unavailable", Message: cause.Error()}, http.StatusServiceUnavailable
	}
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return &StepError{Kind: k.kind, Message: err.Error()}, k.status
		}
	}
	return &StepError{Message: err.Error()}, http.StatusInternalServerError
}

// Error implements error.
func (e *StepError) Error() string { return e.Message }

// Unwrap returns the sentinel that Kind names, or nil.
func (e *StepError) Unwrap() error {
	for _, k := range kinds {
		if k.kind == e.Kind {
			return k.err
		}
	}
	return nil
}
