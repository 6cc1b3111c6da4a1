// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/internal/hub"
)

// SQLState is the SQLSTATE with which Postgres refuses a write that the fence
// does not admit.
const SQLState = "LT001"

var (
	// ErrNoAdmission: the context carries no admission. Returned by InTx of every
	// guard; it wraps [cells.ErrFenced], since nothing may be written.
	ErrNoAdmission = fmt.Errorf("%w: the context carries no admission", cells.ErrFenced)
	// ErrContended: the store gave up the transaction in favour of another one
	// (serialisation failure, deadlock, busy). Nothing was written; the same
	// transaction may succeed if it is run again.
	ErrContended = errors.New("guard: contended")
	// ErrCommitUnknown: the connection was lost while the commit was under way.
	// The transaction may have been written or not; only reading tells.
	ErrCommitUnknown = errors.New("guard: outcome of the commit is unknown")
	// ErrBusy: another process has the tenant's turn to publish. Returned by
	// RelayStore.PublishNext.
	ErrBusy = errors.New("guard: another process publishes for the tenant")
	// ErrPaused is the cause with which a publication ends when the tenant's events
	// are paused.
	ErrPaused = hub.ErrPaused
	// ErrClosed is returned to whoever waits for events when the guard is closed.
	ErrClosed = hub.ErrClosed
)

// NothingWritten reports whether err, returned by InTx, Admit, Emit or the
// commit of a guard, proves that the transaction has written nothing. It is
// false for nil and for [ErrCommitUnknown].
func NothingWritten(err error) bool {
	return err != nil && !errors.Is(err, ErrCommitUnknown)
}

// RetryElsewhere reports whether the work behind err has written nothing because
// the tenant is not (or no longer) written here at that epoch: the request may
// be sent again to whoever serves the tenant now.
func RetryElsewhere(err error) bool {
	return NothingWritten(err) && errors.Is(err, cells.ErrFenced) && !errors.Is(err, ErrNoAdmission)
}

// RetryHere reports whether the work behind err has written nothing and may
// succeed if it is run again in this process.
func RetryHere(err error) bool {
	return NothingWritten(err) && errors.Is(err, ErrContended)
}
