// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"crypto/tls"
	"net/http"
	"net/netip"
	"testing"

	"github.com/cloister-dev/cloister/edge/forward"
)

func TestSee(t *testing.T) {
	trusted := forward.Proxies{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	for name, c := range map[string]struct {
		peer  string
		tls   bool
		xff   []string
		proto []string
		none  bool // nobody is trusted
		want  forward.Client
	}{
		"nobody is trusted":          {peer: "10.0.0.1:1", xff: []string{"6.6.6.6"}, proto: []string{"https"}, none: true, want: forward.Client{Addr: "10.0.0.1", Proto: "http"}},
		"a stranger's claim":         {peer: "9.9.9.9:1", xff: []string{"6.6.6.6"}, proto: []string{"https"}, want: forward.Client{Addr: "9.9.9.9", Proto: "http"}},
		"a proxy's word":             {peer: "10.0.0.1:1", xff: []string{"9.9.9.9"}, proto: []string{"https"}, want: forward.Client{Addr: "9.9.9.9", Proto: "https"}},
		"the client's forgery":       {peer: "10.0.0.1:1", xff: []string{"6.6.6.6, 9.9.9.9"}, proto: []string{"https"}, want: forward.Client{Addr: "9.9.9.9", Proto: "https"}},
		"forged as a proxy":          {peer: "10.0.0.1:1", xff: []string{"10.6.6.6, 9.9.9.9"}, want: forward.Client{Addr: "9.9.9.9", Proto: "http"}},
		"two lines":                  {peer: "10.0.0.1:1", xff: []string{"6.6.6.6", "9.9.9.9"}, want: forward.Client{Addr: "9.9.9.9", Proto: "http"}},
		"two proxies":                {peer: "10.0.0.1:1", xff: []string{"6.6.6.6, 9.9.9.9, 10.0.0.2"}, want: forward.Client{Addr: "9.9.9.9", Proto: "http"}},
		"proxies only":               {peer: "10.0.0.1:1", xff: []string{"10.0.0.3, 10.0.0.2"}, want: forward.Client{Addr: "10.0.0.3", Proto: "http"}},
		"noise":                      {peer: "10.0.0.1:1", xff: []string{"9.9.9.9, unknown"}, want: forward.Client{Addr: "10.0.0.1", Proto: "http"}},
		"noise behind a proxy":       {peer: "10.0.0.1:1", xff: []string{"9.9.9.9, x, 10.0.0.2"}, want: forward.Client{Addr: "10.0.0.2", Proto: "http"}},
		"nothing said":               {peer: "10.0.0.1:1", tls: true, want: forward.Client{Addr: "10.0.0.1", Proto: "https"}},
		"with a port":                {peer: "10.0.0.1:1", xff: []string{"9.9.9.9:5"}, want: forward.Client{Addr: "9.9.9.9", Proto: "http"}},
		"IPv6":                       {peer: "[fd00::1]:1", xff: []string{"[2001:db8::1]:5"}, want: forward.Client{Addr: "2001:db8::1", Proto: "http"}},
		"IPv6 without a port":        {peer: "[fd00::1]:1", xff: []string{"2001:db8::1"}, want: forward.Client{Addr: "2001:db8::1", Proto: "http"}},
		"a zone":                     {peer: "[fd00::1]:1", xff: []string{"fe80::1%eth0"}, want: forward.Client{Addr: "fd00::1", Proto: "http"}},
		"mapped":                     {peer: "[::ffff:10.0.0.1]:1", xff: []string{"::ffff:9.9.9.9"}, want: forward.Client{Addr: "9.9.9.9", Proto: "http"}},
		"two schemes":                {peer: "10.0.0.1:1", proto: []string{"https", "http"}, want: forward.Client{Addr: "10.0.0.1", Proto: "http"}},
		"a scheme of another kind":   {peer: "10.0.0.1:1", proto: []string{"https, http"}, want: forward.Client{Addr: "10.0.0.1", Proto: "http"}},
		"the proxy speaks of no TLS": {peer: "10.0.0.1:1", tls: true, proto: []string{"http"}, want: forward.Client{Addr: "10.0.0.1", Proto: "http"}},
		"no address":                 {peer: "@", xff: []string{"9.9.9.9"}, want: forward.Client{Proto: "http"}},
	} {
		r := &http.Request{RemoteAddr: c.peer, Header: http.Header{"X-Forwarded-For": c.xff, "X-Forwarded-Proto": c.proto, "X-Forwarded-Host": {"evil"}}}
		if c.tls {
			r.TLS = new(tls.ConnectionState)
		}
		p := trusted
		if c.none {
			p = nil
		}
		if got := p.See(r); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
