// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Mutant is a deliberately broken variant that the suite must fail.
type Mutant struct {
	Name string
	// Only names the sections that have to notice, at least one of them.
	Only []string
	// Break wraps a process; nil leaves it alone.
	Break func(Process) Process
}

// Check runs the mutant's sections, in a parallel subtest, and fails it if none
// of them fails.
func (m Mutant) Check(t *testing.T, h Harness) {
	t.Helper()
	t.Run(m.Name, func(t *testing.T) {
		t.Parallel()
		h := h
		h.Only, h.Patience = m.Only, 2*time.Second
		if m.Break != nil {
			open := h.Open
			h.Open = func(ctx context.Context) (Database, error) {
				db, err := open(ctx)
				return broken{db, m.Break}, err
			}
			h.Child = nil
		}
		report := Record(t.Context(), func(t T) { Run(t, h) })
		if !report.Failed() {
			t.Errorf("the suite does not notice (sections %v)", m.Only)
			return
		}
		if strings.Contains(report.Failures[0], cannotOpen) {
			t.Fatalf("the mutant does not even start: %s", report.Failures[0])
		}
		t.Logf("noticed: %s", report.Failures[0])
	})
}

type broken struct {
	Database
	change func(Process) Process
}

func (b broken) Process(ctx context.Context) (Process, error) {
	p, err := b.Database.Process(ctx)
	if err != nil {
		return nil, err
	}
	return b.change(p), nil
}

// Literals are a store's values of true and false in its statements, for
// [Mutants].
type Literals struct{ True, False string }

// own is the name of one of the guard's own tables, found by the outbox's.
func own(p Process, table string) string {
	return strings.TrimSuffix(p.MovedTables()[0].Name, "outbox") + table
}

// raw runs statements in a transaction of their own.
func raw(ctx context.Context, p Process, isolation, query string, args ...any) error {
	tx, err := p.Begin(ctx, isolation)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := tx.Exec(ctx, query, args...); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// Mutants are the variants that can be made of any store from outside.
func Mutants(n Literals, isolation string) []Mutant {
	setFence := func(ctx context.Context, p Process, o cells.FenceOrder, floor cells.Epoch, open string) error {
		return raw(ctx, p, isolation, `INSERT INTO `+own(p, "fence")+` (tenant, epoch, floor, is_open, move) VALUES ($1, $2, $3, `+open+`, $4)
			ON CONFLICT (tenant) DO UPDATE SET epoch = excluded.epoch, floor = excluded.floor, is_open = excluded.is_open, move = excluded.move`,
			string(o.Tenant), int64(o.Epoch), int64(floor), string(o.Move))
	}
	return []Mutant{
		{"open at any epoch", []string{"orders", "orders-model"}, func(p Process) Process {
			return mutant{Process: p, open: func(ctx context.Context, o cells.FenceOrder) error {
				return setFence(ctx, p, o, o.Floor, n.True)
			}}
		}},
		{"open with the order's floor", []string{"orders"}, func(p Process) Process {
			return mutant{Process: p, open: func(ctx context.Context, o cells.FenceOrder) error {
				if err := p.OpenFence(ctx, o); err != nil {
					return err
				}
				return setFence(ctx, p, o, o.Floor, n.True)
			}}
		}},
		{"close at any epoch", []string{"orders", "orders-model"}, func(p Process) Process {
			return mutant{Process: p, close: func(ctx context.Context, o cells.FenceOrder) error {
				return setFence(ctx, p, o, o.Epoch, n.False)
			}}
		}},
		{"close by any move", []string{"orders"}, func(p Process) Process {
			return mutant{Process: p, close: func(ctx context.Context, o cells.FenceOrder) error {
				f, err := p.Fence(ctx, o.Tenant)
				if err == nil && !f.Open && f.Epoch == o.Epoch {
					return nil
				}
				return p.CloseFence(ctx, o)
			}}
		}},
		{"close that does not close", []string{"old-snapshot", "busy", "interleavings"}, func(p Process) Process {
			return mutant{Process: p, close: func(context.Context, cells.FenceOrder) error { return nil }}
		}},
		{"close that gives up and says it has closed", []string{"in-flight"}, func(p Process) Process {
			return mutant{Process: p, close: func(ctx context.Context, o cells.FenceOrder) error {
				_ = p.CloseFence(ctx, o)
				return nil
			}}
		}},
		{"pause that does not wait", []string{"relay-stuck", "relay-random"}, func(p Process) Process {
			return mutant{Process: p, pause: func(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
				err := raw(ctx, p, isolation, `INSERT INTO `+own(p, "outbox_barrier")+` (tenant, paused, epoch) VALUES ($1, `+n.True+`, $2)
					ON CONFLICT (tenant) DO UPDATE SET paused = excluded.paused, epoch = excluded.epoch`, string(o.Tenant), int64(o.Epoch))
				f, _ := p.Fence(ctx, o.Tenant)
				return f.Seq, err
			}}
		}},
		{"publication that does not heed the pause", []string{"relay-pause", "moved-events"}, func(p Process) Process {
			return mutant{Process: p, publish: func(ctx context.Context, t cells.TenantID, limit int, f func(context.Context, []guard.Event) error) (int, error) {
				fence, err := p.Fence(ctx, t)
				if err != nil {
					return 0, err
				}
				events, err := p.Events(ctx, t, fence.Published, limit)
				if err != nil || len(events) == 0 {
					return 0, err
				}
				return 0, f(ctx, events)
			}}
		}},
		{"recorded before it is accepted", []string{"relay-order"}, func(p Process) Process {
			return mutant{Process: p, publish: func(ctx context.Context, t cells.TenantID, limit int, f func(context.Context, []guard.Event) error) (int, error) {
				var batch []guard.Event
				n, err := p.PublishNext(ctx, t, limit, func(_ context.Context, events []guard.Event) error { batch = events; return nil })
				if err != nil || n == 0 {
					return n, err
				}
				return n, f(ctx, batch)
			}}
		}},
		{"never recorded", []string{"relay-order"}, func(p Process) Process {
			return mutant{Process: p, publish: func(ctx context.Context, t cells.TenantID, limit int, f func(context.Context, []guard.Event) error) (int, error) {
				return p.PublishNext(ctx, t, limit, func(ctx context.Context, events []guard.Event) error {
					_ = f(ctx, events)
					return errRefused
				})
			}}
		}},
		{"a start that forgets the mark", []string{"moved-events"}, func(p Process) Process {
			return mutant{Process: p, start: func(ctx context.Context, o cells.BarrierOrder, _ cells.EventSeq) error {
				return p.StartEvents(ctx, o, 0)
			}}
		}},
		{"a start that takes the mark as it is", []string{"moved-events"}, func(p Process) Process {
			return mutant{Process: p, start: func(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
				if err := p.StartEvents(ctx, o, mark); err != nil {
					return err
				}
				return raw(ctx, p, isolation, `UPDATE `+own(p, "outbox_head")+` SET seq = $2 WHERE tenant = $1`, string(o.Tenant), int64(mark))
			}}
		}},
		{"late starts", []string{"barrier-orders"}, func(p Process) Process {
			return mutant{Process: p, start: func(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
				_ = p.StartEvents(ctx, o, mark)
				return raw(ctx, p, isolation, `UPDATE `+own(p, "outbox_barrier")+` SET paused = `+n.False+` WHERE tenant = $1`, string(o.Tenant))
			}}
		}},
		{"a wait that is not woken", []string{"wait"}, func(p Process) Process {
			return mutant{Process: p, wait: func(ctx context.Context, _ cells.TenantID, _ cells.EventSeq) error {
				<-ctx.Done()
				return context.Cause(ctx)
			}}
		}},
		{"events that skip", []string{"events", "gapless"}, func(p Process) Process {
			return mutant{Process: p, events: func(ctx context.Context, t cells.TenantID, after cells.EventSeq, limit int) ([]guard.Event, error) {
				events, err := p.Events(ctx, t, after, limit)
				if len(events) > 3 {
					events = append(events[:2:2], events[3:]...)
				}
				return events, err
			}}
		}},
		{"a transaction that commits what failed", []string{"in-tx", "gapless"}, func(p Process) Process {
			return mutant{Process: p, inTx: func(ctx context.Context, iso string, fn func(context.Context, Tx) error) error {
				var ferr error
				err := p.InTx(ctx, iso, func(ctx context.Context, tx Tx) error { ferr = fn(ctx, tx); return nil })
				if ferr != nil {
					return ferr
				}
				return err
			}}
		}},
		{"prune of what is not published", []string{"prune"}, func(p Process) Process {
			return mutant{Process: p, prune: func(ctx context.Context, t cells.TenantID, upto cells.EventSeq) (int64, error) {
				for {
					n, err := p.PublishNext(ctx, t, 100, func(context.Context, []guard.Event) error { return nil })
					if n == 0 || err != nil {
						break
					}
				}
				return p.Prune(ctx, t, upto)
			}}
		}},
	}
}

// mutant replaces methods of a process.
type mutant struct {
	Process
	open, close func(context.Context, cells.FenceOrder) error
	pause       func(context.Context, cells.BarrierOrder) (cells.EventSeq, error)
	start       func(context.Context, cells.BarrierOrder, cells.EventSeq) error
	publish     func(context.Context, cells.TenantID, int, func(context.Context, []guard.Event) error) (int, error)
	wait        func(context.Context, cells.TenantID, cells.EventSeq) error
	events      func(context.Context, cells.TenantID, cells.EventSeq, int) ([]guard.Event, error)
	inTx        func(context.Context, string, func(context.Context, Tx) error) error
	prune       func(context.Context, cells.TenantID, cells.EventSeq) (int64, error)
}

func (m mutant) OpenFence(ctx context.Context, o cells.FenceOrder) error {
	if m.open != nil {
		return m.open(ctx, o)
	}
	return m.Process.OpenFence(ctx, o)
}

func (m mutant) CloseFence(ctx context.Context, o cells.FenceOrder) error {
	if m.close != nil {
		return m.close(ctx, o)
	}
	return m.Process.CloseFence(ctx, o)
}

func (m mutant) PauseEvents(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	if m.pause != nil {
		return m.pause(ctx, o)
	}
	return m.Process.PauseEvents(ctx, o)
}

func (m mutant) StartEvents(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	if m.start != nil {
		return m.start(ctx, o, mark)
	}
	return m.Process.StartEvents(ctx, o, mark)
}

func (m mutant) PublishNext(ctx context.Context, t cells.TenantID, limit int, f func(context.Context, []guard.Event) error) (int, error) {
	if m.publish != nil {
		return m.publish(ctx, t, limit, f)
	}
	return m.Process.PublishNext(ctx, t, limit, f)
}

func (m mutant) Wait(ctx context.Context, t cells.TenantID, after cells.EventSeq) error {
	if m.wait != nil {
		return m.wait(ctx, t, after)
	}
	return m.Process.Wait(ctx, t, after)
}

func (m mutant) Events(ctx context.Context, t cells.TenantID, after cells.EventSeq, limit int) ([]guard.Event, error) {
	if m.events != nil {
		return m.events(ctx, t, after, limit)
	}
	return m.Process.Events(ctx, t, after, limit)
}

func (m mutant) InTx(ctx context.Context, iso string, fn func(context.Context, Tx) error) error {
	if m.inTx != nil {
		return m.inTx(ctx, iso, fn)
	}
	return m.Process.InTx(ctx, iso, fn)
}

func (m mutant) Prune(ctx context.Context, t cells.TenantID, upto cells.EventSeq) (int64, error) {
	if m.prune != nil {
		return m.prune(ctx, t, upto)
	}
	return m.Process.Prune(ctx, t, upto)
}
