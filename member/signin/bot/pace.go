// SPDX-License-Identifier: Apache-2.0

package bot

import (
	"net"
	"net/netip"
	"sync"

	"golang.org/x/time/rate"
)

// burst is how many challenges are given at once.
const burst = 20

// maxPaces bounds how many paces are kept of one kind.
const maxPaces = 4096

// pace bounds the challenges of each name for each client address. Names that are no
// bot's are counted apart, alike: nobody learns from the pace which names there are, and
// whatever names are tried, a bot's own pace stays. Safe for concurrent use.
type pace struct {
	per rate.Limit

	mu            sync.Mutex // guards what follows
	known, others map[paceKey]*rate.Limiter
}

type paceKey struct{ name, from string }

func newPace(per float64) *pace {
	return &pace{per: rate.Limit(per), known: map[paceKey]*rate.Limiter{}, others: map[paceKey]*rate.Limiter{}}
}

// allow reports whether a challenge may be given now.
func (p *pace) allow(known bool, name, remote string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.others
	if known {
		of = p.known
	}
	if len(name) > 64 {
		name = name[:64] // nobody's
	}
	key := paceKey{name, clientOf(remote)}
	l := of[key]
	if l == nil {
		for k := range of {
			if len(of) < maxPaces {
				break
			}
			delete(of, k) // any: it begins anew
		}
		l = rate.NewLimiter(p.per, burst)
		of[key] = l
	}
	return l.Allow()
}

// clientOf is whom an address counts as: of IPv6 a network of 64 bits is one client's.
func clientOf(remote string) string {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		host = remote
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return ""
	}
	if ip = ip.Unmap().WithZone(""); ip.Is6() {
		if net, err := ip.Prefix(64); err == nil {
			return net.String()
		}
	}
	return ip.String()
}
