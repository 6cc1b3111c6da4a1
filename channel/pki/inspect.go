// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
)

// Info is what a certificate file says, for people.
type Info struct {
	File string `json:"file"`
	CA   bool   `json:"ca"`
	// Identity is the URI that the certificate names; "" for a CA or when there is
	// not exactly one (Problems says so).
	Identity  string    `json:"identity,omitempty"`
	Subject   string    `json:"subject"`
	Issuer    string    `json:"issuer"`
	Serial    string    `json:"serial"`
	NotBefore time.Time `json:"not_before"`
	NotAfter  time.Time `json:"not_after"`
	// SHA256 of the DER, in hexadecimal.
	SHA256 string `json:"sha256"`
	Client bool   `json:"client"`
	Server bool   `json:"server"`
	// Problems are why the channel would refuse the certificate at the time given.
	Problems []string `json:"problems,omitempty"`
}

// Inspect describes the first certificate of a file. The error is about reading
// it; what is wrong with the certificate itself is in Info.Problems. caFile and
// revokedFile may be "": then that is not judged.
func Inspect(file, caFile, revokedFile string, now time.Time) (Info, error) {
	cert, err := readCert(file)
	if err != nil {
		return Info{}, err
	}
	sum := sha256.Sum256(cert.Raw)
	in := Info{
		File: file, CA: cert.IsCA, Subject: cert.Subject.String(), Issuer: cert.Issuer.String(),
		Serial: channel.FormatSerial(cert.SerialNumber), NotBefore: cert.NotBefore.UTC(), NotAfter: cert.NotAfter.UTC(),
		SHA256: hex.EncodeToString(sum[:]),
	}
	for _, u := range cert.ExtKeyUsage {
		in.Client = in.Client || u == x509.ExtKeyUsageClientAuth
		in.Server = in.Server || u == x509.ExtKeyUsageServerAuth
	}
	problem := func(format string, args ...any) { in.Problems = append(in.Problems, fmt.Sprintf(format, args...)) }
	if now.Before(cert.NotBefore) {
		problem("not valid before %s", in.NotBefore.Format(time.RFC3339))
	}
	if now.After(cert.NotAfter) {
		problem("ended on %s", in.NotAfter.Format(time.RFC3339))
	}
	if !cert.IsCA {
		if id, err := channel.IdentityOf(cert); err != nil {
			problem("%v", err)
		} else {
			in.Identity = id.String()
		}
		if !in.Client && !in.Server {
			problem("for neither end of a connection")
		}
	}
	if caFile != "" {
		ca, err := readCert(caFile)
		if err != nil {
			return Info{}, err
		}
		if err := cert.CheckSignatureFrom(ca); err != nil {
			problem("not issued by %s", ca.Subject)
		}
		if id, err := channel.IdentityOf(cert); err == nil && len(ca.PermittedURIDomains) > 0 && !slices.Contains(ca.PermittedURIDomains, id.Fleet) {
			problem("names the fleet %s; the CA is the fleet %s's", id.Fleet, strings.Join(ca.PermittedURIDomains, ", "))
		}
	}
	if revokedFile != "" {
		gone, err := listed(revokedFile, cert.SerialNumber)
		if err != nil {
			return Info{}, err
		}
		if gone {
			problem("revoked")
		}
	}
	return in, nil
}

func readCert(file string) (*x509.Certificate, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	certs, err := channel.ParseCertificates(b)
	if err != nil {
		return nil, fmt.Errorf("pki: %s: %w", file, err)
	}
	return certs[0], nil
}

// List returns what was issued, oldest first. A last line that a crash cut off
// is left out (its certificate was never written); any other malformed line is
// an error.
func (a *Authority) List() ([]Issued, error) {
	b, err := os.ReadFile(filepath.Join(a.dir, IssuedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Issued
	b = b[:bytes.LastIndexByte(b, '\n')+1]
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, 1<<20)
	for n := 1; sc.Scan(); n++ {
		var is Issued
		if err := json.Unmarshal(sc.Bytes(), &is); err != nil {
			return out, fmt.Errorf("%w: pki: %s line %d: %v", cells.ErrInvalid, IssuedFile, n, err)
		}
		out = append(out, is)
	}
	return out, sc.Err()
}

// Revoke adds a serial, as List and Inspect show it, to the list that processes
// read. Only a serial that this authority issued can be revoked
// ([cells.ErrNotFound] otherwise); revoking it again changes nothing.
func (a *Authority) Revoke(serial, why string) error {
	n, err := channel.ParseSerial(serial)
	if err != nil {
		return err
	}
	serial = channel.FormatSerial(n)
	all, err := a.List()
	if err != nil {
		return err
	}
	var is *Issued
	for i := range all {
		if all[i].Serial == serial {
			is = &all[i]
		}
	}
	if is == nil {
		return fmt.Errorf("%w: certificate %s; nothing with this serial was issued here", cells.ErrNotFound, serial)
	}
	unlock, err := a.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if gone, err := listed(a.RevokedFile(), n); err != nil || gone {
		return err
	}
	b, err := os.ReadFile(a.RevokedFile())
	if err != nil {
		return err
	}
	if len(b) > 0 && b[len(b)-1] != '\n' {
		b = append(b, '\n')
	}
	why = string(bytes.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, []byte(why)))
	b = fmt.Appendf(b, "%s # %s %s %s\n", serial, a.now().UTC().Format(time.RFC3339), is.Identity, why)
	return replaceFile(a.RevokedFile(), b, 0o644)
}

func (a *Authority) revoked(serial string) (bool, error) {
	n, err := channel.ParseSerial(serial)
	if err != nil {
		return false, err
	}
	return listed(a.RevokedFile(), n)
}

func listed(file string, serial *big.Int) (bool, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	serials, err := channel.ParseRevoked(b)
	if err != nil {
		return false, fmt.Errorf("pki: %s: %w", file, err)
	}
	for _, s := range serials {
		if s.Cmp(serial) == 0 {
			return true, nil
		}
	}
	return false, nil
}
