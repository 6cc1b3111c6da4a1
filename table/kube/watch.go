// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

const (
	watchRows = 1000            // bounds one update of a watch
	grace     = 5 * time.Second // how late the server may end a request
)

var errWatchClosed = fmt.Errorf("%w: watch", cells.ErrClosed)

// Watch implements [cells.RoutingTable].
func (t *Table) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	w := &watcher{t: t, at: from}
	if from == 0 {
		if err := w.list(ctx); err != nil {
			return nil, err
		}
	} else if _, err := w.check(ctx); err != nil {
		return nil, err
	}
	w.moved = time.Now()
	w.life, w.end = context.WithCancelCause(t.life)
	return w, nil
}

// watcher is a watch: one request after another, each from where the one before
// was. It has no goroutine of its own; a caller that does not call Next leaves what
// arrives to the connection, and the server ends the request.
type watcher struct {
	t    *Table
	life context.Context // ends with Close and with the table
	end  context.CancelCauseFunc

	// Used by Next's goroutine only:

	first   []cells.TenantRoute // listed, to be handed out before anything else
	at      cells.Revision      // everything up to here was handed out, or is in first
	moved   time.Time           // when at last grew
	req     watch.Interface     // nil: none
	cancel  context.CancelFunc  // ends req
	begun   time.Time           // of req
	heard   bool                // req gave an event or a bookmark that is not behind at
	stopped sync.Once
}

// list fetches every row that has changed since at, in the order of their changes,
// and begins behind them.
func (w *watcher) list(ctx context.Context) error {
	revision, err := w.t.all(ctx, func() { w.first = nil }, func(obj *unstructured.Unstructured) error {
		r, ok, err := decode(obj)
		if err == nil && ok && r.Revision > w.at {
			w.first = append(w.first, r)
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.SortFunc(w.first, func(a, b cells.TenantRoute) int { return cmp.Compare(a.Revision, b.Revision) })
	if n := len(w.first); n > 0 && w.first[n-1].Revision > revision {
		return fmt.Errorf("%w: kubernetes: a row at revision %d in a list of %d", cells.ErrInvalid, w.first[n-1].Revision, revision)
	}
	w.at, w.moved = max(w.at, revision), time.Now()
	return nil
}

// listed returns the next of what list has fetched; a sign of life if there is
// nothing (more).
func (w *watcher) listed() cells.RouteUpdate {
	n := min(len(w.first), watchRows)
	up := cells.RouteUpdate{Routes: w.first[:n:n], Revision: w.at}
	if w.first = w.first[n:]; len(w.first) > 0 {
		up.Revision = up.Routes[n-1].Revision
	}
	return up
}

// check fails if the server is not as far as the watch: it was restored, or another
// server has taken its place. It returns the server's revision.
func (w *watcher) check(ctx context.Context) (cells.Revision, error) {
	revision, err := w.t.current(ctx)
	if err == nil && w.at > revision {
		err = fmt.Errorf("%w: revision %d is ahead of the server's %d", cells.ErrCompacted, w.at, revision)
	}
	return revision, err
}

// open begins a request behind at.
func (w *watcher) open(ctx context.Context) error {
	life, cancel := context.WithCancel(w.life)
	// The request outlives this call; only its begin is bounded.
	late := time.AfterFunc(w.t.timeout, cancel)
	unlink := context.AfterFunc(ctx, cancel)
	seconds := int64(w.t.period / time.Second)
	req, err := w.t.client.Watch(life, metav1.ListOptions{ResourceVersion: rvString(w.at), AllowWatchBookmarks: true, TimeoutSeconds: &seconds})
	inTime, inContext := late.Stop(), unlink()
	if err == nil && (!inTime || !inContext) {
		req.Stop()
		err = context.DeadlineExceeded
	}
	if err != nil {
		cancel()
		if cause := context.Cause(w.life); cause != nil {
			return cause
		}
		return w.t.failed(ctx, "watching routes", err)
	}
	w.req, w.cancel, w.begun, w.heard = req, cancel, time.Now(), false
	return nil
}

// drop ends the request.
func (w *watcher) drop() {
	if w.req != nil {
		w.cancel()
		w.req.Stop()
		w.req = nil
	}
}

// Next implements [cells.RouteWatcher].
func (w *watcher) Next(ctx context.Context) (cells.RouteUpdate, error) {
	up, err := w.next(ctx)
	switch {
	case w.t.life.Err() != nil:
		err = errTableClosed
	case w.life.Err() != nil:
		err = errWatchClosed
	}
	if err != nil {
		if pull.EndOf(ctx) == nil {
			w.drop()
		}
		return cells.RouteUpdate{}, err
	}
	return up, nil
}

func (w *watcher) next(ctx context.Context) (cells.RouteUpdate, error) {
	if err := pull.EndOf(ctx); err != nil {
		return cells.RouteUpdate{}, err
	}
	if len(w.first) > 0 && w.life.Err() == nil {
		return w.listed(), nil
	}
	for {
		if w.req == nil {
			if err := w.open(ctx); err != nil {
				return cells.RouteUpdate{}, err
			}
		}
		late := time.NewTimer(time.Until(w.begun.Add(w.t.period + grace)))
		select {
		case ev, open := <-w.req.ResultChan():
			late.Stop()
			if !open {
				up, alive, err := w.ended(ctx)
				if alive || err != nil {
					return up, err
				}
				continue
			}
			up, ok, err := w.update(ev)
			if ok || err != nil {
				return up, err
			}
		case <-late.C:
			return cells.RouteUpdate{}, fmt.Errorf("%w: kubernetes: the watch does not end in time", cells.ErrUnavailable)
		case <-ctx.Done():
			late.Stop()
			return cells.RouteUpdate{}, pull.EndOf(ctx)
		case <-w.life.Done():
			late.Stop()
			return cells.RouteUpdate{}, context.Cause(w.life)
		}
	}
}

// stuckPeriods is after how many periods without progress a view is brought up by
// a list, if the server's revision has grown meanwhile.
const stuckPeriods = 3

// ended is called when the server has ended the request. A period in which it said
// nothing about how far it is, is made up for by asking: then that is the sign of
// life, of a view that has not moved. Bookmarks that do not move either (a server
// whose store gives it no progress notifications) are made up for by listing.
func (w *watcher) ended(ctx context.Context) (up cells.RouteUpdate, alive bool, err error) {
	heard, lasted := w.heard, time.Since(w.begun)
	w.drop()
	stuck := time.Since(w.moved) >= stuckPeriods*w.t.period
	if heard && !stuck {
		return up, false, nil
	}
	revision, err := w.check(ctx)
	if err != nil {
		return up, false, err
	}
	if !heard && lasted < w.t.period/2 {
		return up, false, fmt.Errorf("%w: kubernetes: the watch was ended after %s", cells.ErrUnavailable, lasted.Round(time.Millisecond))
	}
	if stuck {
		w.moved = time.Now()
		if revision > w.at {
			if err := w.list(ctx); err != nil {
				return up, false, err
			}
		}
	}
	return w.listed(), true, nil
}

// update takes an event, and with it those that have arrived behind it.
func (w *watcher) update(ev watch.Event) (up cells.RouteUpdate, ok bool, err error) {
	for {
		r, isRow, err := w.event(ev)
		if err != nil {
			return up, false, err
		}
		if isRow {
			up.Routes, ok = append(up.Routes, r), true
		}
		ok = ok || ev.Type == watch.Bookmark && w.heard
		if up.Revision = w.at; len(up.Routes) >= watchRows {
			return up, ok, nil
		}
		var open bool
		select {
		case ev, open = <-w.req.ResultChan():
			if !open { // seen again by the next call
				return up, ok, nil
			}
		default:
			return up, ok, nil
		}
	}
}

// event takes one event: a row, or none.
func (w *watcher) event(ev watch.Event) (r cells.TenantRoute, isRow bool, err error) {
	if ev.Type == watch.Error {
		return r, false, w.t.failed(w.life, "watching routes", apierrors.FromObject(ev.Object))
	}
	obj, isObject := ev.Object.(*unstructured.Unstructured)
	if !isObject {
		return r, false, fmt.Errorf("%w: kubernetes: a watch of %T", cells.ErrInvalid, ev.Object)
	}
	revision, err := revisionOf(obj.GetResourceVersion())
	if err != nil {
		return r, false, err
	}
	if revision < w.at || revision == w.at && ev.Type != watch.Bookmark {
		return r, false, nil // a server that is behind: no sign that counts
	}
	if ev.Type != watch.Bookmark {
		if r, isRow, err = decode(obj); err != nil {
			return r, false, err
		}
		if ev.Type == watch.Deleted && isRow {
			return r, false, fmt.Errorf("%w: the object of %s was removed at revision %d", cells.ErrCompacted, r.TenantID, revision)
		}
	}
	if w.heard = true; revision > w.at {
		w.at, w.moved = revision, time.Now()
	}
	return r, isRow, nil
}

// Close implements [cells.RouteWatcher].
func (w *watcher) Close() error {
	w.stopped.Do(func() { w.end(errWatchClosed) })
	return nil
}
