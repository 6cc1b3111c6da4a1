// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

var (
	errWatchClosed = fmt.Errorf("%w: watch", cells.ErrClosed)
	errDeadPeer    = fmt.Errorf("%w: remote table: no heartbeat", cells.ErrUnavailable)
)

// Watch implements [cells.RoutingTable].
func (c *Client) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	if err := c.begin(ctx); err != nil {
		return nil, err
	}
	if from >= 1<<63 {
		return nil, fmt.Errorf("%w: revision %d is ahead of every table", cells.ErrCompacted, from)
	}
	// The watch outlives ctx, which only bounds its begin.
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stopCaller := context.AfterFunc(ctx, func() { cancel(endOf(ctx)) })
	stopClient := context.AfterFunc(c.life, func() { cancel(errClientClosed) })
	w := &watcher{at: from, cancel: cancel, dead: 3 * c.heartbeat, lines: make(chan line), ended: make(chan struct{})}
	w.timer = time.AfterFunc(c.timeout, func() { cancel(errDeadPeer) })
	fail := func(err error) (cells.RouteWatcher, error) {
		stopCaller()
		stopClient()
		w.timer.Stop()
		cause := context.Cause(life)
		cancel(nil)
		switch {
		case ctx.Err() != nil:
			return nil, endOf(ctx)
		case cause != nil:
			return nil, cause
		}
		return nil, err
	}
	q := url.Values{
		"watch": {"1"}, "from": {strconv.FormatUint(uint64(from), 10)},
		"heartbeat_ms": {strconv.FormatInt(c.heartbeat.Milliseconds(), 10)},
	}
	res, err := c.send(life, http.MethodGet, "?"+q.Encode(), nil)
	if err != nil {
		return fail(err)
	}
	if err := wantType(res, typeNDJSON); err != nil {
		_ = res.Body.Close()
		return fail(err)
	}
	c.mu.Lock()
	if c.closed || !stopCaller() {
		c.mu.Unlock()
		_ = res.Body.Close()
		return fail(errClientClosed)
	}
	c.going.Add(1)
	c.mu.Unlock()
	w.timer.Reset(w.dead)
	go func() {
		defer c.going.Done()
		defer stopClient()
		w.read(life, res.Body)
	}()
	return w, nil
}

// watcher is a watch. Its goroutine reads lines and ends with the connection.
type watcher struct {
	at     cells.Revision // used by Next's goroutine only
	dead   time.Duration
	timer  *time.Timer
	cancel context.CancelCauseFunc
	lines  chan line     // updates
	ended  chan struct{} // closed after err is set
	err    error
	once   sync.Once
}

// read passes updates on until the connection ends.
func (w *watcher) read(ctx context.Context, body io.ReadCloser) {
	defer close(w.ended)
	defer func() { _ = body.Close() }()
	defer w.timer.Stop()
	in := bufio.NewReaderSize(body, 64<<10)
	var err error
	for err == nil {
		var b []byte
		if b, err = readLine(in); err == nil {
			w.timer.Reset(w.dead)
			err = w.pass(ctx, b)
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	w.err = err
	w.cancel(nil)
}

func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := in.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > maxLine:
			return nil, fmt.Errorf("%w: remote table: a line of more than %d bytes", cells.ErrUnavailable, maxLine)
		case err == nil:
			return bytes.TrimSuffix(line, []byte("\n")), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, fmt.Errorf("%w: remote table: the watch broke off: %v", cells.ErrUnavailable, err)
		}
	}
}

func (w *watcher) pass(ctx context.Context, b []byte) error {
	var l line
	if err := json.Unmarshal(b, &l); err != nil {
		return fmt.Errorf("%w: remote table: line of a watch: %v", cells.ErrUnavailable, err)
	}
	if l.Error != nil {
		return l.Error.err()
	}
	if l.Alive {
		return nil
	}
	// While the consumer is slow nothing is read, and no heartbeat can arrive.
	w.timer.Stop()
	select {
	case w.lines <- l:
		w.timer.Reset(w.dead)
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Next implements [cells.RouteWatcher].
func (w *watcher) Next(ctx context.Context) (cells.RouteUpdate, error) {
	if ctx.Err() != nil {
		return cells.RouteUpdate{}, endOf(ctx)
	}
	select {
	case l := <-w.lines:
		return w.take(l)
	case <-w.ended:
		return cells.RouteUpdate{}, w.err
	case <-ctx.Done():
		return cells.RouteUpdate{}, endOf(ctx)
	}
}

// take checks that an update goes on from the one before.
func (w *watcher) take(l line) (cells.RouteUpdate, error) {
	last := w.at
	for i := range l.Routes {
		r := &l.Routes[i]
		if err := checkRow(r); err != nil {
			return cells.RouteUpdate{}, err
		}
		if r.Revision <= last || r.Revision > l.Revision {
			return cells.RouteUpdate{}, fmt.Errorf("%w: remote table: %s at revision %d does not go on from %d", cells.ErrUnavailable, r.TenantID, r.Revision, last)
		}
		last = r.Revision
	}
	if l.Revision < w.at {
		return cells.RouteUpdate{}, fmt.Errorf("%w: remote table: the watch went back from revision %d to %d", cells.ErrUnavailable, w.at, l.Revision)
	}
	w.at = l.Revision
	return cells.RouteUpdate{Routes: l.Routes, Revision: l.Revision}, nil
}

// Close implements [cells.RouteWatcher]. It waits until the connection is given up.
func (w *watcher) Close() error {
	w.once.Do(func() { w.cancel(errWatchClosed) })
	<-w.ended
	return nil
}
