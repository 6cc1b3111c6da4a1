// SPDX-License-Identifier: Apache-2.0

package tenancytest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

func testRecord(e *env) {
	e.become(true, tenancy.Recording)
	for i := range 2 {
		if m, held, err := e.store.Record(e.ctx, "t"); err != nil || m != tenancy.Recording || !held {
			e.Fatalf("record %d: %q, %t, %v", i, m, held, err)
		}
	}
	for _, bad := range []cells.TenantID{"", "-", "*", "a b"} {
		if _, held, err := e.store.Record(e.ctx, bad); held || !errors.Is(err, cells.ErrInvalid) {
			e.Errorf("%q: %t, %v", bad, held, err)
		}
	}
	m, err := e.store.SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{})
	if err != nil || m != tenancy.Enforced {
		e.Fatalf("enforce: %q, %v", m, err)
	}
	if m, held, err := e.store.Record(e.ctx, "late"); err != nil || m != tenancy.Enforced || held || e.held("late") {
		e.Fatalf("record in enforced: %q, %t, %v", m, held, err)
	}
	// A tenant that is held is not said to be recorded now.
	if m, held, err := e.store.Record(e.ctx, "t"); err != nil || m != tenancy.Enforced || held {
		e.Fatalf("record of a held tenant in enforced: %q, %t, %v", m, held, err)
	}
	if m, err := e.store.SetMode(e.ctx, tenancy.Recording, tenancy.ModeWrite{}); err != nil || m != tenancy.Recording {
		e.Fatalf("back to recording: %q, %v", m, err)
	}
	if _, held, err := e.store.Record(e.ctx, "late"); err != nil || !held || !e.held("late") {
		e.Fatalf("record after returning: %t, %v", held, err)
	}
	if _, err := e.store.SetMode(e.ctx, "off", tenancy.ModeWrite{}); !errors.Is(err, cells.ErrInvalid) {
		e.Errorf("mode off: %v", err)
	}
}

// testRecordRunning: an insert that runs when the mode is written commits before it,
// also one that takes several tries.
func testRecordRunning(e *env) {
	e.become(true, tenancy.Recording)
	s := e.session(true)
	defer s.Close()
	for _, q := range []string{`BEGIN`, `SELECT mode FROM @s.own_mode FOR SHARE`, `INSERT INTO @s.tenancy (tenant) VALUES ('slow')`} {
		e.no(s.Exec(e.ctx, q), q)
	}
	tries := make(chan int, 100)
	done := make(chan error, 1)
	go func() {
		m, err := e.other().SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{Tried: func(n int) error { tries <- n; return nil }})
		if err == nil && m != tenancy.Enforced {
			err = fmt.Errorf("mode %q", m)
		}
		done <- err
	}()
	for range 2 {
		select {
		case <-tries:
		case err := <-done:
			e.Fatalf("the mode was written across a running insert: %v", err)
		case <-e.ctx.Done():
			e.Fatalf("no second try")
		}
	}
	e.no(s.Exec(e.ctx, `COMMIT`), "commit")
	e.no(<-done, "the write of the mode")
	if !e.held("slow") {
		e.Errorf("the insert is lost")
	}
}

// testRecordDuring: an insert that begins while the mode is being written waits, and
// then finds it and writes nothing, or writes when the change was given up.
func testRecordDuring(e *env) {
	e.guarded()
	for _, end := range []string{"COMMIT", "ROLLBACK"} {
		e.become(true, tenancy.Recording)
		s := e.session(true)
		for _, q := range []string{`BEGIN`, `LOCK TABLE @s.own_mode IN EXCLUSIVE MODE`, `UPDATE @s.own_mode SET mode = 'enforced'`} {
			e.no(s.Exec(e.ctx, q), q)
		}
		type result struct {
			mode tenancy.Mode
			held bool
			err  error
		}
		out := make(chan result, 1)
		go func() {
			m, h, err := e.other().Record(e.ctx, "new")
			out <- result{m, h, err}
		}()
		e.until("the insert waits, or has ended", func() bool {
			select {
			case r := <-out:
				e.Fatalf("an insert went past a write of the mode: %+v", r)
			default:
			}
			return e.exec(true, `DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = '@s.own_mode'::regclass) THEN RAISE 'none waits'; END IF; END $$`) == nil
		})
		// Meanwhile nobody else waits: not the reader of the mode, not a writer of data.
		soon, cancel := context.WithTimeout(e.ctx, 15*time.Second)
		if rows, err := e.store.Read(soon); err != nil || rows.Mode != tenancy.Recording {
			e.Errorf("a reader sees %q, %v before the commit", rows.Mode, err)
		}
		w := e.session(false)
		if err := w.Exec(soon, `INSERT INTO notes VALUES ('data', $1)`, len(end)); err != nil {
			e.Errorf("writing data while the mode is being written: %v", err)
		}
		w.Close()
		cancel()
		e.no(s.Exec(e.ctx, end), end)
		s.Close()
		r := <-out
		recorded := end == "ROLLBACK"
		if r.err != nil || r.held != recorded || e.held("new") != recorded || (r.mode == tenancy.Recording) != recorded {
			e.Errorf("after %s: %+v, held %t", end, r, e.held("new"))
		}
	}
}

// testRecordStream: a stream of overlapping inserts cannot hold the write off, and no
// insert is on both sides of it.
func testRecordStream(e *env) {
	e.become(true, tenancy.Recording)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var recorded, refused, after atomic.Int64
	var enforced atomic.Bool
	for w := range 6 {
		store := e.store
		if w%2 == 1 {
			store = e.other()
		}
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				was := enforced.Load()
				m, held, err := store.Record(e.ctx, cells.TenantID(fmt.Sprintf("t-%d-%d", w, i)))
				switch {
				case err != nil:
					e.Errorf("record: %v", err)
					return
				case held != (m == tenancy.Recording):
					e.Errorf("record: held %t in mode %q", held, m)
				case held:
					recorded.Add(1)
					if was {
						after.Add(1)
					}
				default:
					refused.Add(1)
				}
			}
		})
	}
	e.until("inserts are under way", func() bool { return recorded.Load() > 20 })
	var tries atomic.Int64
	m, err := e.other().SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{Tried: func(n int) error { tries.Store(int64(n)); return nil }})
	enforced.Store(true)
	if err != nil || m != tenancy.Enforced || tries.Load() > 2 {
		e.Errorf("against a stream of inserts: %q after %d tries, %v", m, tries.Load(), err)
	}
	e.until("inserts find the mode", func() bool { return refused.Load() > 20 || e.Failed() })
	close(stop)
	wg.Wait()
	held, err := e.store.Tenants(e.ctx)
	e.no(err, "tenants")
	if int64(len(held)) != recorded.Load() || after.Load() != 0 {
		e.Errorf("%d rows; %d inserts said that they recorded, %d of them after the mode was enforced", len(held), recorded.Load(), after.Load())
	}
}

// testModeLate: with too little time left no try begins, and the mode that is read
// back is the one that stands.
func testModeLate(e *env) {
	e.become(true, tenancy.Recording)
	tried := 0
	m, err := e.store.SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{Deadline: time.Now().Add(time.Second), Tried: func(int) error { tried++; return nil }})
	rows, rerr := e.store.Read(e.ctx)
	if err == nil || m != tenancy.Recording || rerr != nil || rows.Mode != tenancy.Recording {
		e.Errorf("a write that could end too late: %q, %v; the row says %q, %v", m, err, rows.Mode, rerr)
	}
	stop := errors.New("stop")
	m, err = e.store.SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{Tried: func(int) error { return stop }})
	if !errors.Is(err, stop) || m != tenancy.Recording {
		e.Errorf("a caller that stops it: %q, %v", m, err)
	}
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if m, err = e.store.SetMode(ctx, tenancy.Enforced, tenancy.ModeWrite{}); err == nil || m != tenancy.Recording {
		e.Errorf("a caller that has gone: %q, %v", m, err)
	}
}

func testModeAbsent(e *env) {
	e.no(e.db.SetRows(e.ctx, &tenancy.First{First: true, Cell: "a"}, "", selfOf("a"), false), "rows")
	m, err := e.store.SetMode(e.ctx, tenancy.Enforced, tenancy.ModeWrite{})
	if !errors.Is(err, cells.ErrNotFound) || m != "" {
		e.Errorf("without a mode row: %q, %v", m, err)
	}
}
