// SPDX-License-Identifier: Apache-2.0

package channel

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Config names the files of one process's end of the channel.
type Config struct {
	// CAFile holds the fleet's issuing CA as PEM; several while one replaces
	// another. A certificate counts only when one of these signed it directly.
	CAFile string
	// CertFile and KeyFile are this process's certificate and key as PEM.
	CertFile, KeyFile string
	// RevokedFile lists the serials that no longer count, one hexadecimal number
	// a line, # starts a comment. "" is no list. A file that was named must exist.
	RevokedFile string
	// Self, if set, is who this process must be by its certificate. Zero accepts
	// whoever the certificate names when the channel is opened.
	Self Identity
	// Known says whether a peer of our fleet is configured; nil accepts every
	// well-formed role and name that the fleet's CA has signed. It is asked for
	// every connection and every request, so it must be fast.
	Known func(Identity) bool
	// ReloadEvery is how often the files are looked at, at most: 0 is one second,
	// negative is every time they are needed.
	ReloadEvery time.Duration
	// Now is the clock for validity; nil is time.Now.
	Now func() time.Time
	// Log gets reload failures and refusals; nil is slog.Default.
	Log *slog.Logger
}

func (c *Config) check() error {
	for _, f := range []struct{ name, value string }{
		{"CAFile", c.CAFile}, {"CertFile", c.CertFile}, {"KeyFile", c.KeyFile},
	} {
		if f.value == "" {
			return fmt.Errorf("%w: channel: %s is not set", cells.ErrInvalid, f.name)
		}
	}
	if c.Self != (Identity{}) {
		if err := c.Self.Validate(); err != nil {
			return fmt.Errorf("channel: Self: %w", err)
		}
	}
	if c.ReloadEvery == 0 {
		c.ReloadEvery = time.Second
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return nil
}

// files is the content of the four files.
type files struct{ ca, cert, key, revoked []byte }

// maxFile bounds each file; a CA bundle or a list of serials is far smaller.
const maxFile = 16 << 20

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("%w: %s is larger than %d bytes", cells.ErrInvalid, path, maxFile)
	}
	return b, nil
}

func (c *Config) read() (f files, err error) {
	if f.ca, err = readBounded(c.CAFile); err != nil {
		return f, fmt.Errorf("channel: CA: %w", err)
	}
	if f.cert, err = readBounded(c.CertFile); err != nil {
		return f, fmt.Errorf("channel: certificate: %w", err)
	}
	if f.key, err = readBounded(c.KeyFile); err != nil {
		return f, fmt.Errorf("channel: key: %w", err)
	}
	if c.RevokedFile != "" {
		if f.revoked, err = readBounded(c.RevokedFile); err != nil {
			return f, fmt.Errorf("channel: revocation list: %w", err)
		}
	}
	return f, nil
}

func (f files) sum() [32]byte {
	h := sha256.New()
	for _, b := range [][]byte{f.ca, f.cert, f.key, f.revoked} {
		fmt.Fprintf(h, "%d:", len(b))
		h.Write(b)
	}
	return [32]byte(h.Sum(nil))
}

// state is one consistent reading of the files. It is never changed.
type state struct {
	gen     uint64
	sum     [32]byte
	cert    *tls.Certificate
	leaf    *x509.Certificate
	self    Identity
	anchors []*x509.Certificate
	pool    *x509.CertPool
	revoked map[string]struct{} // decimal serials
}

// parse makes a state of the files. first says that the process starts: then a
// certificate outside its validity is an error, later it is not (the old one
// would be no better).
func (c *Config) parse(f files, first bool) (*state, error) {
	st := &state{sum: f.sum(), pool: x509.NewCertPool()}
	var err error
	if st.anchors, err = ParseCertificates(f.ca); err != nil {
		return nil, fmt.Errorf("channel: %s: %w", c.CAFile, err)
	}
	for _, a := range st.anchors {
		if !a.BasicConstraintsValid || !a.IsCA || a.KeyUsage&x509.KeyUsageCertSign == 0 {
			return nil, fmt.Errorf("%w: channel: %s: %s is no CA certificate", cells.ErrInvalid, c.CAFile, a.Subject)
		}
		st.pool.AddCert(a)
	}
	pair, err := tls.X509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, fmt.Errorf("%w: channel: %s and %s: %v", cells.ErrInvalid, c.CertFile, c.KeyFile, err)
	}
	// Only the leaf is sent: peers use nothing else.
	pair.Certificate = pair.Certificate[:1]
	st.cert, st.leaf = &pair, pair.Leaf
	if st.self, err = IdentityOf(st.leaf); err != nil {
		return nil, fmt.Errorf("channel: %s: %w", c.CertFile, err)
	}
	if c.Self != (Identity{}) && st.self != c.Self {
		return nil, fmt.Errorf("%w: channel: %s is the certificate of %s, want %s", cells.ErrInvalid, c.CertFile, st.self, c.Self)
	}
	if first {
		err = st.chain(st.leaf, x509.ExtKeyUsageAny, c.Now())
	} else if !slices.ContainsFunc(st.anchors, func(a *x509.Certificate) bool { return st.leaf.CheckSignatureFrom(a) == nil }) {
		err = errNotDirect
	}
	if err != nil {
		return nil, fmt.Errorf("%w: channel: own certificate %s: %w", cells.ErrInvalid, c.CertFile, err)
	}
	serials, err := ParseRevoked(f.revoked)
	if err != nil {
		return nil, fmt.Errorf("channel: %s: %w", c.RevokedFile, err)
	}
	st.revoked = make(map[string]struct{}, len(serials))
	for _, n := range serials {
		st.revoked[n.String()] = struct{}{}
	}
	return st, nil
}

// ParseCertificates reads a PEM bundle that holds certificates and nothing
// else, at least one. The error wraps [cells.ErrInvalid].
func ParseCertificates(b []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for {
		var blk *pem.Block
		if blk, b = pem.Decode(b); blk == nil {
			break
		}
		if blk.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("%w: PEM block %q among certificates", cells.ErrInvalid, blk.Type)
		}
		cert, err := x509.ParseCertificate(blk.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: certificate: %v", cells.ErrInvalid, err)
		}
		out = append(out, cert)
	}
	if len(bytes.TrimSpace(b)) != 0 {
		return nil, fmt.Errorf("%w: text after the last certificate", cells.ErrInvalid)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: no certificate in PEM", cells.ErrInvalid)
	}
	return out, nil
}

// ParseRevoked reads a list of serials: one in a line, # starts a comment. The
// error wraps [cells.ErrInvalid] and names the line.
func ParseRevoked(b []byte) ([]*big.Int, error) {
	var out []*big.Int
	for i, line := range strings.Split(string(b), "\n") {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		n, err := ParseSerial(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		out = append(out, n)
	}
	return out, nil
}

// ParseSerial reads a serial as [FormatSerial] writes it; colons between bytes
// and capital letters are accepted. The error wraps [cells.ErrInvalid].
func ParseSerial(s string) (*big.Int, error) {
	h := strings.ReplaceAll(s, ":", "")
	if h == "" || len(h) > 40 || strings.Trim(h, "0123456789abcdefABCDEF") != "" {
		return nil, fmt.Errorf("%w: serial %q is not 1 to 40 hexadecimal digits", cells.ErrInvalid, s)
	}
	n, ok := new(big.Int).SetString(h, 16)
	if !ok || n.Sign() == 0 {
		return nil, fmt.Errorf("%w: serial %q", cells.ErrInvalid, s)
	}
	return n, nil
}

// FormatSerial writes a serial in hexadecimal, lower case.
func FormatSerial(n *big.Int) string { return n.Text(16) }

var errNotDirect = errors.New("not issued directly by a CA of the fleet")

// chain verifies that one of the anchors issued the certificate, for the usage
// and the time.
func (st *state) chain(leaf *x509.Certificate, usage x509.ExtKeyUsage, at time.Time) error {
	if leaf.IsCA {
		return errors.New("it is a CA certificate")
	}
	chains, err := leaf.Verify(x509.VerifyOptions{
		Roots: st.pool, Intermediates: x509.NewCertPool(), CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{usage},
	})
	if err != nil {
		return err
	}
	for _, ch := range chains {
		if len(ch) == 2 {
			return nil
		}
	}
	return errNotDirect
}
