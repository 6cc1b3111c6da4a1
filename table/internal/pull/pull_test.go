// SPDX-License-Identifier: Apache-2.0

package pull_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

// store is a table of one row that changes by a call.
type store struct {
	rev    atomic.Uint64
	fail   error
	hang   bool
	notice pull.Notice
}

func (s *store) since(ctx context.Context, from cells.Revision) (cells.RouteUpdate, error) {
	if s.hang {
		<-ctx.Done()
		return cells.RouteUpdate{}, pull.EndOf(ctx)
	}
	up := cells.RouteUpdate{Revision: cells.Revision(s.rev.Load())}
	if up.Revision > from {
		up.Routes = []cells.TenantRoute{{TenantID: "t", Revision: up.Revision}}
	}
	return up, s.fail
}

func watch(ctx context.Context, s *store) *pull.Watcher {
	return &pull.Watcher{Since: s.since, Notice: &s.notice, Poll: time.Second, Idle: 10 * time.Second, Table: ctx}
}

func TestNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{}
		s.rev.Store(1)
		w := watch(t.Context(), s)
		begin := time.Now()
		step := func(what string, want cells.Revision, rows int, after time.Duration) {
			t.Helper()
			up, err := w.Next(t.Context())
			if err != nil || up.Revision != want || len(up.Routes) != rows || time.Since(begin) != after {
				t.Fatalf("%s: %+v, %v after %s; want revision %d after %s", what, up, err, time.Since(begin), want, after)
			}
			begin = time.Now()
		}
		step("what is there already", 1, 1, 0)
		step("a sign of life", 1, 0, 10*time.Second)
		time.AfterFunc(300*time.Millisecond, func() { s.rev.Store(2); s.notice.Send() })
		step("a notice", 2, 1, 300*time.Millisecond)
		time.AfterFunc(300*time.Millisecond, func() { s.rev.Store(3) })
		step("a lost notice", 3, 1, time.Second)
		s.notice.Send() // nobody waits
		step("a stale notice", 3, 0, 10*time.Second)
		s.fail = cells.ErrUnavailable
		if _, err := w.Next(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
			t.Fatalf("a failing query: %v", err)
		}
	})
}

// Whatever ends a Next ends it at once, also while it asks.
func TestEnds(t *testing.T) {
	cause := errors.New("the caller's cause")
	for _, hang := range []bool{false, true} {
		for name, c := range map[string]struct {
			end  func(w *pull.Watcher, table context.CancelFunc, caller context.CancelCauseFunc)
			want error
		}{
			"watch":  {func(w *pull.Watcher, _ context.CancelFunc, _ context.CancelCauseFunc) { _ = w.Close() }, cells.ErrClosed},
			"table":  {func(_ *pull.Watcher, table context.CancelFunc, _ context.CancelCauseFunc) { table() }, cells.ErrClosed},
			"caller": {func(_ *pull.Watcher, _ context.CancelFunc, caller context.CancelCauseFunc) { caller(cause) }, cause},
		} {
			synctest.Test(t, func(t *testing.T) {
				table, endTable := context.WithCancel(t.Context())
				defer endTable()
				caller, endCaller := context.WithCancelCause(t.Context())
				defer endCaller(nil)
				w := watch(table, &store{hang: hang})
				done := make(chan error, 1)
				go func() {
					_, err := w.Next(caller)
					done <- err
				}()
				synctest.Wait()
				c.end(w, endTable, endCaller)
				synctest.Wait()
				select {
				case err := <-done:
					if !errors.Is(err, c.want) || name == "caller" && !errors.Is(err, context.Canceled) {
						t.Errorf("%s (asking %t): %v, want %v", name, hang, err, c.want)
					}
				default:
					t.Errorf("%s (asking %t): Next goes on", name, hang)
					endCaller(nil)
				}
				_ = w.Close()
				if _, err := w.Next(t.Context()); name != "caller" && !errors.Is(err, cells.ErrClosed) {
					t.Errorf("%s: Next after the end: %v", name, err)
				}
			})
		}
	}
}
