// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"net/url"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// relayLock is held by the one process that publishes what is in a file: an
// exclusive lock on a second, empty SQLite file beside it, "-relay", which the
// operating system drops when the process ends. A lease by time would let two
// processes publish when one of them is slow.
type relayLock struct {
	mu       sync.Mutex // guards everything below, and taking the lock
	held     bool
	closed   bool
	db       *sql.DB
	conn     *sql.Conn
	inFlight map[cells.TenantID]struct{} // this process's publications
}

// own takes the relay's lock if it is free and reports whether this guard has it.
func (g *Guard) own(ctx context.Context) (bool, error) {
	l := &g.relay
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held || l.closed {
		return l.held, nil
	}
	var path string
	if err := g.db.QueryRowContext(ctx, `SELECT coalesce(file, '') FROM pragma_database_list WHERE name = 'main'`).Scan(&path); err != nil {
		return false, ended(ctx, translate(err))
	}
	if path != "" { // a database in memory has no other process
		dsn := "file:" + (&url.URL{Path: path + "-relay"}).EscapedPath()
		db := sql.OpenDB(opener{g.db.Driver(), dsn})
		conn, err := db.Conn(ctx)
		if err == nil {
			_, err = conn.ExecContext(ctx, `BEGIN EXCLUSIVE`)
			if err != nil {
				_ = conn.Close()
			}
		}
		if err != nil {
			_ = db.Close()
			if code(err) == codeBusy {
				return false, nil
			}
			return false, ended(ctx, fmt.Errorf("lock file of the relay: %w", translate(err)))
		}
		l.db, l.conn = db, conn
	}
	// Whatever turns there are belong to a process that has ended.
	if err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM cell_outbox_turn`)
		return err
	}); err != nil {
		l.drop()
		return false, err
	}
	l.held = true
	l.inFlight = map[cells.TenantID]struct{}{}
	return true, nil
}

// drop is called with mu held.
func (l *relayLock) drop() {
	if l.conn != nil {
		_ = l.conn.Close()
		_ = l.db.Close()
		l.conn, l.db = nil, nil
	}
	l.held = false
}

// begin marks a publication of the tenant; false if there is one.
func (l *relayLock) begin(tenant cells.TenantID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, there := l.inFlight[tenant]; there || !l.held {
		return false
	}
	l.inFlight[tenant] = struct{}{}
	return true
}

// end ends it. The lock of a closed guard is given up with its last publication.
func (l *relayLock) end(tenant cells.TenantID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inFlight, tenant)
	if l.closed && len(l.inFlight) == 0 {
		l.drop()
	}
}

func (l *relayLock) publishing(tenant cells.TenantID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, there := l.inFlight[tenant]
	return there
}

func (l *relayLock) has() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held
}

// yield gives the lock up if nothing is being published.
func (l *relayLock) yield() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.inFlight) == 0 {
		l.drop()
	}
}

// feed gives the relay's lock up when its relay ends.
type feed struct {
	guard.Feed
	l *relayLock
}

func (f feed) Close() {
	f.Feed.Close()
	f.l.yield()
}

// release yields, now or with the last publication, for good.
func (l *relayLock) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if len(l.inFlight) == 0 {
		l.drop()
	}
}

// opener opens further databases with the driver of the caller's.
type opener struct {
	driver driver.Driver
	dsn    string
}

func (o opener) Connect(context.Context) (driver.Conn, error) { return o.driver.Open(o.dsn) }
func (o opener) Driver() driver.Driver                        { return o.driver }
