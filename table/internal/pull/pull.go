// SPDX-License-Identifier: Apache-2.0

// Package pull makes a [cells.RouteWatcher] out of a query for the changes since
// a revision. The store is authoritative: a notice only says that it is worth
// asking, and asking happens without notices too, so a lost notice costs time and
// nothing else. A failed query ends the watch with its error.
package pull

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Notice is a broadcast: whoever waits learns that there may be changes. The zero
// value is ready.
type Notice struct {
	mu sync.Mutex // guards ch
	ch chan struct{}
}

// Wait returns a channel that the next Send closes.
func (n *Notice) Wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

// Send wakes everybody who waits.
func (n *Notice) Send() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}

// Watcher asks Since at once, at each notice, every Poll, and after Idle returns
// what it was told even if that is no change: a sign of life that is true. It
// owns no goroutine.
type Watcher struct {
	// From is the last revision reported; used by Next's goroutine only.
	From   cells.Revision
	Since  func(ctx context.Context, from cells.Revision) (cells.RouteUpdate, error)
	Notice *Notice
	Poll   time.Duration
	Idle   time.Duration
	// Table ends when the table is closed.
	Table context.Context

	mu     sync.Mutex              // guards all below
	cancel context.CancelCauseFunc // ends the Next that is waiting, or nil
	closed bool
}

var (
	errWatchClosed = fmt.Errorf("%w: watch", cells.ErrClosed)
	errTableClosed = fmt.Errorf("%w: table", cells.ErrClosed)
)

// Next implements [cells.RouteWatcher].
func (w *Watcher) Next(ctx context.Context) (cells.RouteUpdate, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(w.Table, func() { cancel(errTableClosed) })()
	w.mu.Lock()
	w.cancel = cancel
	if w.closed {
		cancel(errWatchClosed)
	}
	w.mu.Unlock()
	up, err := w.next(ctx)
	switch cause := context.Cause(ctx); {
	case err != nil && (cause == errWatchClosed || cause == errTableClosed):
		return cells.RouteUpdate{}, cause
	case err != nil:
		return cells.RouteUpdate{}, err
	}
	w.From = up.Revision
	return up, nil
}

func (w *Watcher) next(ctx context.Context) (cells.RouteUpdate, error) {
	idle := time.NewTimer(w.Idle)
	defer idle.Stop()
	poll := time.NewTicker(w.Poll)
	defer poll.Stop()
	for alive := false; ; {
		if w.Table.Err() != nil {
			return cells.RouteUpdate{}, errTableClosed
		}
		if err := EndOf(ctx); err != nil {
			return cells.RouteUpdate{}, err
		}
		// Before asking, so that no change falls between the answer and the wait.
		notice := w.Notice.Wait()
		up, err := w.Since(ctx, w.From)
		if err != nil || len(up.Routes) > 0 || alive {
			return up, err
		}
		select {
		case <-notice:
		case <-poll.C:
		case <-idle.C:
			alive = true
		case <-ctx.Done():
		}
	}
}

// Close implements [cells.RouteWatcher].
func (w *Watcher) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.cancel != nil {
		w.cancel(errWatchClosed)
	}
	return nil
}

// EndOf returns nil while ctx lasts, then its error and, if there is another, its
// cause.
func EndOf(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == nil || errors.Is(cause, err) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}
