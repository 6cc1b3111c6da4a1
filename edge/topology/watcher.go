// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// Config configures a [Watcher].
type Config struct {
	// Client reaches the directory; it must not follow redirects or have a timeout.
	Client *http.Client
	// Directory is the base URL of the directory's channel listener.
	Directory string
	// Snapshot is the file that keeps the last known topology; "" keeps none. Key,
	// of at least 16 bytes, signs it.
	Snapshot string
	Key      []byte
	// Silence is how long the stream may say nothing before it counts as broken;
	// default 30 s.
	Silence time.Duration
	// Log; nil means slog.Default.
	Log *slog.Logger
}

// maxLine bounds one topology, in bytes.
const maxLine = 16 << 20

// Watcher follows a directory. Make one with [Watch].
type Watcher struct {
	cfg     Config
	url     string
	view    atomic.Pointer[view]
	changed signal
	born    time.Time
	seen    atomic.Int64 // when the view was last known to be current; nanoseconds after born
	stop    context.CancelFunc
	done    chan struct{}
	first   chan struct{} // closed when there is a view

	mu     sync.Mutex // guards breaks, last
	breaks uint64
	last   string
}

type view struct {
	source string
	base   time.Duration // age of a snapshot when it was read
	top    *api.Topology
	cells  map[cells.CellID][]string
	// by is the directory process that named each cell's addresses.
	by map[cells.CellID]string
}

var _ View = (*Watcher)(nil)

// Watch starts to follow the directory. It returns once there is a topology: from
// the directory, or, when it does not answer before ctx ends or at the first
// attempt, from the snapshot. ctx bounds that wait only. Errors: [cells.ErrInvalid] for a bad
// configuration or a snapshot that is not to be trusted, [cells.ErrUnavailable]
// when there is neither directory nor snapshot. The caller closes the watcher.
func Watch(ctx context.Context, cfg Config) (*Watcher, error) {
	switch {
	case cfg.Client == nil || cfg.Directory == "":
		return nil, fmt.Errorf("%w: topology: a client and the directory's URL are needed", cells.ErrInvalid)
	case cfg.Snapshot != "" && len(cfg.Key) < minKeyLength:
		return nil, fmt.Errorf("%w: topology: the snapshot key has %d bytes, want at least %d", cells.ErrInvalid, len(cfg.Key), minKeyLength)
	}
	if cfg.Silence <= 0 {
		cfg.Silence = 30 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	w := &Watcher{
		cfg: cfg, url: strings.TrimRight(cfg.Directory, "/") + api.PathTopology + "?watch=1",
		born: time.Now(), done: make(chan struct{}), first: make(chan struct{}),
	}
	if cfg.Snapshot != "" {
		// Looked at before it is needed: a file that is not to be trusted is found at a
		// start that somebody watches, not in an outage.
		s, err := read(cfg.Snapshot, cfg.Key)
		switch {
		case err == nil:
			w.view.Store(newView(s.Topology, nil, SourceSnapshot, max(0, time.Since(s.SeenAt))))
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
	}
	life, stop := context.WithCancel(context.Background())
	w.stop = stop
	failed := make(chan error, 1)
	go w.follow(life, failed)
	select {
	case <-w.first:
		return w, nil
	case err := <-failed:
		if w.view.Load() != nil {
			cfg.Log.Warn("topology: the directory cannot be reached; going on from the snapshot", "age", w.Status().Age.Round(time.Second), "err", err)
			return w, nil
		}
		select {
		case <-w.first:
			return w, nil
		case <-ctx.Done():
			w.Close()
			return nil, fmt.Errorf("%w: topology: %w", cells.ErrUnavailable, err)
		}
	case <-ctx.Done():
		if w.view.Load() != nil {
			return w, nil
		}
		w.Close()
		return nil, fmt.Errorf("%w: topology: %w", cells.ErrUnavailable, context.Cause(ctx))
	}
}

// Close stops following. The view stays as it is.
func (w *Watcher) Close() {
	w.stop()
	<-w.done
}

// follow reads streams until life ends; the first failure is told to failed.
func (w *Watcher) follow(life context.Context, failed chan<- error) {
	defer close(w.done)
	const least, most = 100 * time.Millisecond, 5 * time.Second
	pause := least
	for {
		got, err := w.stream(life)
		if life.Err() != nil {
			return
		}
		w.mu.Lock()
		w.breaks++
		news := w.last != err.Error()
		w.last = err.Error()
		w.mu.Unlock()
		if news {
			w.cfg.Log.Warn("topology: the stream from the directory broke; the last known topology stays in use", "err", err)
		}
		select {
		case failed <- err:
		default:
		}
		if got {
			pause = least
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-life.Done():
			return
		}
		pause = min(2*pause, most)
	}
}

// stream reads one stream to its end, which is always an error. got reports
// whether a topology came.
func (w *Watcher) stream(life context.Context) (got bool, err error) {
	ctx, cancel := context.WithCancelCause(life)
	defer cancel(nil)
	quiet := time.AfterFunc(w.cfg.Silence, func() { cancel(fmt.Errorf("%w: the directory was silent for %s", cells.ErrUnavailable, w.cfg.Silence)) })
	defer quiet.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url, nil)
	if err != nil {
		return false, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req.Header.Set("Accept", api.ContentNDJSON)
	resp, err := w.cfg.Client.Do(req)
	if err != nil {
		return false, w.broken(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return false, fmt.Errorf("%w: the directory answered %s", cells.ErrUnavailable, resp.Status)
	}
	sc := bufio.NewScanner(resp.Body)
	sc.Buffer(make([]byte, 64<<10), maxLine)
	for sc.Scan() {
		quiet.Reset(w.cfg.Silence)
		if len(sc.Bytes()) == 0 {
			continue
		}
		var line api.TopologyLine
		if err := json.Unmarshal(sc.Bytes(), &line); err != nil {
			return got, fmt.Errorf("%w: topology line: %w", cells.ErrInvalid, err)
		}
		switch {
		case line.Topology != nil:
			got = true
			w.take(line.Topology)
		case line.Alive && got:
			w.seen.Store(int64(time.Since(w.born)))
		}
	}
	err = sc.Err()
	if err == nil {
		err = errors.New("the directory ended the stream")
	}
	return got, w.broken(ctx, err)
}

func (w *Watcher) broken(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
}

// take makes a topology the view.
func (w *Watcher) take(top *api.Topology) {
	old := w.view.Load()
	next := newView(top, old, SourceDirectory, 0)
	w.seen.Store(int64(time.Since(w.born)))
	w.view.Store(next)
	select {
	case <-w.first:
	default:
		close(w.first)
	}
	if old != nil && old.source == next.source && reflect.DeepEqual(old.cells, next.cells) {
		return
	}
	w.changed.fire()
	if w.cfg.Snapshot != "" {
		if err := write(w.cfg.Snapshot, w.cfg.Key, snapshot{SeenAt: time.Now().UTC(), Topology: next.effective()}); err != nil {
			w.cfg.Log.Error("topology: the snapshot was not written", "path", w.cfg.Snapshot, "err", err)
		}
	}
}

func newView(top *api.Topology, old *view, source string, base time.Duration) *view {
	v := &view{source: source, base: base, top: top, cells: map[cells.CellID][]string{}, by: map[cells.CellID]string{}}
	for i := range top.Cells {
		c := &top.Cells[i]
		v.cells[c.ID], v.by[c.ID] = c.Upstreams, top.Directory
		if len(c.Upstreams) == 0 && old != nil && len(old.cells[c.ID]) > 0 && old.by[c.ID] != top.Directory {
			v.cells[c.ID], v.by[c.ID] = old.cells[c.ID], old.by[c.ID]
		}
	}
	return v
}

// effective is the topology with the addresses that are in use.
func (v *view) effective() *api.Topology {
	t := *v.top
	t.Cells = append([]api.TopologyCell(nil), t.Cells...)
	for i := range t.Cells {
		t.Cells[i].Upstreams = v.cells[t.Cells[i].ID]
	}
	return &t
}

// Topology returns the last topology as the directory told it, or nil. It must not
// be changed.
func (w *Watcher) Topology() *api.Topology {
	if v := w.view.Load(); v != nil {
		return v.top
	}
	return nil
}

// Upstreams implements [View].
func (w *Watcher) Upstreams(cell cells.CellID) []string {
	if v := w.view.Load(); v != nil {
		return v.cells[cell]
	}
	return nil
}

// Knows implements [View].
func (w *Watcher) Knows(cell cells.CellID) bool {
	if v := w.view.Load(); v != nil {
		_, ok := v.cells[cell]
		return ok
	}
	return false
}

// Changed implements [View].
func (w *Watcher) Changed() <-chan struct{} { return w.changed.wait() }

// Status implements [View].
func (w *Watcher) Status() Status {
	w.mu.Lock()
	s := Status{Breaks: w.breaks, LastError: w.last}
	w.mu.Unlock()
	if v := w.view.Load(); v != nil {
		s.Known, s.Source, s.Cells = true, v.source, len(v.cells)
		s.Age = v.base + time.Since(w.born)
		if v.source == SourceDirectory {
			s.Age = time.Since(w.born) - time.Duration(w.seen.Load())
		}
	}
	return s
}
