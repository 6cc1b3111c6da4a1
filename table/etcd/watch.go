// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

// watchRows bounds one update of a watch.
const watchRows = 1000

var errWatchClosed = fmt.Errorf("%w: watch", cells.ErrClosed)

// Watch implements [cells.RoutingTable].
func (t *Table) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	revision, err := t.revision(ctx)
	if err != nil {
		return nil, err
	}
	if from > revision {
		return nil, fmt.Errorf("%w: revision %d is ahead of the store's %d", cells.ErrCompacted, from, revision)
	}
	w := &watcher{t: t, upto: from, wake: make(chan struct{}, 1)}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.open(); err != nil {
		return nil, err
	}
	return w, nil
}

// watcher is a watch. A goroutine for each of its streams, of which there is at
// most one, moves what arrives into the queue.
type watcher struct {
	t    *Table
	wake chan struct{} // something below has changed

	mu     sync.Mutex          // guards all below
	queue  []cells.TenantRoute // received, not taken
	upto   cells.Revision      // everything up to here was received
	alive  bool                // a progress notification came since the last update
	heard  time.Time           // when the server last said anything
	stream context.Context     // of the open stream; nil: given up, the queue is full
	cancel context.CancelFunc
	err    error // why the watch is broken, told when the queue is empty
	closed bool
}

// open begins a stream behind upto. The caller holds mu.
func (w *watcher) open() error {
	t := w.t
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return errTableClosed
	}
	t.going.Add(1)
	t.mu.Unlock()
	// Watches that share a stream share its progress notifications, and its fate. The
	// client puts those with the same metadata on one stream.
	ctx := metadata.AppendToOutgoingContext(t.life, "cloister-watch", strconv.FormatUint(t.streams.Add(1), 10))
	w.stream, w.cancel = context.WithCancel(clientv3.WithRequireLeader(ctx))
	w.heard = time.Now()
	// From upto itself, whose event take skips: of a watch that begins in the future
	// the server does not say how far it is.
	responses := t.client.Watch(w.stream, t.routes, clientv3.WithRange(t.end), clientv3.WithRev(max(int64(w.upto), 1)), clientv3.WithFragment())
	go func(cancel context.CancelFunc) {
		defer t.going.Done()
		defer cancel()
		for res := range responses {
			if !w.take(&res) {
				return
			}
		}
		w.broke(fmt.Errorf("%w: the watch ended", cells.ErrUnavailable))
	}(w.cancel)
	return nil
}

func (w *watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *watcher) broke(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.signal()
}

// take keeps one response; false ends the stream.
func (w *watcher) take(res *clientv3.WatchResponse) bool {
	if err := res.Err(); err != nil {
		kind := cells.ErrUnavailable
		if res.CompactRevision != 0 || errors.Is(err, rpctypes.ErrCompacted) {
			kind = cells.ErrCompacted
		}
		w.broke(fmt.Errorf("%w: etcd: %v", kind, err))
		return false
	}
	w.mu.Lock()
	upto := w.upto // changed by the stream's own goroutine only
	w.mu.Unlock()
	var rows []cells.TenantRoute
	for _, ev := range res.Events {
		if cells.Revision(ev.Kv.ModRevision) <= upto {
			continue
		}
		if ev.Type == clientv3.EventTypeDelete {
			w.broke(fmt.Errorf("%w: the key %q was removed at revision %d", cells.ErrCompacted, ev.Kv.Key, ev.Kv.ModRevision))
			return false
		}
		r, err := w.t.decode(ev.Kv)
		if err != nil {
			w.broke(err)
			return false
		}
		rows = append(rows, r)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heard = time.Now()
	if len(rows) > 0 {
		w.queue = append(w.queue, rows...)
		w.upto = rows[len(rows)-1].Revision
	} else if rev := cells.Revision(res.Header.GetRevision()); res.IsProgressNotify() && rev >= w.upto {
		// A lower one comes from a member that is behind: no sign that counts.
		w.upto, w.alive = rev, true
	}
	w.signal()
	if len(w.queue) >= w.t.queue {
		w.stream = nil
		return false
	}
	return true
}

// ready returns what Next has to say now, if anything. The caller holds mu.
func (w *watcher) ready() (up cells.RouteUpdate, ok bool, err error) {
	switch {
	case w.closed:
		return up, false, errWatchClosed
	case w.t.life.Err() != nil:
		return up, false, errTableClosed
	case len(w.queue) > 0:
		n := min(len(w.queue), watchRows)
		for n < len(w.queue) && w.queue[n].Revision == w.queue[n-1].Revision {
			n++ // one transaction of another program
		}
		up = cells.RouteUpdate{Routes: append([]cells.TenantRoute(nil), w.queue[:n]...), Revision: w.queue[n-1].Revision}
		if w.queue = w.queue[n:]; len(w.queue) == 0 {
			w.queue, up.Revision, w.alive = nil, w.upto, false
		}
		return up, true, nil
	case w.err != nil:
		return up, false, w.err
	case w.stream == nil:
		return up, false, w.open()
	case w.alive:
		w.alive = false
		return cells.RouteUpdate{Revision: w.upto}, true, nil
	}
	return up, false, nil
}

// Next implements [cells.RouteWatcher].
func (w *watcher) Next(ctx context.Context) (cells.RouteUpdate, error) {
	begun := time.Now()
	idle := time.NewTimer(w.t.idle)
	defer idle.Stop()
	for {
		if err := pull.EndOf(ctx); err != nil {
			return cells.RouteUpdate{}, err
		}
		w.mu.Lock()
		up, ok, err := w.ready()
		stream, heard := w.stream, w.heard
		w.mu.Unlock()
		if ok || err != nil {
			return up, err
		}
		select {
		case <-w.wake:
			continue
		case <-ctx.Done():
			continue
		case <-w.t.life.Done():
			continue
		case <-idle.C:
		}
		// While nobody called Next nothing was asked for.
		if heard.Before(begun) {
			heard = begun
		}
		if quiet := time.Since(heard); quiet >= w.t.silence {
			w.broke(fmt.Errorf("%w: etcd: no sign of life for %s", cells.ErrUnavailable, quiet.Round(time.Millisecond)))
			w.mu.Lock()
			w.cancel()
			w.mu.Unlock()
			continue
		}
		w.ask(ctx, stream)
		idle.Reset(w.t.idle)
	}
}

// ask asks for a progress notification on the watch's stream. It waits no longer
// than until it would ask again: a client that is connecting takes no requests.
func (w *watcher) ask(ctx, stream context.Context) {
	stream, cancel := context.WithTimeout(stream, w.t.idle)
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	_ = w.t.client.RequestProgress(stream) // what comes of it is seen in take
}

// Close implements [cells.RouteWatcher].
func (w *watcher) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.cancel()
	w.signal()
	return nil
}
