// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/hold"
)

// Config configures a [Server]. Zero fields take their defaults.
type Config struct {
	// Name tells this edge from others in explanations and logs; default "edge".
	Name string

	// Addr is the public listener for HTTP/1.1 and HTTP/2 without TLS; default
	// 127.0.0.1:8080. "-" opens none.
	Addr string
	// TLSAddr is the public listener for HTTP/1.1 and HTTP/2 over TLS; "" opens none.
	// TLS is needed then, with a certificate; NextProtos is set here.
	TLSAddr string
	TLS     *tls.Config
	// AdminAddr is the listener of health, metrics and explanations; default
	// 127.0.0.1:8081. "-" opens none. It has no authentication.
	AdminAddr string
	// Listeners are further public listeners that are open already, without TLS. The
	// server closes them.
	Listeners []net.Listener

	// Extractors find the tenant, in their order. At least one.
	Extractors []extract.Spec
	// AdmissionKey is the fleet's master key, of at least 16 bytes: what is sent to
	// a cell carries a token of the cell's own key, derived from it. Empty sends no
	// tokens, for cells whose gates ask for none.
	AdmissionKey []byte

	// TrustedProxies are the addresses of proxies in front of this edge: what they say of
	// the client's address and of its scheme is passed on as this edge's own view. A
	// client that can connect from one of these addresses can claim to be any other.
	TrustedProxies []netip.Prefix

	// Witness notes what clients see of moves; nil notes nothing. The caller runs it.
	Witness *Witness
	// Vitals is told every second how the requests to each cell went; nil is not. The
	// server calls it while it runs.
	Vitals VitalsReporter

	// Hold bounds the requests that wait. See [hold.Limits] for its defaults.
	Hold hold.Limits
	// ConnectWait is how long a request waits for a process of its cell to take
	// connections; default 5 s. Once a cell has been gone for that long, requests to it
	// fail at once. It bounds in the same way how long a request is sent again to a
	// cell that cannot reach its database.
	ConnectWait time.Duration
	// MaxRefusals is how often one request is sent again after a gate refused it;
	// default 32. Time is bounded by Hold.Time as well.
	MaxRefusals int

	// ReplayBytes is how much of a body is recorded, so that it can be sent again
	// after a refusal; default 64 KiB. Longer bodies, and those of unknown length,
	// ask the cell first (Expect: 100-continue).
	ReplayBytes int
	// ReplayGRPCBytes is the same for gRPC, which cannot ask first; default 4 MiB,
	// the default bound of a message.
	ReplayGRPCBytes int
	// ReplayTotal bounds what all requests together may record, in bytes; default
	// 256 MiB. Past it, requests go on but cannot be sent again.
	ReplayTotal int64

	// MaxBody bounds a request's body, in bytes; 0 is no bound.
	MaxBody int64
	// MaxHeader bounds a request's headers, in bytes; default 64 KiB. More answers 431.
	MaxHeader int
	// ReadHeaderTimeout bounds the reading of a request's headers; default 10 s.
	ReadHeaderTimeout time.Duration
	// IdleTimeout closes connections without a request; default 2 min.
	IdleTimeout time.Duration

	// FastPath forwards the HTTP/1.1 requests that are common and unambiguous past
	// net/http (package fastpath), on the listeners without TLS. It stays off with
	// TrustedProxies, and in front of whole deployments.
	FastPath bool

	// HTTP2ToCells sends requests that came by HTTP/2 to the cells by HTTP/2. Without
	// it only gRPC goes that way: every service speaks HTTP/1.1.
	HTTP2ToCells bool
	// Forward configures the connections to the cells.
	Forward forward.Options

	// StreamGrace is how long server-sent events and upgraded connections go on after
	// the server was told to end; default 1 s.
	StreamGrace time.Duration
	// DrainTimeout is how long other requests may take to end; default 15 s.
	DrainTimeout time.Duration

	// AccessLog writes a record of every n-th request, and of each that failed
	// here; 0 writes none. Queries and headers are never logged.
	AccessLog int
	// Log; nil means slog.Default.
	Log *slog.Logger
}

func (c Config) withDefaults() (Config, error) {
	str := func(p *string, v string) {
		if *p == "" {
			*p = v
		}
	}
	str(&c.Name, "edge")
	str(&c.Addr, "127.0.0.1:8080")
	str(&c.AdminAddr, "127.0.0.1:8081")
	dur := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	dur(&c.ConnectWait, 5*time.Second)
	dur(&c.ReadHeaderTimeout, 10*time.Second)
	dur(&c.IdleTimeout, 2*time.Minute)
	dur(&c.StreamGrace, time.Second)
	dur(&c.DrainTimeout, 15*time.Second)
	num := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	num(&c.MaxRefusals, 32)
	num(&c.ReplayBytes, 64<<10)
	num(&c.ReplayGRPCBytes, 4<<20+16)
	num(&c.MaxHeader, 64<<10)
	if c.ReplayTotal == 0 {
		c.ReplayTotal = 256 << 20
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	for name, v := range map[string]int64{
		"ConnectWait": int64(c.ConnectWait), "MaxRefusals": int64(c.MaxRefusals), "ReplayBytes": int64(c.ReplayBytes),
		"ReplayGRPCBytes": int64(c.ReplayGRPCBytes), "ReplayTotal": c.ReplayTotal, "MaxBody": c.MaxBody, "MaxHeader": int64(c.MaxHeader),
		"ReadHeaderTimeout": int64(c.ReadHeaderTimeout), "IdleTimeout": int64(c.IdleTimeout), "StreamGrace": int64(c.StreamGrace),
		"DrainTimeout": int64(c.DrainTimeout), "AccessLog": int64(c.AccessLog),
	} {
		if v < 0 {
			return c, fmt.Errorf("%w: edge: %s is negative", cells.ErrInvalid, name)
		}
	}
	switch {
	case len(c.AdmissionKey) > 0 && cells.DeriveCellKey(c.AdmissionKey, "x") == nil:
		return c, fmt.Errorf("%w: edge: the admission key has %d bytes, want at least 16", cells.ErrInvalid, len(c.AdmissionKey))
	case c.TLSAddr != "" && c.TLS == nil:
		return c, fmt.Errorf("%w: edge: TLSAddr needs TLS", cells.ErrInvalid)
	}
	return c, nil
}
