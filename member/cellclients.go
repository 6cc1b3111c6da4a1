// SPDX-License-Identifier: Apache-2.0

package member

import (
	"net/http"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
)

// cellClients are HTTP clients, one for each cell, that reach the agents of that cell and
// nobody else. Who calls a cell again finds its connections. Safe for concurrent use.
type cellClients struct {
	channel *channel.Channel

	mu sync.Mutex // guards of
	of map[cells.CellID]*http.Client
}

func (c *cellClients) get(cell cells.CellID) *http.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.of[cell]
	if h == nil {
		h = c.channel.Client(channel.Identity{Role: channel.RoleCell, Name: string(cell)})
		if c.of == nil {
			c.of = make(map[cells.CellID]*http.Client)
		}
		c.of[cell] = h
	}
	return h
}

func (c *cellClients) closeIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.of {
		h.CloseIdleConnections()
	}
}
