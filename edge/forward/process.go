// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"strings"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
)

// Process returns the address of a process that is reached by http, as host:port, and
// the count of its open requests, which [Pools.Pick] reads. False for any other.
func (p *Pools) Process(cell cells.CellID, base string) (addr string, open *atomic.Int64, ok bool) {
	u, err := p.pool(cell).upstream(base)
	if err != nil || u.scheme != "http" {
		return "", nil, false
	}
	addr = u.host
	if !strings.Contains(addr[strings.LastIndexByte(addr, ']')+1:], ":") {
		addr += ":80"
	}
	return addr, &u.out, true
}

// Options returns the options, with their defaults.
func (p *Pools) Options() Options { return p.opts }
