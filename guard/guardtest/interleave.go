// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// testInterleavings runs random schedules of a few writers and a few orders,
// several schedules at a time. A step that waits for a lock is left waiting while
// others go on.
func testInterleavings(e *env) {
	total := e.h.Interleavings
	if total == 0 {
		total = 200
	}
	lanes := e.h.Lanes
	if lanes == 0 {
		lanes = 8
	}
	err := group(lanes, func(lane int) error {
		for n := lane; n < total; n += lanes {
			if err := interleave(e, uint64(n)); err != nil {
				return fmt.Errorf("interleaving %d: %w", n, err)
			}
		}
		return nil
	})
	if err != nil {
		e.Errorf("%v", err)
	}
}

// actor is something that does one step after the other; pending is the step
// that it has not finished.
type actor struct {
	name    string
	steps   []func(context.Context) error
	pending *call
	err     error  // ends the actor
	undo    func() // rolls a writer's transaction back
}

func (a *actor) over() bool { return a.pending == nil && (a.err != nil || len(a.steps) == 0) }

// settle takes the result of the pending step if there is one within d.
func (a *actor) settle(d time.Duration) bool {
	if a.pending == nil {
		return true
	}
	if !a.pending.ended(d) {
		return false
	}
	a.err, a.pending = a.pending.err, nil
	if a.err != nil && a.undo != nil {
		a.undo() // a refused writer goes home
	}
	return true
}

func interleave(e *env, seed uint64) error {
	rnd := rand.New(rand.NewPCG(seed, 7))
	tenant := newTenant()
	procs := []Process{e.a, e.b}
	if err := e.a.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: 1, Floor: 1}); err != nil {
		return err
	}
	var log strings.Builder
	var actors []*actor
	var mu sync.Mutex          // guards acked
	acked := map[string]bool{} // keys whose commit succeeded

	// snapshot is the state when a close returned. Only the driver changes it; it
	// ends when the driver opens again.
	snapshot := ""
	read := func(ctx context.Context) (string, error) {
		rows, err := e.a.Rows(ctx, tenant)
		if err != nil {
			return "", err
		}
		events, err := e.a.Events(ctx, tenant, 0, 1000)
		return fmt.Sprint(rows, len(events)), err
	}
	check := func(ctx context.Context) error {
		if snapshot == "" {
			return nil
		}
		now, err := read(ctx)
		if err == nil && now != snapshot {
			err = fmt.Errorf("when close returned there was %s, now there is %s", snapshot, now)
		}
		return err
	}

	writer := func(i int) *actor {
		iso := e.h.Isolations[rnd.IntN(len(e.h.Isolations))]
		p := procs[rnd.IntN(2)]
		epoch := cells.Epoch(1 + 2*rnd.IntN(2))
		key := fmt.Sprintf("w%d", i)
		a := &actor{name: fmt.Sprintf("%s(%s, epoch %d)", key, iso, epoch)}
		var tx Tx
		add := func(f func(ctx context.Context) error) { a.steps = append(a.steps, f) }
		add(func(ctx context.Context) (err error) {
			if tx, err = p.Begin(ctx, iso); err == nil {
				a.undo = tx.Rollback
			}
			return err
		})
		if rnd.IntN(2) == 0 {
			add(func(ctx context.Context) error { return tx.Read(ctx) })
		}
		if rnd.IntN(4) == 0 { // an admission that goes with its savepoint
			add(func(ctx context.Context) error { return tx.Exec(ctx, "SAVEPOINT s") })
			add(func(ctx context.Context) error { return tx.Admit(ctx, tenant, epoch) })
			add(func(ctx context.Context) error { return tx.Exec(ctx, "ROLLBACK TO SAVEPOINT s") })
		}
		add(func(ctx context.Context) error { return tx.Admit(ctx, tenant, epoch) })
		add(func(ctx context.Context) error { return put(ctx, tx, tenant, key, "v") })
		if rnd.IntN(2) == 0 {
			add(func(ctx context.Context) error { _, err := tx.Emit(ctx, "put", key); return err })
		}
		if rnd.IntN(5) == 0 {
			add(func(context.Context) error { tx.Rollback(); return nil })
		} else {
			add(func(ctx context.Context) error {
				err := tx.Commit(ctx)
				if err == nil {
					mu.Lock()
					acked[key] = true
					mu.Unlock()
				}
				return err
			})
		}
		return a
	}
	driver := &actor{name: "driver"}
	for _, n := range []cells.Epoch{2, 4} {
		driver.steps = append(driver.steps,
			func(ctx context.Context) error {
				if err := e.b.CloseFence(ctx, cells.FenceOrder{Tenant: tenant, Epoch: n, Move: "m"}); err != nil {
					return err
				}
				s, err := read(ctx)
				snapshot = s
				return err
			},
			check, check,
			func(ctx context.Context) error {
				if err := check(ctx); err != nil {
					return err
				}
				snapshot = ""
				if n == 4 {
					return nil
				}
				return e.a.OpenFence(ctx, cells.FenceOrder{Tenant: tenant, Epoch: n + 1, Floor: n + 1})
			})
	}
	// Orders that arrive late or twice.
	late := &actor{name: "late"}
	for range 4 {
		o := cells.FenceOrder{Tenant: tenant, Epoch: cells.Epoch(1 + rnd.IntN(4)), Move: "m"}
		late.steps = append(late.steps, func(ctx context.Context) error {
			var err error
			if o.Epoch%2 == 0 && o.Epoch <= 2 { // at most what the driver has begun with
				err = e.a.CloseFence(ctx, o)
			} else if o.Epoch == 1 {
				o.Floor = 1
				err = e.a.OpenFence(ctx, o)
			}
			if errors.Is(err, cells.ErrStaleOrder) {
				err = nil
			}
			return err
		})
	}
	for i := range 4 {
		actors = append(actors, writer(i))
	}
	actors = append(actors, driver, late)

	ctx, cancel := context.WithTimeout(e.ctx, e.patience())
	defer cancel()
	for {
		var ready []*actor
		waiting := 0
		for _, a := range actors {
			a.settle(0)
			switch {
			case a.over():
			case a.pending != nil:
				waiting++
			default:
				ready = append(ready, a)
			}
		}
		if len(ready) == 0 {
			if waiting == 0 {
				break
			}
			for _, a := range actors {
				if a.pending != nil && a.settle(2*time.Millisecond) {
					break
				}
			}
			if ctx.Err() != nil {
				return fmt.Errorf("stuck after %s", log.String())
			}
			continue
		}
		a := ready[rnd.IntN(len(ready))]
		step := a.steps[0]
		a.steps = a.steps[1:]
		fmt.Fprintf(&log, "%s:%d ", a.name, len(a.steps))
		a.pending = async(func() error { return step(ctx) })
		a.settle(4 * time.Millisecond)
	}
	for _, a := range actors {
		if a.undo != nil {
			a.undo()
		}
	}
	for _, a := range []*actor{driver, late} {
		if a.err != nil {
			return fmt.Errorf("%s: %w, after %s", a.name, a.err, log.String())
		}
	}
	rows, err := e.a.Rows(e.ctx, tenant)
	if err != nil {
		return err
	}
	for k := range acked {
		if _, there := rows[k]; !there {
			return fmt.Errorf("the acknowledged write %s is gone, after %s", k, log.String())
		}
	}
	if len(rows) != len(acked) {
		return fmt.Errorf("%d writes were acknowledged, %d are there, after %s", len(acked), len(rows), log.String())
	}
	return nil
}
