// SPDX-License-Identifier: Apache-2.0

package txrun

import (
	"context"
	"database/sql"
	"fmt"
)

// ErrRolledBack: the context ended before the commit began, and the transaction
// was rolled back.
var ErrRolledBack = fmt.Errorf("guard: the context ended before the commit: %w", context.Canceled)

// Detached is a database/sql transaction whose commit is not cut off by the end
// of the context that it began under: database/sql would give up in the middle,
// and nobody would know the outcome. Before the commit, the end of that context
// rolls it back as usual.
type Detached struct {
	Tx     *sql.Tx
	stop   func() bool
	cancel context.CancelFunc
}

// Begin begins a transaction.
func Begin(ctx context.Context, db *sql.DB, opts *sql.TxOptions) (*Detached, error) {
	txctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	tx, err := db.BeginTx(txctx, opts)
	if err != nil {
		stop()
		cancel()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, err
	}
	return &Detached{Tx: tx, stop: stop, cancel: cancel}, nil
}

// Detach keeps the transaction open when the context of Begin ends, unless it has
// ended already.
func (d *Detached) Detach() {
	if d.stop() {
		d.stop = func() bool { return true }
	}
}

// Commit is bounded by ctx alone, not by the context of Begin.
func (d *Detached) Commit(ctx context.Context) error {
	defer d.cancel()
	if !d.stop() {
		_ = d.Tx.Rollback()
		return ErrRolledBack
	}
	defer context.AfterFunc(ctx, d.cancel)()
	return d.Tx.Commit()
}

// Rollback ends the transaction if it is still open.
func (d *Detached) Rollback() {
	_ = d.Tx.Rollback()
	d.stop()
	d.cancel()
}
