// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// books are what the clients of one tenant know.
type books struct {
	tenant cells.TenantID
	moved  bool // false: a bystander

	mu      sync.Mutex // guards what follows
	acked   []string
	unknown []string // may have been written
	failed  []string // failures that a bystander must not see
}

// refusal is an outcome of a request that did not run.
type refusal struct{ err error }

func (r *refusal) Error() string { return r.err.Error() }

// hammer writes new keys until ctx ends.
func (w *world) hammer(ctx context.Context, b *books, client int) {
	pace := time.NewTicker(8 * time.Millisecond)
	defer pace.Stop()
	for n := 0; ctx.Err() == nil; n++ {
		key := fmt.Sprintf("%d-%d", client, n)
		for ctx.Err() == nil {
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			at, err := w.write(rctx, b.tenant, key)
			cancel()
			var no *refusal
			if errors.As(err, &no) {
				b.note(func() {
					if !b.moved && !errors.Is(err, errCrashed) && !errors.Is(no.err, errCrashed) {
						b.failed = append(b.failed, fmt.Sprintf("%s at %s: %v", key, at, no.err))
					}
				})
				w.pause(ctx, b.tenant)
				continue
			}
			b.note(func() {
				if err == nil {
					b.acked = append(b.acked, key)
					w.acked.Add(1)
				} else {
					b.unknown = append(b.unknown, key)
				}
			})
			break
		}
		select { // a client is not a mill
		case <-pace.C:
		case <-ctx.Done():
		}
	}
}

func (b *books) note(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

// pause waits until the tenant's route changes, or a moment.
func (w *world) pause(ctx context.Context, t cells.TenantID) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Millisecond)
	defer cancel()
	_, _ = w.edge.Wait(ctx, t, w.edge.Lookup(t).Revision)
}

// write is a request: routed, admitted, and one transaction behind the fence. An
// error that is no refusal leaves the outcome open.
func (w *world) write(ctx context.Context, t cells.TenantID, key string) (at cells.CellID, _ error) {
	d := w.edge.Lookup(t)
	if a := d.Refusal(); a != nil {
		return d.Cell, &refusal{a}
	}
	ran := false
	err := w.cells[d.Cell].call(ctx, func(ctx context.Context, p *process) error {
		adm, err := p.gates.Admit(ctx, cells.AdmitRequest{Tenant: t, Epoch: d.Epoch, HasEpoch: true})
		if err != nil {
			return err
		}
		defer adm.Done()
		err = p.guard.InTx(guard.ContextWith(ctx, guard.Admission{Tenant: t, Epoch: adm.Epoch}), nil, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, "INSERT INTO items (tenant, k, v) VALUES (?1, ?2, ?2)", string(t), key); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, "INSERT INTO totals (tenant, n) VALUES (?1, 1) ON CONFLICT (tenant) DO UPDATE SET n = n + 1", string(t)); err != nil {
				return err
			}
			_, err := p.guard.Emit(ctx, tx, "written", key)
			return err
		})
		ran = errors.Is(err, guard.ErrCommitUnknown) || err != nil && ctx.Err() != nil
		return err
	})
	if err != nil && !ran {
		return d.Cell, &refusal{err}
	}
	return d.Cell, err
}
