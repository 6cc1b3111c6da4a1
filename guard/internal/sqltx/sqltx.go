// SPDX-License-Identifier: Apache-2.0

// Package sqltx is the handle of a guarded database/sql transaction, the same for
// every store. The store's guard owns what it does; this package only keeps the
// admission, the connection's transaction and how it ends together.
//
//	begun --Admit--> admitted --Commit, Rollback, end of the context--> ended
//
// A failure of Admit, Emit or a statement leaves the transaction to be rolled back.
package sqltx

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// ErrNotYours is returned by Commit and Rollback of a transaction that a guard's
// Write began: it ends with the function.
var ErrNotYours = errors.New("guard: the transaction is ended by the function that began it")

// Guard is what a store does in a transaction.
type Guard interface {
	Admit(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch) error
	AdmitClosed(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error
	Emit(ctx context.Context, tx *sql.Tx, typ string, payload any) (cells.EventSeq, error)
}

// Tx is a transaction of a guard's Write or Begin. One goroutine uses it. The
// statements of [sql.Tx] are the service's to make; Tenant, Epoch and Cell are the
// admission's, zero before there is one.
type Tx struct {
	*sql.Tx
	guard.Admission
	// Seq is the event_seq of the last event that was emitted, 0 before. It holds
	// once the transaction has committed.
	Seq cells.EventSeq

	g     Guard
	end   func(commit bool, emitted bool) error // nil in Write
	ended atomic.Bool
}

// New returns the handle of tx. end commits it or rolls it back, and is called
// once; nil: it is ended elsewhere.
func New(g Guard, tx *sql.Tx, a guard.Admission, end func(commit, emitted bool) error) *Tx {
	return &Tx{Tx: tx, Admission: a, g: g, end: end}
}

// Admit admits a transaction that has no admission yet: before its first write.
// Errors are those of the guard's Admit; the transaction must be rolled back then.
func (t *Tx) Admit(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch) error {
	if err := t.g.Admit(ctx, t.Tx, tenant, epoch); err != nil {
		return err
	}
	t.Tenant, t.Epoch = tenant, epoch
	return nil
}

// AdmitClosed lets the transaction import or remove rows: the guard's AdmitClosed.
func (t *Tx) AdmitClosed(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	if err := t.g.AdmitClosed(ctx, t.Tx, tenant, epoch, move); err != nil {
		return err
	}
	t.Tenant, t.Epoch = tenant, epoch
	return nil
}

// Emit writes an event into the outbox, in this transaction, and keeps its number
// in Seq. Until the transaction ends no other one can emit for the tenant: emit
// last. Errors are those of the guard's Emit.
func (t *Tx) Emit(ctx context.Context, typ string, payload any) error {
	seq, err := t.g.Emit(ctx, t.Tx, typ, payload)
	if err == nil {
		t.Seq = seq
	}
	return err
}

// Commit commits a transaction of Begin. After an error nothing was written, except
// after [guard.ErrCommitUnknown].
func (t *Tx) Commit() error { return t.finish(true) }

// Rollback ends a transaction of Begin; [sql.ErrTxDone] if it has ended.
func (t *Tx) Rollback() error { return t.finish(false) }

func (t *Tx) finish(commit bool) error {
	switch {
	case t.end == nil:
		return ErrNotYours
	case t.ended.Swap(true):
		return sql.ErrTxDone
	}
	return t.end(commit, t.Seq > 0)
}
