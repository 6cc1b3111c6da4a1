// SPDX-License-Identifier: Apache-2.0

package bot

import (
	"net"
	"net/netip"

	"golang.org/x/time/rate"

	"github.com/cloister-dev/cloister/internal/pace"
)

// burst is how many challenges are given at once.
const burst = 20

// maxPaces bounds how many paces are kept of one kind.
const maxPaces = 4096

// paces bound the challenges of each name for each client address. Names that are no
// bot's are counted apart, alike: nobody learns from the pace which names there are, and
// whatever names are tried, a bot's own pace stays. Safe for concurrent use.
type paces struct{ known, others *pace.Limit }

func newPaces(per float64) *paces {
	return &paces{pace.NewBurst(rate.Limit(per), burst, maxPaces), pace.NewBurst(rate.Limit(per), burst, maxPaces)}
}

// allow reports whether a challenge may be given now.
func (p *paces) allow(known bool, name, remote string) bool {
	of := p.others
	if known {
		of = p.known
	}
	if len(name) > 64 {
		name = name[:64] // nobody's
	}
	return of.Take(clientOf(remote)+" "+name) == 0 // an address has no space in it
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
