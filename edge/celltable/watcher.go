// SPDX-License-Identifier: Apache-2.0

package celltable

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/rules"
	"github.com/cloister-dev/cloister/internal/sealed"
)

// Source reads a directory's table. Errors leave the last one in use. It must end
// when ctx does.
type Source interface {
	Table(ctx context.Context) (rules.Table, error)
}

// Sources of a view.
const (
	SourceDirectory = "directory"
	SourceSnapshot  = "snapshot"
)

// DefaultEvery is the default interval of reads.
const DefaultEvery = 5 * time.Second

// Config configures a [Watcher].
type Config struct {
	// Rules is the router's own part of the rules.
	Rules  rules.Config
	Source Source
	// Every is the interval of reads; default [DefaultEvery].
	Every time.Duration
	// Timeout bounds one read; default 5 s.
	Timeout time.Duration
	// Patience is how long [Watch] waits for the first read; default 3 s.
	Patience time.Duration
	// Folder, shared by the replicas, holds the snapshots; "" keeps none. Name is this
	// replica's, of letters, digits, dots, dashes and underscores; Key, of at least 16
	// bytes, signs.
	Folder string
	Name   string
	Key    []byte
	// Log; nil means slog.Default.
	Log *slog.Logger
}

// Status says how good a view is.
type Status struct {
	// Known: there is a table.
	Known bool `json:"known"`
	// Source is SourceDirectory or SourceSnapshot, "" when nothing is known.
	Source string `json:"source,omitempty"`
	// Age is how long ago the table was known to be the directory's.
	Age time.Duration `json:"age"`
	// Stale: the last read failed, or there was none.
	Stale bool `json:"stale"`
	// Cells is the number of rows; Problems are those of [rules.Index].
	Cells    int      `json:"cells"`
	Problems []string `json:"problems,omitempty"`
	// Reads counts reads that succeeded, Failures those that did not; LastError is the
	// last one's while Stale.
	Reads     uint64 `json:"reads"`
	Failures  uint64 `json:"failures"`
	LastError string `json:"last_error,omitempty"`
	// Snapshot is "" when the last table is in the folder, else why it is not.
	Snapshot string `json:"snapshot_error,omitempty"`
}

// view is one table.
type view struct {
	table  rules.Table
	index  *rules.Index
	source string
	base   time.Duration // its age when it became the view, if from a snapshot
}

// Watcher keeps the view. Make one with [Watch].
type Watcher struct {
	cfg  Config
	view atomic.Pointer[view]
	born time.Time
	seen atomic.Int64 // when the view was last known to be current; nanoseconds after born
	stop context.CancelFunc
	done chan struct{}

	taking sync.Mutex // held while a table becomes the view

	mu       sync.Mutex // guards what follows
	changed  chan struct{}
	reads    uint64
	failures uint64
	last     string
	unsaved  string // why the view is not in the folder
	dirty    bool
	saved    time.Time
}

// Watch makes a watcher and waits for its first table for Patience at most: it returns
// without one when neither the directory nor a snapshot has any. Errors are about the
// configuration; they wrap [cells.ErrInvalid].
func Watch(ctx context.Context, cfg Config) (*Watcher, error) {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&cfg.Every, DefaultEvery)
	def(&cfg.Timeout, 5*time.Second)
	def(&cfg.Patience, 3*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	var err error
	if cfg.Rules, err = cfg.Rules.WithDefaults(); err != nil {
		return nil, err
	}
	switch {
	case cfg.Source == nil:
		return nil, fmt.Errorf("%w: celltable: no source", cells.ErrInvalid)
	case cfg.Folder != "" && len(cfg.Key) < sealed.MinKey:
		return nil, fmt.Errorf("%w: celltable: the snapshots' key has %d bytes, want at least %d", cells.ErrInvalid, len(cfg.Key), sealed.MinKey)
	case cfg.Folder != "" && !fileName(cfg.Name):
		return nil, fmt.Errorf("%w: celltable: the replica's name %.80q; want letters, digits, dots, dashes and underscores", cells.ErrInvalid, cfg.Name)
	}
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	w := &Watcher{cfg: cfg, born: time.Now(), stop: stop, done: make(chan struct{}), changed: make(chan struct{})}
	first := make(chan struct{})
	go w.run(life, first)
	patience := time.NewTimer(cfg.Patience)
	defer patience.Stop()
	select {
	case <-first:
	case <-patience.C:
	case <-ctx.Done():
		w.Close()
		return nil, context.Cause(ctx)
	}
	if w.view.Load() == nil {
		w.fromSnapshot()
	}
	return w, nil
}

// Close ends the reading. The view stays as it is.
func (w *Watcher) Close() {
	w.stop()
	<-w.done
}

// Index returns the table, ready for decisions; nil while nothing is known.
func (w *Watcher) Index() *rules.Index {
	if v := w.view.Load(); v != nil {
		return v.index
	}
	return nil
}

// Table returns a copy of the table, and whether there is one.
func (w *Watcher) Table() (rules.Table, bool) {
	if v := w.view.Load(); v != nil {
		return v.table.Clone(), true
	}
	return rules.Table{}, false
}

// Changed returns a channel that is closed at the next change of the table.
func (w *Watcher) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

// Age returns how long ago the table was known to be the directory's.
func (w *Watcher) Age() time.Duration {
	v := w.view.Load()
	switch {
	case v == nil:
		return 0
	case v.source == SourceSnapshot:
		return v.base + time.Since(w.born)
	}
	return time.Since(w.born) - time.Duration(w.seen.Load())
}

// Status says how good the view is.
func (w *Watcher) Status() Status {
	w.mu.Lock()
	s := Status{Reads: w.reads, Failures: w.failures, LastError: w.last, Stale: w.last != "" || w.reads == 0, Snapshot: w.unsaved}
	w.mu.Unlock()
	if v := w.view.Load(); v != nil {
		s.Known, s.Source, s.Cells, s.Problems, s.Age = true, v.source, v.index.Cells(), v.index.Problems(), w.Age()
	}
	return s
}

// logEvery is how often an outage of the directory is logged.
const logEvery = time.Minute

// run reads until life ends. It closes first after the first read.
func (w *Watcher) run(life context.Context, first chan struct{}) {
	defer close(w.done)
	once := sync.OnceFunc(func() { close(first) })
	defer once()
	told := map[bool]time.Time{} // when a failure was last logged: of reading, of taking
	tick := time.NewTicker(w.cfg.Every)
	defer tick.Stop()
	for {
		err := w.read(life)
		switch {
		case life.Err() != nil:
			return
		case err == nil:
			clear(told)
		case told[errors.Is(err, errAnother)].IsZero() || time.Since(told[errors.Is(err, errAnother)]) >= logEvery:
			// An outage is told once and then once a minute, not with each read.
			told[errors.Is(err, errAnother)] = time.Now()
			w.cfg.Log.Warn("celltable: the directory's cells cannot be read, or not be used; the last known table stays in use", "known", w.view.Load() != nil, "age", w.Age().Round(time.Second), "err", err)
		}
		once()
		w.save()
		select {
		case <-tick.C:
		case <-life.Done():
			return
		}
	}
}

// read reads the table once and makes it the view.
func (w *Watcher) read(life context.Context) error {
	asked := time.Since(w.born) // a table is as old as the question
	ctx, cancel := context.WithTimeout(life, w.cfg.Timeout)
	table, err := w.cfg.Source.Table(ctx)
	cancel()
	if err == nil {
		err = w.take(table, SourceDirectory, 0)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		if life.Err() == nil {
			w.failures++
			w.last = err.Error()
		}
		return err
	}
	w.reads++
	w.last = ""
	w.seen.Store(int64(asked))
	return nil
}

// take makes a table the view.
func (w *Watcher) take(table rules.Table, source string, age time.Duration) error {
	index, err := rules.NewIndex(w.cfg.Rules, table)
	if err != nil {
		return err
	}
	next := &view{table: table.Clone(), index: index, source: source, base: age}
	w.taking.Lock()
	defer w.taking.Unlock()
	old := w.view.Load()
	if old != nil {
		if source == SourceSnapshot {
			return nil // a read came first
		}
		if table.Revision != 0 && table.Revision < old.table.Revision {
			return fmt.Errorf("%w: it is at revision %d, and was at %d", errAnother, table.Revision, old.table.Revision)
		}
		if lost := missing(old.table, table); lost != "" {
			return fmt.Errorf("%w: cell %s was serving and is not there", errAnother, lost)
		}
	}
	w.view.Store(next)
	same := old != nil && reflect.DeepEqual(old.table, next.table)
	if old == nil || !slices.Equal(old.index.Problems(), index.Problems()) {
		for _, p := range index.Problems() {
			w.cfg.Log.Error("celltable: the directory's cells: " + p)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if source == SourceDirectory && (!same || old.source == SourceSnapshot) {
		w.dirty = true
	}
	if !same {
		close(w.changed)
		w.changed = make(chan struct{})
	}
	return nil
}

// missing returns a cell that was serving and is gone.
func missing(old, now rules.Table) cells.CellID {
	for _, c := range old.Cells {
		if c.State == rules.Serving && !slices.ContainsFunc(now.Cells, func(n rules.Cell) bool { return n.Name == c.Name }) {
			return c.Name
		}
	}
	return ""
}

// errAnother: a cell never leaves a directory, and its revision only grows.
var errAnother = errors.New("celltable: this is another directory, or an old copy of it")

var errNoFile = errors.New("no snapshot in the folder can be used")

// fromSnapshot makes the newest good file the view.
func (w *Watcher) fromSnapshot() {
	if w.cfg.Folder == "" {
		return
	}
	s, err := w.newest()
	if err == nil {
		age := max(0, time.Since(s.SeenAt)-time.Since(w.born))
		if err = w.take(s.Table, SourceSnapshot, age); err == nil {
			w.cfg.Log.Warn("celltable: the directory cannot be read; going on from a snapshot", "of", s.Replica, "age", w.Age().Round(time.Second))
			return
		}
	}
	w.cfg.Log.Warn("celltable: the directory cannot be read and there is no snapshot; requests are refused until it can be", "err", err)
}
