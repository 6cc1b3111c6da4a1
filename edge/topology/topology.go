// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Sources of a view.
const (
	SourceDirectory = "directory"
	SourceSnapshot  = "snapshot"
	SourceStatic    = "static"
)

// View is what an edge asks for each request. Implementations are safe for
// concurrent use and answer from memory.
type View interface {
	// Upstreams returns the base URLs of the cell's processes that take requests.
	// The caller must not change the slice.
	Upstreams(cell cells.CellID) []string
	// Knows reports whether the cell is in the topology at all.
	Knows(cell cells.CellID) bool
	// Changed returns a channel that is closed at the next change after the call.
	Changed() <-chan struct{}
	// Status says how good the view is.
	Status() Status
}

// Status says how good a view is.
type Status struct {
	// Known: there is a topology.
	Known bool `json:"known"`
	// Source is where it came from, "" when there is none.
	Source string `json:"source,omitempty"`
	// Age is how long ago it was known to be the directory's; 0 for a static one.
	Age time.Duration `json:"age"`
	// Cells is the number of cells in it.
	Cells int `json:"cells"`
	// Breaks counts broken streams and failed attempts; LastError is the last one's.
	Breaks    uint64 `json:"breaks"`
	LastError string `json:"last_error,omitempty"`
}

// signal is a channel that is replaced each time it is closed.
type signal struct {
	mu sync.Mutex // guards ch
	ch chan struct{}
}

func (s *signal) wait() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ch == nil {
		s.ch = make(chan struct{})
	}
	return s.ch
}

func (s *signal) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}

// Static is a topology that is set by hand. The zero value is not ready for use.
type Static struct {
	changed signal
	mu      sync.RWMutex // guards cells
	cells   map[cells.CellID][]string
}

var _ View = (*Static)(nil)

// NewStatic returns a topology of the given cells and their base URLs.
func NewStatic(upstreams map[cells.CellID][]string) *Static {
	s := &Static{cells: map[cells.CellID][]string{}}
	for id, urls := range upstreams {
		s.cells[id] = slices.Clone(urls)
	}
	return s
}

// Set replaces the base URLs of a cell.
func (s *Static) Set(cell cells.CellID, urls ...string) {
	s.mu.Lock()
	next := maps.Clone(s.cells)
	next[cell] = slices.Clone(urls)
	s.cells = next
	s.mu.Unlock()
	s.changed.fire()
}

// Upstreams implements [View].
func (s *Static) Upstreams(cell cells.CellID) []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.cells[cell]
}

// Knows implements [View].
func (s *Static) Knows(cell cells.CellID) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	_, ok := s.cells[cell]
	return ok
}

// Changed implements [View].
func (s *Static) Changed() <-chan struct{} { return s.changed.wait() }

// Status implements [View].
func (s *Static) Status() Status {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return Status{Known: true, Source: SourceStatic, Cells: len(s.cells)}
}
