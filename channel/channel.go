// SPDX-License-Identifier: Apache-2.0

package channel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Channel is one process's end of the fleet's channel: its certificate, and how
// it judges others. Safe for concurrent use. It has no goroutine of its own.
type Channel struct {
	cfg      Config
	st       atomic.Pointer[state]
	refusals map[Reason]*atomic.Int64 // never changed after Open
	reloads  atomic.Int64             // good reloads
	failures atomic.Int64             // failed reloads

	mu      sync.Mutex // guards checked, badSum and the writing of st
	checked time.Time
	lastErr error

	judgedMu sync.Mutex // guards judged
	judged   map[judgedKey]judged
}

// Open reads the files and returns this process's end. It fails, with an error
// that wraps [cells.ErrInvalid] or the file system's, when a file is missing or
// malformed, the key does not fit, or our own certificate would not be accepted
// by our own CA now.
func Open(cfg Config) (*Channel, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	f, err := cfg.read()
	if err != nil {
		return nil, err
	}
	st, err := cfg.parse(f, true)
	if err != nil {
		return nil, err
	}
	st.gen = 1
	c := &Channel{cfg: cfg, checked: time.Now(), refusals: map[Reason]*atomic.Int64{}}
	for _, r := range allReasons {
		c.refusals[r] = new(atomic.Int64)
	}
	// From here on the identity is fixed: a rotation may not change it.
	c.cfg.Self = st.self
	c.st.Store(st)
	return c, nil
}

// current returns the state by the files as they are now, or the last good one.
func (c *Channel) current() *state {
	if !c.mu.TryLock() {
		return c.st.Load() // somebody else is looking
	}
	defer c.mu.Unlock()
	if c.cfg.ReloadEvery > 0 && time.Since(c.checked) < c.cfg.ReloadEvery {
		return c.st.Load()
	}
	c.reloadLocked()
	return c.st.Load()
}

// Reload looks at the files now. It returns why they were not taken over; the
// last good state stays in force then.
func (c *Channel) Reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reloadLocked()
	return c.lastErr
}

func (c *Channel) reloadLocked() {
	c.checked = time.Now()
	old := c.st.Load()
	f, err := c.cfg.read()
	var st *state
	if err == nil {
		if f.sum() == old.sum {
			c.lastErr = nil
			return
		}
		st, err = c.cfg.parse(f, false)
	}
	if err != nil {
		c.failures.Add(1)
		if c.lastErr == nil || c.lastErr.Error() != err.Error() {
			c.cfg.Log.Error("channel: the changed files are not used", "err", err)
		}
		c.lastErr = err
		return
	}
	st.gen = old.gen + 1
	c.st.Store(st)
	c.lastErr = nil
	c.reloads.Add(1)
	c.cfg.Log.Info("channel: files reloaded", "self", st.self.String(), "serial", FormatSerial(st.leaf.SerialNumber),
		"not_after", st.leaf.NotAfter, "revoked", len(st.revoked))
}

// Self is who this process is.
func (c *Channel) Self() Identity { return c.st.Load().self }

// NotAfter is when this process's certificate ends.
func (c *Channel) NotAfter() time.Time { return c.current().leaf.NotAfter }

var protos = []string{"h2", "http/1.1"}

// Server returns the TLS configuration of a listener that accepts peers of the
// fleet only. It must not be changed, except by net/http.
func (c *Channel) Server() *tls.Config {
	conf := &tls.Config{
		MinVersion: tls.VersionTLS13, MaxVersion: tls.VersionTLS13,
		SessionTicketsDisabled: true,
		ClientAuth:             tls.RequireAndVerifyClientCert,
		NextProtos:             protos,
		Time:                   c.cfg.Now,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return c.current().cert, nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			return c.verifyConn(cs, x509.ExtKeyUsageClientAuth, nil)
		},
	}
	// ClientCAs may change with the file, so each connection gets its own copy.
	base := conf.Clone()
	conf.ClientCAs = c.st.Load().pool
	conf.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		per := base.Clone()
		per.ClientCAs = c.current().pool
		return per, nil
	}
	return conf
}

// ClientTLS returns the TLS configuration of a client that reaches one of the
// wanted identities and nobody else. In want an empty Name means every name of
// the role, an empty Fleet ours. Without want every server is refused.
func (c *Channel) ClientTLS(want ...Identity) *tls.Config {
	want = append([]Identity{}, want...)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, MaxVersion: tls.VersionTLS13,
		SessionTicketsDisabled: true,
		Time:                   c.cfg.Now,
		// Host names are not compared; verifyConn does all the rest and more.
		InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return c.current().cert, nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			return c.verifyConn(cs, x509.ExtKeyUsageServerAuth, want)
		},
	}
}

// Client returns an HTTP client that reaches one of the wanted identities (see
// [Channel.ClientTLS]) and nobody else: https only, no proxy, no redirects
// followed. It has no timeout; callers bound their contexts. When the files
// change it makes new connections. Close what it keeps with CloseIdleConnections.
func (c *Channel) Client(want ...Identity) *http.Client {
	t := &transport{c: c, want: append([]Identity{}, want...)}
	t.inner, t.gen = t.make(), c.st.Load().gen
	return &http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// transport refuses anything but https, and starts anew when the files change.
type transport struct {
	c    *Channel
	want []Identity

	mu    sync.Mutex // guards inner and gen
	inner *http.Transport
	gen   uint64
}

func (t *transport) make() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:     t.c.ClientTLS(t.want...),
		TLSHandshakeTimeout: 5 * time.Second,
		ForceAttemptHTTP2:   true,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 8,
		IdleConnTimeout:     30 * time.Second,
		// A peer that is gone without a word is noticed within ten seconds, also
		// by a stream that only listens.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 5 * time.Second, PingTimeout: 5 * time.Second},
	}
}

func (t *transport) current() *http.Transport {
	gen := t.c.current().gen
	t.mu.Lock()
	defer t.mu.Unlock()
	if gen != t.gen {
		// Requests under way end on the old connections; new ones are judged anew.
		t.inner.CloseIdleConnections()
		t.inner, t.gen = t.make(), gen
	}
	return t.inner
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, fmt.Errorf("%w: channel: %q is no https URL", cells.ErrInvalid, r.URL.Redacted())
	}
	resp, err := t.current().RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if err := t.recheck(resp); err != nil {
		resp.Body.Close()
		t.CloseIdleConnections()
		return nil, err
	}
	return resp, nil
}

// recheck looks at the answer's connection again: it may be older than what we
// know about its peer.
func (t *transport) recheck(resp *http.Response) error {
	if resp.TLS == nil {
		return t.c.refuse(&RefusedError{Reason: ReasonNoCertificate, Detail: "the answer did not come over TLS"})
	}
	return t.c.verifyConn(*resp.TLS, x509.ExtKeyUsageServerAuth, t.want)
}

// CloseIdleConnections is what http.Client.CloseIdleConnections calls.
func (t *transport) CloseIdleConnections() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inner.CloseIdleConnections()
}

type peerKey struct{}

// PeerFrom returns who sent the request. Inside a handler of [Channel.Require]
// that was checked for this very request. Elsewhere it is what the handshake
// verified, which is to be believed only on a listener of [Channel.Server]; ok is
// false when the connection verified no client.
func PeerFrom(r *http.Request) (id Identity, ok bool) {
	if id, ok := PeerFromContext(r.Context()); ok {
		return id, true
	}
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 || len(r.TLS.PeerCertificates) == 0 {
		return Identity{}, false
	}
	id, err := IdentityOf(r.TLS.PeerCertificates[0])
	return id, err == nil
}

// PeerFromContext is PeerFrom for code that only has the context.
func PeerFromContext(ctx context.Context) (Identity, bool) {
	id, ok := ctx.Value(peerKey{}).(Identity)
	return id, ok
}

// Require lets requests through whose peer has one of the roles; no role means
// any. It judges the peer's certificate again for each request, so a revocation
// also ends connections that are open already. Others get 403 in plain text and
// their connection is closed.
func (c *Channel) Require(h http.Handler, roles ...Role) http.Handler {
	roles = slices.Clone(roles)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, err := c.judgeRequest(r)
		if err == nil && len(roles) > 0 && !slices.Contains(roles, id.Role) {
			err = c.refuse(&RefusedError{Reason: ReasonRole, Peer: id, Detail: fmt.Sprintf("%s is for %v", r.URL.Path, roles)})
		}
		if err != nil {
			w.Header().Set("Connection", "close")
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey{}, id)))
	})
}

func (c *Channel) judgeRequest(r *http.Request) (Identity, error) {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 || len(r.TLS.PeerCertificates) == 0 {
		return Identity{}, c.refuse(&RefusedError{Reason: ReasonNoCertificate})
	}
	return c.verifyLeaf(r.TLS.PeerCertificates[0], x509.ExtKeyUsageClientAuth)
}
