// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// notPublic are ranges that [netip.Addr] has no name for: carriers' and
// documentation addresses, and IPv6 forms that carry an IPv4 address.
var notPublic = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("64:ff9b:1::/48"), netip.MustParsePrefix("2001::/32"),
	netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("2002::/16"),
}

// public reports whether an address is one of the Internet's.
func public(ip netip.Addr) bool {
	ip = ip.Unmap()
	if !ip.IsGlobalUnicast() || ip.IsPrivate() {
		return false
	}
	for _, p := range notPublic {
		if p.Contains(ip) {
			return false
		}
	}
	return true
}

// transport returns one of the publisher's own. With publicOnly it looks at the
// address that it is about to connect to, and uses no proxy.
func transport(publicOnly bool) *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	if !publicOnly {
		return t
	}
	t.Proxy = nil
	d := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second, Control: func(_, address string, _ syscall.RawConn) error {
		ap, err := netip.ParseAddrPort(address)
		if err != nil || !public(ap.Addr()) {
			return fmt.Errorf("%w: the webhook's address %s is not a public one", cells.ErrInvalid, address)
		}
		return nil
	}}
	t.DialContext = d.DialContext
	return t
}
