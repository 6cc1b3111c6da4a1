// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

// SQLite's primary result codes.
const (
	codeBusy     = 5
	codeLocked   = 6
	codeNoMemory = 7
	codeReadOnly = 8
	codeIOErr    = 10
	codeFull     = 13
	codeCantOpen = 14
)

// code returns the primary result code of a driver's error, or 0.
func code(err error) int {
	var c interface{ Code() int }
	if errors.As(err, &c) {
		return c.Code() & 0xff
	}
	return 0
}

// translate adds the sentinel that a caller can act on; errors that already
// carry one, and those of the service itself, pass unchanged.
func translate(err error) error {
	if err == nil || errors.Is(err, cells.ErrFenced) || errors.Is(err, cells.ErrStaleOrder) || errors.Is(err, guard.ErrContended) || errors.Is(err, cells.ErrUnavailable) {
		return err
	}
	switch code(err) {
	case codeBusy, codeLocked:
		return fmt.Errorf("%w: %w", guard.ErrContended, err)
	case codeNoMemory, codeReadOnly, codeIOErr, codeFull, codeCantOpen:
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return err
}

// translateCommit tells an aborted commit from one whose outcome is unknown: a
// failed write to the disk may come after the point of no return.
func translateCommit(err error) error {
	switch {
	case err == nil, errors.Is(err, txrun.ErrRolledBack):
		return err
	case code(err) == codeIOErr, errors.Is(err, driver.ErrBadConn):
		return fmt.Errorf("%w: %w", guard.ErrCommitUnknown, err)
	}
	return translate(err)
}

// ended returns the context's cause if the context is why err came.
func ended(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && !errors.Is(err, guard.ErrCommitUnknown) {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}
