// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
)

// Names of the files in an authority's folder.
const (
	CAKeyFile   = "ca.key"
	CACertFile  = "ca.crt"
	IssuedFile  = "issued.jsonl"
	RevokedFile = "revoked.txt"
)

const (
	// DefaultLifetime of a certificate, and DefaultCALifetime of the CA's.
	DefaultLifetime   = 90 * 24 * time.Hour
	DefaultCALifetime = 10 * 365 * 24 * time.Hour
	// backdate is how far a validity starts in the past, for clocks that are late.
	backdate = 5 * time.Minute
)

// ErrExists: a file that would be overwritten exists. Returned by NewAuthority
// and Issue; it also matches fs.ErrExist.
var ErrExists = fmt.Errorf("pki: not overwritten: %w", fs.ErrExist)

// Options adjust an authority.
type Options struct {
	// Lifetime of the CA's certificate; 0 is DefaultCALifetime.
	Lifetime time.Duration
	// Now is the clock; nil is time.Now.
	Now func() time.Time
}

// Authority issues a fleet's certificates. Safe for concurrent use; several
// processes may use one folder.
type Authority struct {
	dir   string
	fleet string
	now   func() time.Time
	key   *ecdsa.PrivateKey
	cert  *x509.Certificate
}

// NewAuthority makes the folder (mode 0700), a new CA for the fleet and its
// files. [ErrExists] when the folder holds a CA already, [cells.ErrInvalid] when
// the fleet's name is malformed.
func NewAuthority(dir, fleet string, o Options) (*Authority, error) {
	if err := (channel.Identity{Fleet: fleet, Role: channel.RoleCell, Name: "x"}).Validate(); err != nil {
		return nil, err
	}
	if o.Lifetime == 0 {
		o.Lifetime = DefaultCALifetime
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Lifetime < 0 {
		return nil, fmt.Errorf("%w: lifetime %s", cells.ErrInvalid, o.Lifetime)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	for _, f := range []string{CAKeyFile, CACertFile} {
		if _, err := os.Lstat(filepath.Join(dir, f)); err == nil {
			return nil, fmt.Errorf("%w: %s", ErrExists, filepath.Join(dir, f))
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := o.Now()
	tmpl := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "Fleet " + fleet + " CA", Organization: []string{fleet}},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(o.Lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true, // it issues leaves only
		// Whatever it signs can only name this fleet.
		PermittedDNSDomainsCritical: true, // of all name constraints
		PermittedURIDomains:         []string{fleet},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, err
	}
	if err := writeKey(filepath.Join(dir, CAKeyFile), key); err != nil {
		return nil, err
	}
	if err := createFile(filepath.Join(dir, CACertFile), certPEM(der), 0o644); err != nil {
		return nil, err
	}
	if err := createFile(filepath.Join(dir, RevokedFile), []byte("# serials that no longer count\n"), 0o644); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return LoadAuthority(dir, o)
}

// LoadAuthority opens a folder that NewAuthority made. It refuses a key file that
// others may read, and a certificate that does not belong to the key.
func LoadAuthority(dir string, o Options) (*Authority, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	keyPath := filepath.Join(dir, CAKeyFile)
	fi, err := os.Stat(keyPath)
	if err != nil {
		return nil, fmt.Errorf("pki: no CA in %s (make one with: cell pki init): %w", dir, err)
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: pki: %s is open to others (mode %04o); chmod 600 it", cells.ErrInvalid, keyPath, fi.Mode().Perm())
	}
	key, err := readKey(keyPath)
	if err != nil {
		return nil, err
	}
	certPath := filepath.Join(dir, CACertFile)
	b, err := os.ReadFile(certPath)
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	certs, err := channel.ParseCertificates(b)
	if err != nil {
		return nil, fmt.Errorf("pki: %s: %w", certPath, err)
	}
	cert := certs[0]
	if !cert.IsCA || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("%w: pki: %s is not the CA certificate of %s", cells.ErrInvalid, certPath, keyPath)
	}
	if len(cert.PermittedURIDomains) != 1 {
		return nil, fmt.Errorf("%w: pki: %s names no fleet", cells.ErrInvalid, certPath)
	}
	return &Authority{dir: dir, fleet: cert.PermittedURIDomains[0], now: o.Now, key: key, cert: cert}, nil
}

// Fleet is the fleet that the authority issues for.
func (a *Authority) Fleet() string { return a.fleet }

// CAFile, and RevokedFile, are paths for channel.Config.
func (a *Authority) CAFile() string { return filepath.Join(a.dir, CACertFile) }

// RevokedFile is the path of the list of revoked serials.
func (a *Authority) RevokedFile() string { return filepath.Join(a.dir, RevokedFile) }

// IssueOptions say where and for how long.
type IssueOptions struct {
	// Dir is where <role>-<name>.key and .crt go; made (mode 0700) if missing.
	Dir string
	// Lifetime; 0 is DefaultLifetime. It never goes past the CA's own end.
	Lifetime time.Duration
}

// Issued is a certificate that was made.
type Issued struct {
	Identity  channel.Identity `json:"identity"`
	Serial    string           `json:"serial"`
	NotBefore time.Time        `json:"not_before"`
	NotAfter  time.Time        `json:"not_after"`
	CertFile  string           `json:"cert_file"`
	KeyFile   string           `json:"key_file"`
	// Renews is the serial of the certificate that this one replaces, or "".
	Renews string `json:"renews,omitempty"`
	// At is when it was issued.
	At time.Time `json:"at"`
}

// Issue makes a key and its certificate for one member of the fleet (an empty
// Fleet means the authority's). Cells and the directory get certificates for both
// ends of a connection, edges and operators for the client's end only.
// [ErrExists] when the key's or the certificate's file exists.
func (a *Authority) Issue(id channel.Identity, o IssueOptions) (Issued, error) {
	if id.Fleet == "" {
		id.Fleet = a.fleet
	}
	if err := id.Validate(); err != nil {
		return Issued{}, err
	}
	if id.Fleet != a.fleet {
		return Issued{}, fmt.Errorf("%w: this authority issues for fleet %s, not %s", cells.ErrInvalid, a.fleet, id.Fleet)
	}
	if o.Dir == "" {
		return Issued{}, fmt.Errorf("%w: no folder for the certificate", cells.ErrInvalid)
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return Issued{}, err
	}
	base := filepath.Join(o.Dir, string(id.Role)+"-"+id.Name)
	is := Issued{Identity: id, CertFile: base + ".crt", KeyFile: base + ".key"}
	if _, err := os.Lstat(is.CertFile); err == nil {
		return Issued{}, fmt.Errorf("%w: %s", ErrExists, is.CertFile)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Issued{}, err
	}
	if err := writeKey(is.KeyFile, key); err != nil {
		return Issued{}, err
	}
	return a.sign(is, key.Public(), o.Lifetime)
}

// Renew replaces the certificate in certFile by a new one for the same identity
// and key (keyFile), atomically: processes take it over without a restart. It
// refuses a certificate that another authority issued, or that was revoked. When
// certFile is missing, which a crash in Issue may leave, id says who it is for;
// otherwise id may be zero.
func (a *Authority) Renew(certFile, keyFile string, id channel.Identity, lifetime time.Duration) (Issued, error) {
	key, err := readKey(keyFile)
	if err != nil {
		return Issued{}, err
	}
	is := Issued{CertFile: certFile, KeyFile: keyFile}
	b, err := os.ReadFile(certFile)
	switch {
	case errors.Is(err, fs.ErrNotExist) && id != (channel.Identity{}):
		if id.Fleet == "" {
			id.Fleet = a.fleet
		}
		is.Identity = id
	case err != nil:
		return Issued{}, err
	default:
		old, err := a.ours(b)
		if err != nil {
			return Issued{}, fmt.Errorf("pki: %s: %w", certFile, err)
		}
		if is.Identity, err = channel.IdentityOf(old); err != nil {
			return Issued{}, fmt.Errorf("pki: %s: %w", certFile, err)
		}
		if id != (channel.Identity{}) && id != is.Identity {
			return Issued{}, fmt.Errorf("%w: %s is the certificate of %s, not of %s", cells.ErrInvalid, certFile, is.Identity, id)
		}
		if !key.PublicKey.Equal(old.PublicKey) {
			return Issued{}, fmt.Errorf("%w: %s is not the key of %s", cells.ErrInvalid, keyFile, certFile)
		}
		is.Renews = channel.FormatSerial(old.SerialNumber)
		if gone, err := a.revoked(is.Renews); err != nil {
			return Issued{}, err
		} else if gone {
			return Issued{}, fmt.Errorf("%w: certificate %s was revoked; issue a new one with a new key", cells.ErrInvalid, is.Renews)
		}
	}
	if err := is.Identity.Validate(); err != nil {
		return Issued{}, err
	}
	if is.Identity.Fleet != a.fleet {
		return Issued{}, fmt.Errorf("%w: this authority issues for fleet %s, not %s", cells.ErrInvalid, a.fleet, is.Identity.Fleet)
	}
	return a.sign(is, key.Public(), lifetime)
}

// ours parses a certificate and checks that this authority signed it.
func (a *Authority) ours(b []byte) (*x509.Certificate, error) {
	certs, err := channel.ParseCertificates(b)
	if err != nil {
		return nil, err
	}
	if err := certs[0].CheckSignatureFrom(a.cert); err != nil {
		return nil, fmt.Errorf("%w: not issued by this authority: %v", cells.ErrInvalid, err)
	}
	return certs[0], nil
}

func (a *Authority) sign(is Issued, pub any, lifetime time.Duration) (Issued, error) {
	if lifetime == 0 {
		lifetime = DefaultLifetime
	}
	if lifetime < 0 {
		return Issued{}, fmt.Errorf("%w: lifetime %s", cells.ErrInvalid, lifetime)
	}
	serial, err := newSerial()
	if err != nil {
		return Issued{}, err
	}
	now := a.now()
	is.At = now.UTC()
	is.NotBefore, is.NotAfter = now.Add(-backdate).UTC().Truncate(time.Second), now.Add(lifetime).UTC().Truncate(time.Second)
	if is.NotAfter.After(a.cert.NotAfter) {
		is.NotAfter = a.cert.NotAfter.UTC()
	}
	if !is.NotAfter.After(now) {
		return Issued{}, fmt.Errorf("%w: the CA's certificate ended on %s", cells.ErrInvalid, a.cert.NotAfter.Format(time.RFC3339))
	}
	is.Serial = channel.FormatSerial(serial)
	uri, err := url.Parse(is.Identity.String())
	if err != nil {
		return Issued{}, err
	}
	usages := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if is.Identity.Role == channel.RoleCell || is.Identity.Role == channel.RoleDirectory {
		usages = append(usages, x509.ExtKeyUsageServerAuth)
	}
	tmpl := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: string(is.Identity.Role) + " " + is.Identity.Name, Organization: []string{a.fleet}},
		NotBefore:             is.NotBefore,
		NotAfter:              is.NotAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           usages,
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{uri},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, pub, a.key)
	if err != nil {
		return Issued{}, err
	}
	line, err := json.Marshal(is)
	if err != nil {
		return Issued{}, err
	}
	unlock, err := a.lock()
	if err != nil {
		return Issued{}, err
	}
	defer unlock()
	if err := appendLine(filepath.Join(a.dir, IssuedFile), line, 0o600); err != nil {
		return Issued{}, fmt.Errorf("pki: record the certificate: %w", err)
	}
	if err := replaceFile(is.CertFile, certPEM(der), 0o644); err != nil {
		return Issued{}, err
	}
	return is, nil
}

func newSerial() (*big.Int, error) {
	for {
		n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
		if err != nil {
			return nil, err
		}
		if n.BitLen() > 64 {
			return n, nil
		}
	}
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
