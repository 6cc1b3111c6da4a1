// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

const (
	stateNotClosed     = "LT002" // raised by admit_closed
	stateSerialization = "40001"
	stateDeadlock      = "40P01"
	stateLockTimeout   = "55P03"
)

// sqlState returns the SQLSTATE of a server's answer, or "". pgx and lib/pq both
// have the method.
func sqlState(err error) string {
	var s interface{ SQLState() string }
	if errors.As(err, &s) {
		return s.SQLState()
	}
	return ""
}

// translate adds the sentinel that a caller can act on; errors that already
// carry one, and those of the service itself, pass unchanged.
func translate(err error) error {
	if err == nil || errors.Is(err, cells.ErrFenced) || errors.Is(err, cells.ErrStaleOrder) || errors.Is(err, guard.ErrContended) || errors.Is(err, tenancy.ErrRefused) {
		return err
	}
	switch s := sqlState(err); {
	case s == guard.SQLState:
		return fmt.Errorf("%w: %w", cells.ErrFenced, err)
	case s == stateNotClosed:
		return fmt.Errorf("%w: %w", cells.ErrStaleOrder, err)
	case s == tenancy.SQLState:
		return fmt.Errorf("%w: %w", tenancy.ErrRefused, err)
	case s == stateSerialization, s == stateDeadlock:
		return fmt.Errorf("%w: %w", guard.ErrContended, err)
	case s == stateLockTimeout, strings.HasPrefix(s, "08"), strings.HasPrefix(s, "53"), strings.HasPrefix(s, "57P"):
		return unavailable(err)
	case s == "" && lost(err):
		return unavailable(err)
	}
	return err
}

func unavailable(err error) error {
	if errors.Is(err, cells.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
}

// lost reports whether the connection to the server failed.
func lost(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return false // the caller's patience, and a [net.Error] too
	}
	var (
		connect *pgconn.ConnectError
		network net.Error
	)
	return errors.As(err, &connect) || errors.As(err, &network) || errors.Is(err, driver.ErrBadConn) ||
		errors.Is(err, sql.ErrConnDone) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || pgconn.SafeToRetry(err)
}

// translateCommit tells an aborted commit from one whose outcome is unknown.
func translateCommit(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, txrun.ErrRolledBack) || errors.Is(err, pgx.ErrTxCommitRollback) {
		return err
	}
	// The server's answer to a COMMIT says that it was aborted, except when the
	// server was shut down: it may have given up waiting for a standby.
	if s := sqlState(err); s != "" && !strings.HasPrefix(s, "57P") && !strings.HasPrefix(s, "08") {
		return translate(err)
	}
	if pgconn.SafeToRetry(err) || errors.Is(err, sql.ErrTxDone) || errors.Is(err, pgx.ErrTxClosed) {
		return translate(err)
	}
	return fmt.Errorf("%w: %w", guard.ErrCommitUnknown, err)
}

// ended returns the context's cause if the context is why err came.
func ended(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && !errors.Is(err, guard.ErrCommitUnknown) {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}
