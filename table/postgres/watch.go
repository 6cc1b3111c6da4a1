// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

// Watch implements [cells.RoutingTable].
func (t *Table) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	var revision int64
	if err := t.pool.QueryRow(ctx, t.q.revision).Scan(&revision); err != nil {
		return nil, t.failed(ctx, "reading the revision", err)
	}
	if err := ahead(from, cells.Revision(revision)); err != nil {
		return nil, err
	}
	t.startListening()
	return &pull.Watcher{From: from, Since: t.since, Notice: &t.notice, Poll: t.poll, Idle: t.idle, Table: t.life}, nil
}

func ahead(from, revision cells.Revision) error {
	if from > revision {
		return fmt.Errorf("%w: revision %d is ahead of the table's %d", cells.ErrCompacted, from, revision)
	}
	return nil
}

func (t *Table) since(ctx context.Context, from cells.Revision) (cells.RouteUpdate, error) {
	routes, revision, err := t.rows(ctx, t.q.since, int64(from), watchRows)
	if err != nil {
		return cells.RouteUpdate{}, err
	}
	if err := ahead(from, revision); err != nil {
		return cells.RouteUpdate{}, err
	}
	if len(routes) == watchRows { // there may be more: the view is only as far as this
		revision = routes[len(routes)-1].Revision
	}
	return cells.RouteUpdate{Routes: routes, Revision: revision}, nil
}

// startListening starts the one listener of this handle, with its first watch.
func (t *Table) startListening() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listening || t.life.Err() != nil {
		return
	}
	t.listening = true
	t.listener.Go(t.listenLoop)
}

// listenLoop listens until the table is closed, and connects anew when it must.
func (t *Table) listenLoop() {
	wait := 100 * time.Millisecond
	for t.life.Err() == nil {
		begun := time.Now()
		_ = t.listen(t.life) // watches poll meanwhile, and report what is wrong
		if time.Since(begun) > 10*time.Second {
			wait = 100 * time.Millisecond
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-t.life.Done():
			pause.Stop()
		}
		wait = min(2*wait, 5*time.Second)
	}
}

// listen holds a connection of its own: the pool's are for queries, and a pool of
// one would be used up.
func (t *Table) listen(ctx context.Context) error {
	dial, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.ConnectConfig(dial, t.pool.Config().ConnConfig.Copy())
	if err != nil {
		return err
	}
	defer func() {
		bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(bye)
	}()
	if _, err := conn.Exec(dial, "LISTEN "+pgx.Identifier{t.q.channel}.Sanitize()); err != nil {
		return err
	}
	t.notice.Send() // what changed before the listener was there
	for {
		// A server that went away without a word is found out by asking.
		quiet, cancel := context.WithTimeout(ctx, 15*time.Second)
		_, err := conn.WaitForNotification(quiet)
		cancel()
		switch {
		case err == nil:
			t.notice.Send()
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded) && !conn.IsClosed():
			ping, cancel := context.WithTimeout(ctx, 5*time.Second)
			err := conn.Ping(ping)
			cancel()
			if err != nil {
				return err
			}
		default:
			return err
		}
	}
}
