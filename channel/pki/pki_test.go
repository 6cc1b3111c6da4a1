// SPDX-License-Identifier: Apache-2.0

package pki_test

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
)

func authority(t *testing.T, fleet string, o pki.Options) (*pki.Authority, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ca")
	a, err := pki.NewAuthority(dir, fleet, o)
	if err != nil {
		t.Fatal(err)
	}
	return a, dir
}

func mode(t *testing.T, path string) fs.FileMode {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Mode().Perm()
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestAuthorityIsMadeOnceAndLoaded(t *testing.T) {
	a, dir := authority(t, "prod", pki.Options{})
	if m := mode(t, dir); m != 0o700 {
		t.Errorf("folder mode %o", m)
	}
	if m := mode(t, filepath.Join(dir, pki.CAKeyFile)); m != 0o600 {
		t.Errorf("key mode %o", m)
	}
	key := read(t, filepath.Join(dir, pki.CAKeyFile))
	for range 2 {
		if _, err := pki.NewAuthority(dir, "prod", pki.Options{}); !errors.Is(err, pki.ErrExists) || !errors.Is(err, fs.ErrExist) {
			t.Fatalf("a second NewAuthority: %v", err)
		}
		// Also when only the key is left.
		os.Remove(filepath.Join(dir, "nothing"))
	}
	if read(t, filepath.Join(dir, pki.CAKeyFile)) != key {
		t.Fatal("the key was overwritten")
	}
	b, err := pki.LoadAuthority(dir, pki.Options{})
	if err != nil || b.Fleet() != "prod" || a.Fleet() != "prod" {
		t.Fatalf("%v %v", b, err)
	}
	// A key alone is not overwritten either.
	if err := os.Remove(filepath.Join(dir, pki.CACertFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.NewAuthority(dir, "prod", pki.Options{}); !errors.Is(err, pki.ErrExists) {
		t.Fatal(err)
	}
	if _, err := pki.LoadAuthority(dir, pki.Options{}); err == nil {
		t.Fatal("loaded without a certificate")
	}
	for _, fleet := range []string{"", "Prod", "a/b", strings.Repeat("a", 33)} {
		if _, err := pki.NewAuthority(filepath.Join(t.TempDir(), "x"), fleet, pki.Options{}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("fleet %q: %v", fleet, err)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	_, dir := authority(t, "prod", pki.Options{})
	_, other := authority(t, "prod", pki.Options{})
	keyFile := filepath.Join(dir, pki.CAKeyFile)
	if err := os.Chmod(keyFile, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.LoadAuthority(dir, pki.Options{}); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "chmod 600") {
		t.Fatalf("open key: %v", err)
	}
	if err := os.Chmod(keyFile, 0o600); err != nil {
		t.Fatal(err)
	}
	good := read(t, filepath.Join(dir, pki.CACertFile))
	for _, b := range []string{read(t, filepath.Join(other, pki.CACertFile)), "", good[:100], good + "junk"} {
		if err := os.WriteFile(filepath.Join(dir, pki.CACertFile), []byte(b), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := pki.LoadAuthority(dir, pki.Options{}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("certificate %.20q: %v", b, err)
		}
	}
	if _, err := pki.LoadAuthority(t.TempDir(), pki.Options{}); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "cell pki init") {
		t.Errorf("empty folder: %v", err)
	}
}

func TestIssueRenewRevokeInspect(t *testing.T) {
	a, dir := authority(t, "prod", pki.Options{})
	out := filepath.Join(t.TempDir(), "a")
	id := channel.Identity{Role: channel.RoleCell, Name: "a"}
	is, err := a.Issue(id, pki.IssueOptions{Dir: out})
	if err != nil {
		t.Fatal(err)
	}
	if m := mode(t, is.KeyFile); m != 0o600 {
		t.Errorf("key mode %o", m)
	}
	key, cert := read(t, is.KeyFile), read(t, is.CertFile)
	if _, err := a.Issue(id, pki.IssueOptions{Dir: out}); !errors.Is(err, pki.ErrExists) {
		t.Fatalf("issued twice: %v", err)
	}
	if err := os.Remove(is.CertFile); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Issue(id, pki.IssueOptions{Dir: out}); !errors.Is(err, pki.ErrExists) || read(t, is.KeyFile) != key {
		t.Fatalf("the key would be overwritten: %v", err)
	}
	// A key without its certificate is completed.
	done, err := a.Renew(is.CertFile, is.KeyFile, id, 0)
	if err != nil || done.Identity.String() != "cell://prod/cell/a" {
		t.Fatalf("%v %v", done, err)
	}
	if err := os.WriteFile(is.CertFile, []byte(cert), 0o644); err != nil {
		t.Fatal(err)
	}
	re, err := a.Renew(is.CertFile, is.KeyFile, channel.Identity{}, time.Hour)
	if err != nil || re.Renews != is.Serial || re.Serial == is.Serial || re.Identity != is.Identity || read(t, is.KeyFile) != key {
		t.Fatalf("%+v %v", re, err)
	}
	in, err := pki.Inspect(re.CertFile, a.CAFile(), a.RevokedFile(), time.Now())
	if err != nil || in.Identity != "cell://prod/cell/a" || in.Serial != re.Serial || !in.Client || !in.Server || len(in.Problems) != 0 {
		t.Fatalf("%+v %v", in, err)
	}
	all, err := a.List()
	if err != nil || len(all) != 3 || all[0].Serial != is.Serial || all[2].Renews != is.Serial {
		t.Fatalf("%+v %v", all, err)
	}

	if err := a.Revoke(re.Serial, "laptop lost\ninjected"); err != nil {
		t.Fatal(err)
	}
	if err := a.Revoke(re.Serial, "again"); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(read(t, a.RevokedFile()), re.Serial); n != 1 {
		t.Fatalf("listed %d times", n)
	}
	if err := a.Revoke("abcdef", ""); !errors.Is(err, cells.ErrNotFound) {
		t.Fatalf("unknown serial: %v", err)
	}
	if err := a.Revoke("nonsense", ""); !errors.Is(err, cells.ErrInvalid) {
		t.Fatalf("malformed serial: %v", err)
	}
	if in, err = pki.Inspect(re.CertFile, a.CAFile(), a.RevokedFile(), time.Now()); err != nil || len(in.Problems) != 1 || in.Problems[0] != "revoked" {
		t.Fatalf("%+v %v", in, err)
	}
	if _, err := a.Renew(re.CertFile, re.KeyFile, channel.Identity{}, 0); !errors.Is(err, cells.ErrInvalid) {
		t.Fatalf("a revoked certificate was renewed: %v", err)
	}
	if _, err := pki.Inspect(filepath.Join(dir, pki.CAKeyFile), "", "", time.Now()); !errors.Is(err, cells.ErrInvalid) {
		t.Fatalf("inspected a key: %v", err)
	}
	if in, err = pki.Inspect(a.CAFile(), a.CAFile(), "", time.Now()); err != nil || !in.CA || len(in.Problems) != 0 {
		t.Fatalf("%+v %v", in, err)
	}
}

func TestIssueRefuses(t *testing.T) {
	now := time.Now()
	a, _ := authority(t, "prod", pki.Options{Lifetime: time.Hour, Now: func() time.Time { return now }})
	out := t.TempDir()
	for name, id := range map[string]channel.Identity{
		"another fleet": {Fleet: "test", Role: channel.RoleCell, Name: "a"},
		"bad name":      {Role: channel.RoleCell, Name: "A"},
		"no name":       {Role: channel.RoleCell},
		"path":          {Role: channel.RoleCell, Name: "../a"},
		"bad role":      {Role: "root", Name: "a"},
	} {
		if _, err := a.Issue(id, pki.IssueOptions{Dir: out}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if ents, _ := os.ReadDir(out); len(ents) != 0 {
		t.Fatalf("files were left: %v", ents)
	}
	// Never longer than the CA.
	is, err := a.Issue(channel.Identity{Role: channel.RoleEdge, Name: "e"}, pki.IssueOptions{Dir: out, Lifetime: 24 * time.Hour})
	if err != nil || is.NotAfter.After(now.Add(time.Hour)) {
		t.Fatalf("%+v %v", is, err)
	}
	now = now.Add(2 * time.Hour)
	if _, err := a.Renew(is.CertFile, is.KeyFile, channel.Identity{}, 0); !errors.Is(err, cells.ErrInvalid) {
		t.Fatalf("issued by a CA that has ended: %v", err)
	}
	in, err := pki.Inspect(is.CertFile, a.CAFile(), "", now)
	if err != nil || in.Server || !in.Client || len(in.Problems) != 1 {
		t.Fatalf("%+v %v", in, err)
	}
	// Another authority's certificate is not renewed, nor with another key.
	b, _ := authority(t, "prod", pki.Options{})
	bi, err := b.Issue(channel.Identity{Role: channel.RoleEdge, Name: "e"}, pki.IssueOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	now = time.Now()
	if _, err := a.Renew(bi.CertFile, bi.KeyFile, channel.Identity{}, 0); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
	if _, err := a.Renew(is.CertFile, bi.KeyFile, channel.Identity{}, 0); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
}

func TestTornRecordIsDropped(t *testing.T) {
	a, dir := authority(t, "prod", pki.Options{})
	out := t.TempDir()
	if _, err := a.Issue(channel.Identity{Role: channel.RoleCell, Name: "a"}, pki.IssueOptions{Dir: out}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, pki.IssuedFile)
	whole := read(t, path)
	if err := os.WriteFile(path, []byte(whole+whole[:len(whole)/2]), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := a.List(); err != nil || len(l) != 1 {
		t.Fatalf("%v %v", l, err)
	}
	if _, err := a.Issue(channel.Identity{Role: channel.RoleCell, Name: "b"}, pki.IssueOptions{Dir: out}); err != nil {
		t.Fatal(err)
	}
	if l, err := a.List(); err != nil || len(l) != 2 {
		t.Fatalf("%v %v", l, err)
	}
	if err := os.WriteFile(path, []byte("damage\n"+whole), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.List(); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
}

func TestIssueConcurrently(t *testing.T) {
	a, dir := authority(t, "prod", pki.Options{})
	out := t.TempDir()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			b, err := pki.LoadAuthority(dir, pki.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			is, err := b.Issue(channel.Identity{Role: channel.RoleCell, Name: string(rune('a' + i))}, pki.IssueOptions{Dir: out})
			if err == nil {
				err = b.Revoke(is.Serial, "")
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	l, err := a.List()
	if err != nil || len(l) != 8 {
		t.Fatalf("%d records, %v", len(l), err)
	}
	gone, err := channel.ParseRevoked([]byte(read(t, a.RevokedFile())))
	if err != nil || len(gone) != 8 {
		t.Fatalf("%d revoked, %v", len(gone), err)
	}
}

// The CA signs for its own fleet only; a certificate that names another is said to.
func TestInspectAnotherFleet(t *testing.T) {
	_, dir := authority(t, "ours", pki.Options{})
	keyBlock, _ := pem.Decode([]byte(read(t, filepath.Join(dir, pki.CAKeyFile))))
	key, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	caBlock, _ := pem.Decode([]byte(read(t, filepath.Join(dir, pki.CACertFile))))
	ca, err := x509.ParseCertificate(caBlock.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for fleet, want := range map[string]bool{"ours": false, "theirs": true} {
		uri, _ := url.Parse("cell://" + fleet + "/cell/a")
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
			SerialNumber: big.NewInt(7), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), URIs: []*url.URL{uri},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		}, ca, key.(crypto.Signer).Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, fleet+".crt")
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		info, err := pki.Inspect(file, filepath.Join(dir, pki.CACertFile), "", time.Now())
		if err != nil || strings.Contains(strings.Join(info.Problems, " "), "names the fleet theirs") != want {
			t.Errorf("%s: %v %v", fleet, info.Problems, err)
		}
	}
}
