// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/internal/sealed"
)

// Source gives out the directory's topologies; [*client.EdgeClient] is one.
type Source interface {
	// WatchTopology calls f with the topology now and after each change, and with nil
	// as a sign of life, until the watch ends. It returns f's error, the context's, or
	// why the watch broke; a silent one breaks.
	WatchTopology(ctx context.Context, f func(*api.Topology) error) error
}

// Config configures a [Watcher].
type Config struct {
	// Client and Directory are a client of the channel that reaches directories, and
	// the base URL of the directory's channel listener. Or Source is set.
	Client    *http.Client
	Directory string
	Source    Source
	// Snapshot is the file that keeps the last known topology; "" keeps none. Key,
	// of at least 16 bytes, signs it.
	Snapshot string
	Key      []byte
	// Patience is how long [Watch] waits for a directory that does not answer before
	// it goes on from a snapshot that it has; default 3 s.
	Patience time.Duration
	// Log; nil means slog.Default.
	Log *slog.Logger
}

// logEvery is how often an outage of the directory is logged.
const logEvery = time.Minute

// Watcher follows a directory. Make one with [Watch].
type Watcher struct {
	cfg     Config
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
	// versions are the cells' labels.
	versions map[cells.CellID]string
}

var _ View = (*Watcher)(nil)

// Watch starts to follow the directory. It returns once there is a topology: from
// the directory or, when that cannot be reached or lets wait for longer than
// Patience, from the snapshot. Without a snapshot it tries until ctx ends, which
// bounds that wait only. A snapshot that is not to be trusted (torn, or signed with
// another key) is logged and ignored; it is replaced once the directory answers.
// Errors: [cells.ErrInvalid] for a bad configuration, or for such a snapshot when
// the directory does not answer within Patience either; [cells.ErrUnavailable] when
// there is neither directory nor snapshot. The caller closes the watcher.
func Watch(ctx context.Context, cfg Config) (*Watcher, error) {
	if cfg.Snapshot != "" && len(cfg.Key) < sealed.MinKey {
		return nil, fmt.Errorf("%w: topology: the snapshot key has %d bytes, want at least %d", cells.ErrInvalid, len(cfg.Key), sealed.MinKey)
	}
	if cfg.Source == nil {
		if cfg.Client == nil {
			return nil, fmt.Errorf("%w: topology: a client and the directory's URL are needed", cells.ErrInvalid)
		}
		source, err := client.Edge(cfg.Client, cfg.Directory)
		if err != nil {
			return nil, err
		}
		cfg.Source = source
	}
	if cfg.Patience <= 0 {
		cfg.Patience = 3 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	w := &Watcher{cfg: cfg, born: time.Now(), done: make(chan struct{}), first: make(chan struct{})}
	var bad error // why the snapshot cannot be used
	if cfg.Snapshot != "" {
		s, err := read(cfg.Snapshot, cfg.Key)
		switch {
		case err == nil:
			w.view.Store(newView(s.Topology, nil, SourceSnapshot, max(0, time.Since(s.SeenAt))))
		case !errors.Is(err, fs.ErrNotExist):
			bad = err
			cfg.Log.Warn("topology: the snapshot is not used; waiting for the directory", "err", err)
		}
	}
	life, stop := context.WithCancel(context.Background())
	w.stop = stop
	failed := make(chan error, 1)
	go w.follow(life, failed)
	last := fmt.Errorf("%w: no answer from the directory yet", cells.ErrUnavailable)
	patience := time.NewTimer(cfg.Patience)
	defer patience.Stop()
	over := false // patience
	for {
		select {
		case <-w.first:
			return w, nil
		case last = <-failed:
		case <-patience.C:
			over = true
		case <-ctx.Done():
			last = fmt.Errorf("%w (%w)", last, context.Cause(ctx))
		}
		switch {
		case w.view.Load() != nil:
			st := w.Status()
			if st.Source == SourceSnapshot {
				cfg.Log.Warn("topology: the directory cannot be reached; going on from the snapshot", "age", st.Age.Round(time.Second), "err", last)
			}
			return w, nil
		case over && bad != nil:
			w.Close()
			return nil, fmt.Errorf("topology: the directory cannot be reached (%w) and the snapshot cannot be used: %w", last, bad)
		case ctx.Err() != nil:
			w.Close()
			return nil, fmt.Errorf("topology: %w", errors.Join(last, bad))
		}
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
	var told time.Time // when a break was last logged
	for {
		got, err := w.stream(life)
		if life.Err() != nil {
			return
		}
		w.mu.Lock()
		w.breaks++
		w.last = err.Error()
		w.mu.Unlock()
		// An outage is told once and then once a minute, not with each attempt.
		if got || told.IsZero() || time.Since(told) >= logEvery {
			told = time.Now()
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
	err = w.cfg.Source.WatchTopology(life, func(t *api.Topology) error {
		switch {
		case t != nil:
			got = true
			w.take(t)
		case got:
			w.seen.Store(int64(time.Since(w.born)))
		}
		return nil
	})
	if err == nil {
		err = errors.New("the watch ended")
	}
	if !errors.Is(err, cells.ErrUnavailable) {
		err = fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return got, err
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
		if err := format.Write(w.cfg.Snapshot, w.cfg.Key, snapshot{SeenAt: time.Now().UTC(), Topology: next.effective()}); err != nil {
			w.cfg.Log.Error("topology: the snapshot was not written", "path", w.cfg.Snapshot, "err", err)
		}
	}
}

func newView(top *api.Topology, old *view, source string, base time.Duration) *view {
	v := &view{source: source, base: base, top: top, cells: map[cells.CellID][]string{}, by: map[cells.CellID]string{}, versions: map[cells.CellID]string{}}
	for i := range top.Cells {
		c := &top.Cells[i]
		v.cells[c.ID], v.by[c.ID], v.versions[c.ID] = c.Upstreams, top.Directory, c.Version
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

// Version is the version that the directory says the cell has; "" if it says none.
func (w *Watcher) Version(cell cells.CellID) string {
	if v := w.view.Load(); v != nil {
		return v.versions[cell]
	}
	return ""
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
