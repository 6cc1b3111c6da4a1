// SPDX-License-Identifier: Apache-2.0

package publishertest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite" // the database/sql driver "sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

// cell is a cell's database with its guard and a relay that runs all the time.
type cell struct {
	id   cells.CellID
	db   *sql.DB
	g    *sqlite.Guard
	stop func()
}

func (e *env) cell(dir string, id cells.CellID) *cell {
	e.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, string(id)+".db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate&_pragma=synchronous(NORMAL)")
	e.must(err, "open a database")
	quiet := slog.New(slog.DiscardHandler)
	g, err := sqlite.New(db, sqlite.WithCell(id), sqlite.WithLogger(quiet), sqlite.WithPoll(20*time.Millisecond), sqlite.WithLockWait(15*time.Second))
	e.must(err, "guard")
	e.must(g.Install(e.ctx, nil), "install")
	r, err := guard.NewRelay(guard.RelayConfig{Store: g, Publisher: e.publisher(), Batch: 7, Poll: 50 * time.Millisecond,
		Timeout: 500 * time.Millisecond, MinBackoff: time.Millisecond, MaxBackoff: 20 * time.Millisecond, Logger: quiet})
	e.must(err, "relay")
	ctx, cancel := context.WithCancel(e.ctx)
	ended := make(chan struct{})
	go func() { defer close(ended); _ = r.Run(ctx) }()
	return &cell{id: id, db: db, g: g, stop: func() {
		cancel()
		<-ended
		g.Close()
		_ = db.Close()
	}}
}

func (e *env) must(err error, what string) {
	e.Helper()
	if err != nil {
		e.Fatalf("%s: %v", what, err)
	}
}

// emit writes n events at the epoch, each in a transaction of its own.
func (e *env) emit(c *cell, t cells.TenantID, epoch cells.Epoch, n int) {
	e.Helper()
	ctx := guard.ContextWith(e.ctx, guard.Admission{Tenant: t, Epoch: epoch, Cell: c.id})
	for range n {
		e.must(c.g.InTx(ctx, nil, func(ctx context.Context, tx *sql.Tx) error {
			_, err := c.g.Emit(ctx, tx, "thing.changed", map[string]any{"epoch": epoch})
			return err
		}), "emit")
	}
}

// carry copies the rows that travel with a tenant.
func (e *env) carry(from, to *cell, t cells.TenantID) {
	e.Helper()
	for _, table := range from.g.MovedTables() {
		_, err := to.db.ExecContext(e.ctx, `DELETE FROM `+table.Name+` WHERE `+table.TenantColumn+` = ?`, string(t))
		e.must(err, "carry")
		rows, err := from.db.QueryContext(e.ctx, `SELECT * FROM `+table.Name+` WHERE `+table.TenantColumn+` = ?`, string(t))
		e.must(err, "carry")
		cols, err := rows.Columns()
		e.must(err, "carry")
		for rows.Next() {
			row, at := make([]any, len(cols)), make([]any, len(cols))
			for i := range row {
				at[i] = &row[i]
			}
			e.must(rows.Scan(at...), "carry")
			_, err := to.db.ExecContext(e.ctx, `INSERT INTO `+table.Name+` VALUES (?`+strings.Repeat(", ?", len(cols)-1)+`)`, row...)
			e.must(err, "carry")
		}
		e.must(rows.Err(), "carry")
		_ = rows.Close()
	}
}

// testMove: a tenant goes to and fro between two cells whose relays never rest,
// over a link that fails in another way each time. Between a pause and the start in
// the other cell nothing is stored.
func testMove(e *env) {
	dir, err := os.MkdirTemp("", "publishertest-")
	e.must(err, "folder")
	defer func() { _ = os.RemoveAll(dir) }()
	a, b := e.cell(dir, "a"), e.cell(dir, "b")
	defer a.stop()
	defer b.stop()
	t, other := newTenant(), newTenant()
	epoch := cells.Epoch(1)
	e.must(a.g.OpenFence(e.ctx, cells.FenceOrder{Tenant: t, Epoch: epoch, Floor: epoch}), "open")
	e.must(a.g.OpenFence(e.ctx, cells.FenceOrder{Tenant: other, Epoch: 1, Floor: 1}), "open")
	from, to, home := a, b, a
	type written struct {
		cell  cells.CellID
		epoch cells.Epoch
	}
	var want []written // by number
	for round := range 4 {
		e.emit(from, t, epoch, 20)
		for range 20 {
			want = append(want, written{from.id, epoch})
		}
		link := e.b.Link()
		switch round {
		case 0: // in the middle of a backlog
		case 1:
			link.HoldAnswers() // for longer than anybody waits
		case 2:
			link.LoseAnswers()
		case 3:
			link.Cut()
		}
		order := cells.BarrierOrder{Tenant: t, Epoch: epoch + 1, Move: cells.MoveID(fmt.Sprintf("m%d", round))}
		e.must(from.g.CloseFence(e.ctx, cells.FenceOrder{Tenant: t, Epoch: epoch + 1, Move: order.Move}), "close")
		mark, err := from.g.PauseEvents(e.ctx, order)
		e.must(err, "pause")
		if int(mark) != len(want) {
			e.Errorf("the mark is %d, want %d", mark, len(want))
		}
		before := len(e.log(t))
		if n, err := from.g.PublishNext(e.ctx, t, 10, func(context.Context, []guard.Event) error { return errors.New("called") }); n != 0 || err != nil && !errors.Is(err, guard.ErrBusy) {
			e.Errorf("the source publishes behind a closed fence: %d, %v", n, err)
		}
		link.Release()
		link.Cut()
		e.emit(home, other, 1, 5) // flows meanwhile
		e.eventually("another tenant's events are stored", func() bool { return high(e.log(other)) == cells.EventSeq(5*(round+1)) })
		if after := len(e.log(t)); after != before {
			e.Errorf("round %d: %d events of a fenced tenant were stored after the pause", round, after-before)
		}
		e.carry(from, to, t)
		epoch += 2
		order.Epoch = epoch
		e.must(to.g.StartEvents(e.ctx, order, mark), "start")
		e.must(to.g.OpenFence(e.ctx, cells.FenceOrder{Tenant: t, Epoch: epoch, Floor: epoch}), "open")
		from, to = to, from
	}
	e.emit(from, t, epoch, 5)
	for range 5 {
		want = append(want, written{from.id, epoch})
	}
	e.eventually("everything is recorded as published", func() bool {
		f, err := from.g.Fence(e.ctx, t)
		return err == nil && f.Published == cells.EventSeq(len(want))
	})
	log := e.log(t)
	ids := map[cells.EventSeq]guard.Event{}
	for _, ev := range log {
		if _, ok := ids[ev.Seq]; !ok {
			ids[ev.Seq] = ev
		}
	}
	e.check(log, cells.EventSeq(len(want)), func(s cells.EventSeq) guard.Event { return ids[s] }, true)
	for i, w := range want {
		if got := ids[cells.EventSeq(i+1)]; got.Cell != w.cell || got.Epoch != w.epoch {
			e.Errorf("event %d is of cell %s at epoch %d, want %s at %d", i+1, got.Cell, got.Epoch, w.cell, w.epoch)
		}
	}
}

func high(log []guard.Event) (h cells.EventSeq) {
	for _, ev := range log {
		h = max(h, ev.Seq)
	}
	return h
}
