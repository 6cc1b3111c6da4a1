// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

var (
	// ErrMismatch: the two sides of a move differ. Returned by Agent.Prepare and
	// Agent.Finish, with the table and what to do. The move must not be committed.
	ErrMismatch = errors.New("transfer: the two sides differ")
	// ErrViewLost: the view's process, connection or lease is gone. Returned by the
	// methods of View; wraps [cells.ErrUnavailable].
	ErrViewLost = fmt.Errorf("%w: transfer: the view is gone", cells.ErrUnavailable)
	// ErrOvertaken: another process has taken the import over. Returned by the
	// methods of Import; wraps [cells.ErrConflict].
	ErrOvertaken = fmt.Errorf("%w: transfer: another process has taken the import over", cells.ErrConflict)
	// ErrTooLarge: a row or a frame is above the bound. Returned by the client and
	// the server of the wire protocol; wraps [cells.ErrInvalid].
	ErrTooLarge = fmt.Errorf("%w: transfer: larger than a frame may be", cells.ErrInvalid)
	// ErrCaptureLost: the source has lost changes that the move needs, with the slot that
	// kept them. Returned by Source.Changes; wraps [cells.ErrUnavailable]: a copy starts
	// over, a cut is given up.
	ErrCaptureLost = fmt.Errorf("%w: transfer: changes of the move were lost", cells.ErrUnavailable)
	// ErrElsewhere: the changes of the move's group are read by another process of the
	// cell, which can be asked for them. Returned by Source.Changes; wraps
	// [cells.ErrUnavailable].
	ErrElsewhere = fmt.Errorf("%w: transfer: another process reads the changes of the group", cells.ErrUnavailable)
	// ErrRetention: keeping the changes of the move takes more than it may, or more than
	// the server keeps. Returned by the methods of Source; wraps [cells.ErrInvalid]: the
	// move must be rolled back.
	ErrRetention = fmt.Errorf("%w: transfer: too much is kept for the move", cells.ErrInvalid)
	// ErrSchemaChanged: a listed table of one of the cells has changed its shape since
	// the move began; see [Shape]. Returned by the methods of Source, View and Import;
	// wraps [cells.ErrInvalid]: the move must be rolled back.
	ErrSchemaChanged = fmt.Errorf("%w: transfer: the schema has changed", cells.ErrInvalid)
)

// kinds are the errors that keep their meaning over the wire, most special first.
var kinds = []struct {
	kind string
	err  error
}{
	{"view_lost", ErrViewLost},
	{"capture_lost", ErrCaptureLost},
	{"elsewhere", ErrElsewhere},
	{"retention", ErrRetention},
	{"overtaken", ErrOvertaken},
	{"mismatch", ErrMismatch},
	{"too_large", ErrTooLarge},
	{"schema_changed", ErrSchemaChanged},
	{"return_lost", cells.ErrReturnLost},
	{"stale_order", cells.ErrStaleOrder},
	{"fenced", cells.ErrFenced},
	{"not_found", cells.ErrNotFound},
	{"not_applicable", cells.ErrNotApplicable},
	{"conflict", cells.ErrConflict},
	{"invalid", cells.ErrInvalid},
	{"unavailable", cells.ErrUnavailable},
}

func kindOf(err error) string {
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return k.kind
		}
	}
	return ""
}

// wireError is an error that came over the wire.
type wireError struct {
	Kind    string `json:"kind,omitempty"`
	Message string `json:"message"`
}

func (e *wireError) Error() string { return e.Message }

func (e *wireError) Unwrap() error {
	for _, k := range kinds {
		if k.kind == e.Kind {
			return k.err
		}
	}
	return nil
}

// retryable reports whether the same step may succeed if it is begun again.
func retryable(err error) bool {
	return errors.Is(err, cells.ErrUnavailable) || errors.Is(err, guard.ErrContended) || errors.Is(err, guard.ErrCommitUnknown)
}

// fatal reports whether the move cannot go on after err, whatever else happens.
func fatal(err error) bool {
	return errors.Is(err, ErrSchemaChanged) || errors.Is(err, ErrRetention)
}
