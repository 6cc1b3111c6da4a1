// SPDX-License-Identifier: Apache-2.0

package channel

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Reason says why a peer was refused; one of a closed list, for metrics and tests.
type Reason string

// The reasons.
const (
	ReasonNoCertificate Reason = "no_certificate"
	ReasonVersion       Reason = "tls_version"
	ReasonChain         Reason = "chain"     // not issued directly by the fleet's CA
	ReasonExpired       Reason = "expired"   // or its CA has
	ReasonNotYet        Reason = "not_yet"   // not valid yet
	ReasonUsage         Reason = "key_usage" // not for this end of a connection, or a CA
	ReasonNames         Reason = "names"     // not exactly one well-formed URI
	ReasonFleet         Reason = "fleet"
	ReasonRevoked       Reason = "revoked"
	ReasonUnknown       Reason = "unknown"  // Config.Known says no
	ReasonUnwanted      Reason = "unwanted" // a good identity, but another one was called
	ReasonRole          Reason = "role"     // [Channel.Require]: not for this role
)

var allReasons = []Reason{ReasonNoCertificate, ReasonVersion, ReasonChain, ReasonExpired, ReasonNotYet, ReasonUsage,
	ReasonNames, ReasonFleet, ReasonRevoked, ReasonUnknown, ReasonUnwanted, ReasonRole}

// RefusedError says that a peer was refused, and why. A handshake that our end
// refuses fails with it.
type RefusedError struct {
	Reason Reason
	// Peer is who the certificate names; zero when that could not be read.
	Peer Identity
	// Serial is the certificate's, or "".
	Serial string
	Detail string
	Err    error
}

// Error implements error.
func (e *RefusedError) Error() string {
	s := "channel: peer"
	if e.Peer != (Identity{}) {
		s += " " + e.Peer.String()
	}
	if e.Serial != "" {
		s += " (serial " + e.Serial + ")"
	}
	s += " refused: " + string(e.Reason)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *RefusedError) Unwrap() error { return e.Err }

// judged is a remembered verdict on one certificate, good for one state.
type judged struct {
	gen       uint64
	id        Identity
	notBefore time.Time
	notAfter  time.Time
}

type judgedKey struct {
	sum   [32]byte
	usage x509.ExtKeyUsage
}

// maxJudged bounds the remembered verdicts.
const maxJudged = 1024

// verifyConn is VerifyConnection of both ends.
func (c *Channel) verifyConn(cs tls.ConnectionState, usage x509.ExtKeyUsage, want []Identity) error {
	if cs.Version != tls.VersionTLS13 {
		return c.refuse(&RefusedError{Reason: ReasonVersion, Detail: tls.VersionName(cs.Version)})
	}
	if len(cs.PeerCertificates) == 0 {
		return c.refuse(&RefusedError{Reason: ReasonNoCertificate})
	}
	id, err := c.verifyLeaf(cs.PeerCertificates[0], usage)
	if err != nil {
		return err
	}
	return c.wanted(id, cs.PeerCertificates[0], want)
}

func (c *Channel) wanted(id Identity, leaf *x509.Certificate, want []Identity) error {
	if want == nil || slices.ContainsFunc(want, func(w Identity) bool {
		return w.Role == id.Role && (w.Name == "" || w.Name == id.Name) && (w.Fleet == "" || w.Fleet == id.Fleet)
	}) {
		return nil
	}
	return c.refuse(&RefusedError{
		Reason: ReasonUnwanted, Peer: id, Serial: FormatSerial(leaf.SerialNumber),
		Detail: fmt.Sprintf("the caller wants %v", want),
	})
}

// verifyLeaf judges a certificate by the current files and the clock. Only the
// signature check is remembered.
func (c *Channel) verifyLeaf(leaf *x509.Certificate, usage x509.ExtKeyUsage) (Identity, error) {
	st := c.current()
	now := c.cfg.Now()
	refusal := &RefusedError{Serial: FormatSerial(leaf.SerialNumber)}
	fail := func(r Reason, detail string, err error) (Identity, error) {
		refusal.Reason, refusal.Detail, refusal.Err = r, detail, err
		return Identity{}, c.refuse(refusal)
	}
	id, err := IdentityOf(leaf)
	if err == nil {
		refusal.Peer = id
	}
	key := judgedKey{sha256.Sum256(leaf.Raw), usage}
	j, ok := c.judgedBefore(key, st.gen)
	if !ok || now.Before(j.notBefore) || now.After(j.notAfter) {
		if r, detail, err := st.judge(leaf, usage, now); err != nil {
			return fail(r, detail, err)
		}
	}
	if err != nil {
		return fail(ReasonNames, "", err)
	}
	if id.Fleet != st.self.Fleet {
		return fail(ReasonFleet, "ours is "+st.self.Fleet, nil)
	}
	if _, gone := st.revoked[leaf.SerialNumber.String()]; gone {
		return fail(ReasonRevoked, "", nil)
	}
	if c.cfg.Known != nil && !c.cfg.Known(id) {
		return fail(ReasonUnknown, "not configured here", nil)
	}
	if !ok {
		c.remember(key, judged{st.gen, id, leaf.NotBefore, st.notAfter(leaf)})
	}
	return id, nil
}

// judge checks chain, time and usages.
func (st *state) judge(leaf *x509.Certificate, usage x509.ExtKeyUsage, now time.Time) (Reason, string, error) {
	if leaf.IsCA {
		return ReasonUsage, "", errors.New("a CA certificate is no identity")
	}
	if now.Before(leaf.NotBefore) {
		return ReasonNotYet, "", fmt.Errorf("valid from %s", leaf.NotBefore.UTC().Format(time.RFC3339))
	}
	if now.After(leaf.NotAfter) {
		return ReasonExpired, "", fmt.Errorf("it was valid until %s; renew it with: cell pki renew", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	// A certificate without usages would be good for all of them; ours say.
	if !slices.Contains(leaf.ExtKeyUsage, usage) || leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		return ReasonUsage, "", fmt.Errorf("it is not for a %s", usageName(usage))
	}
	if err := st.chain(leaf, usage, now); err != nil {
		var inv x509.CertificateInvalidError
		if errors.As(err, &inv) && inv.Reason == x509.Expired {
			return ReasonExpired, "its CA", err
		}
		return ReasonChain, "", err
	}
	return "", "", nil
}

// notAfter is until when a verdict on the leaf can be good: the leaf's end, or
// the first end of a CA if that is earlier (then it is judged anew).
func (st *state) notAfter(leaf *x509.Certificate) time.Time {
	t := leaf.NotAfter
	for _, a := range st.anchors {
		if a.NotAfter.Before(t) {
			t = a.NotAfter
		}
	}
	return t
}

func usageName(u x509.ExtKeyUsage) string {
	switch u {
	case x509.ExtKeyUsageClientAuth:
		return "client"
	case x509.ExtKeyUsageServerAuth:
		return "server"
	}
	return "peer"
}

func (c *Channel) judgedBefore(k judgedKey, gen uint64) (judged, bool) {
	c.judgedMu.Lock()
	defer c.judgedMu.Unlock()
	j, ok := c.judged[k]
	return j, ok && j.gen == gen
}

func (c *Channel) remember(k judgedKey, j judged) {
	c.judgedMu.Lock()
	defer c.judgedMu.Unlock()
	if c.judged == nil || len(c.judged) >= maxJudged {
		c.judged = make(map[judgedKey]judged)
	}
	c.judged[k] = j
}

func (c *Channel) refuse(e *RefusedError) error {
	if n := c.refusals[e.Reason]; n != nil {
		n.Add(1)
	}
	c.cfg.Log.Warn("channel: peer refused", "reason", string(e.Reason), "peer", e.Peer.String(), "serial", e.Serial, "detail", e.Detail, "err", e.Err)
	return e
}
