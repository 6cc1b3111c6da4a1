// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Member is one process of a cell.
type Member struct {
	Cell       cells.CellID   `json:"cell"`
	Instance   string         `json:"instance"`
	Version    string         `json:"version,omitempty"`
	PID        int            `json:"pid,omitempty"`
	ServiceURL string         `json:"service_url"`
	AgentURL   string         `json:"agent_url"`
	Ready      bool           `json:"ready"`
	Reason     string         `json:"reason,omitempty"`
	Revision   cells.Revision `json:"revision"`
	Engine     string         `json:"engine,omitempty"`
	InFlight   int64          `json:"in_flight"`
	// Live: its heartbeats have not lapsed.
	Live bool `json:"live"`
	// Replaced: another process has announced itself at the same address since this
	// one was last heard, as after a restart. It is forgotten when it lapses.
	Replaced bool `json:"replaced,omitempty"`
	// Since is when this directory first heard of it, Age how long ago it was last
	// heard, both by this directory's clock. For people.
	Since time.Time     `json:"since"`
	Age   time.Duration `json:"age"`
}

// MemberList answers GET PathMembers, by cell and instance.
type MemberList struct {
	Members []Member `json:"members"`
}

// Topology is what an edge must know of the fleet, apart from the routes.
type Topology struct {
	// Serial orders the topologies of one directory process (Directory); it says
	// nothing across processes.
	Serial    int64  `json:"serial"`
	Directory string `json:"directory"`
	// DefaultCell serves tenants without a route; "" when there is none.
	DefaultCell cells.CellID   `json:"default_cell,omitempty"`
	Cells       []TopologyCell `json:"cells"`
}

// TopologyCell is one cell as edges see it.
type TopologyCell struct {
	ID           cells.CellID `json:"id"`
	Host         string       `json:"host,omitempty"`
	Aliases      []string     `json:"aliases,omitempty"`
	Issuers      []string     `json:"issuers,omitempty"`
	Jurisdiction string       `json:"jurisdiction,omitempty"`
	Geography    string       `json:"geography,omitempty"`
	Version      string       `json:"version,omitempty"`
	State        CellState    `json:"state"`
	Closed       bool         `json:"closed,omitempty"`
	// Upstreams are base URLs that reach the cell: its configured one, or those of
	// its processes that are live and ready, in order; when none is ready, of those
	// that live and only lack their store. Empty: none can be reached.
	Upstreams []string `json:"upstreams"`
}

// Cell returns the cell of that id, or nil.
func (t *Topology) Cell(id cells.CellID) *TopologyCell {
	for i := range t.Cells {
		if t.Cells[i].ID == id {
			return &t.Cells[i]
		}
	}
	return nil
}

// TopologyLine is one line of a topology watch: the whole topology when it has
// changed, or a sign of life.
type TopologyLine struct {
	Topology *Topology `json:"topology,omitempty"`
	Alive    bool      `json:"alive,omitempty"`
}
