// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"strings"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/headername"
)

// Passes reports whether a client's header is passed on: the opposite of what
// [CleanRequest] drops, without garbage. Names longer than 64 bytes are not.
func Passes(name []byte) bool {
	if len(name) == 0 || len(name) > 64 {
		return false
	}
	switch name[0] | 0x20 {
	case 'c', 'x', 'f':
	default:
		return true
	}
	var buf [64]byte
	f := headername.Fold(buf[:0], name)
	switch string(f) {
	case "forwarded", "x-forwarded", "x-original-forwarded-for", "x-real-ip", "x-client-ip", "x-cluster-client-ip",
		"x-host", "x-original-host", "x-http-host-override", "x-original-url", "x-rewrite-url":
		return false
	}
	return !hasPrefix(f, "cell-") && !hasPrefix(f, "x-forwarded-")
}

func hasPrefix(b []byte, prefix string) bool {
	return len(b) >= len(prefix) && string(b[:len(prefix)]) == prefix
}

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
