// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"reflect"
	"slices"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

// fleet is this process's view of the cells, and the topology made from it and
// from the members.
type fleet struct {
	store     Store
	directory string
	locate    func(cells.CellID) []member.Heartbeat
	changed   broadcast

	mu       sync.RWMutex
	cells    []api.Cell   // guarded by mu; replaced, never changed in place
	topology api.Topology // guarded by mu; replaced, never changed in place

	rebuildMu sync.Mutex // held while a topology is made, so that none is older than its serial
}

// refresh reads the cells. Their counts are part of it.
func (f *fleet) refresh(ctx context.Context) error {
	list, _, err := f.store.Cells(ctx)
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.cells = list
	f.mu.Unlock()
	f.rebuild()
	return nil
}

// rebuild makes the topology anew and announces it if it differs.
func (f *fleet) rebuild() {
	f.rebuildMu.Lock()
	defer f.rebuildMu.Unlock()
	f.mu.RLock()
	list, old := f.cells, f.topology
	f.mu.RUnlock()

	next := api.Topology{Serial: old.Serial, Directory: f.directory, Cells: make([]api.TopologyCell, 0, len(list))}
	for i := range list {
		c := &list[i]
		if c.Default {
			next.DefaultCell = c.ID
		}
		t := api.TopologyCell{
			ID: c.ID, Host: c.Host, Aliases: c.Aliases, Issuers: c.Issuers, Jurisdiction: c.Jurisdiction, Geography: c.Geography,
			Version: c.Version, State: c.State, Closed: c.Closed, Upstreams: []string{},
		}
		var down []string // lives, without its store
		for _, h := range f.locate(c.ID) {
			if h.ServiceURL == "" {
				continue
			}
			if !h.Ready {
				if h.StoreDown && !slices.Contains(down, h.ServiceURL) {
					down = append(down, h.ServiceURL)
				}
				continue
			}
			if t.Version == "" {
				t.Version = h.Version
			}
			if !slices.Contains(t.Upstreams, h.ServiceURL) {
				t.Upstreams = append(t.Upstreams, h.ServiceURL)
			}
		}
		if len(t.Upstreams) == 0 {
			// They answer that the database cannot be reached, which is what clients should
			// hear; an edge alone could only say that nobody is there.
			t.Upstreams = append(t.Upstreams, down...)
		}
		if c.Upstream != "" {
			t.Upstreams = []string{c.Upstream}
		}
		next.Cells = append(next.Cells, t)
	}
	if old.Serial > 0 && reflect.DeepEqual(old, next) {
		return
	}
	next.Serial++
	f.mu.Lock()
	f.topology = next
	f.mu.Unlock()
	f.changed.wake()
}

func (f *fleet) snapshot() api.Topology {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.topology
}

// cell returns the cell as last read.
func (f *fleet) cell(id cells.CellID) (api.Cell, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, c := range f.cells {
		if c.ID == id {
			return c, true
		}
	}
	return api.Cell{}, false
}

func (f *fleet) defaultCell() cells.CellID {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.topology.DefaultCell
}

func (f *fleet) list() []api.Cell {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return slices.Clone(f.cells)
}
