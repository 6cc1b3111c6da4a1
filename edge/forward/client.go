// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Client is who sent a request, as far as the edge can tell.
type Client struct {
	// Addr is an IP address, "" if the connection has none.
	Addr string
	// Proto is http or https.
	Proto string
}

// Proxies are the addresses of proxies in front of the edge whose word is taken.
type Proxies []netip.Prefix

func (p Proxies) contain(a netip.Addr) bool {
	for _, x := range p {
		if x.Contains(a) {
			return true
		}
	}
	return false
}

// See says who sent the request. What the headers claim counts only as far as it was
// said by a trusted proxy: X-Forwarded-For is read from its end, up to the first
// address that is not one of theirs, and X-Forwarded-Proto has to be the one word http
// or https. X-Forwarded-Host is never read.
func (p Proxies) See(r *http.Request) Client {
	c := Client{Proto: "http"}
	if r.TLS != nil {
		c.Proto = "https"
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return c
	}
	c.Addr = host
	peer, err := netip.ParseAddr(host)
	if err != nil || len(p) == 0 || !p.contain(peer.Unmap()) {
		return c
	}
	hops := strings.Split(strings.Join(r.Header["X-Forwarded-For"], ","), ",")
	for i := len(hops) - 1; i >= 0; i-- {
		a, ok := hopAddr(hops[i])
		if !ok {
			break
		}
		if c.Addr = a.String(); !p.contain(a) {
			break
		}
	}
	if v := r.Header["X-Forwarded-Proto"]; len(v) == 1 && (v[0] == "http" || v[0] == "https") {
		c.Proto = v[0]
	}
	return c
}

// hopAddr reads one entry of X-Forwarded-For: an address, with a port or without.
func hopAddr(s string) (netip.Addr, bool) {
	s = strings.TrimSpace(s)
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil && a.Zone() == "" {
		return a.Unmap(), true
	}
	ap, err := netip.ParseAddrPort(s)
	return ap.Addr().Unmap(), err == nil && ap.Addr().Zone() == ""
}
