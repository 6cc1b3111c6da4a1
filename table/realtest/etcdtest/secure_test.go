// SPDX-License-Identifier: Apache-2.0

package etcdtest_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/etcd"
	"github.com/cloister-dev/cloister/table/realtest/etcdtest"
)

func writeFile(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	b := der
	if kind != "" {
		b = pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// selfSigned writes a certificate for the loopback that is its own authority.
func selfSigned(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "etcd"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true, IsCA: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writeFile(t, cert, "CERTIFICATE", der)
	writeFile(t, key, "EC PRIVATE KEY", keyDER)
	return cert, key
}

// TLS, users and their roles come from the address of the table.
func TestSecure(t *testing.T) {
	dir := t.TempDir()
	cert, key := selfSigned(t, dir)
	s, err := etcdtest.Start(dir, func(cfg *embed.Config) {
		for _, u := range []*[]url.URL{&cfg.ListenClientUrls, &cfg.AdvertiseClientUrls} {
			(*u)[0].Scheme = "https"
		}
		cfg.ClientTLSInfo.CertFile, cfg.ClientTLSInfo.KeyFile = cert, key
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	host := strings.TrimPrefix(s.URL, "https://")
	openURL := func(raw string) (*etcd.Table, error) {
		cfg, opts, err := etcd.ParseURL(raw)
		if err != nil {
			t.Fatal(err)
		}
		table, err := etcd.Open(t.Context(), cfg, append(opts, etcd.WithTimeout(2*time.Second))...)
		if err == nil {
			t.Cleanup(func() { _ = table.Close() })
		}
		return table, err
	}
	if _, err := openURL("etcd://" + host + "/fleet"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("without TLS: %v, want ErrUnavailable", err)
	}
	if _, err := openURL("etcd://" + host + "/fleet?tls=true"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("with a certificate that is not trusted: %v, want ErrUnavailable", err)
	}
	admin, err := openURL("etcd://" + host + "/fleet?ca=" + cert)
	if err != nil {
		t.Fatal(err)
	}
	r := cas(t, admin, 0, row("t"))
	cfg, _, err := etcd.ParseURL("etcd://" + host + "?ca=" + cert)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Logger = zap.NewNop()
	bare, err := clientv3.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close()
	ctx := t.Context()
	for _, step := range []func() error{
		func() error { _, err := bare.RoleAdd(ctx, "root"); return err },
		func() error { _, err := bare.UserAdd(ctx, "root", "rootpass"); return err },
		func() error { _, err := bare.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := bare.RoleAdd(ctx, "reader"); return err },
		func() error {
			_, err := bare.RoleGrantPermission(ctx, "reader", "/fleet/", clientv3.GetPrefixRangeEnd("/fleet/"), clientv3.PermissionType(clientv3.PermRead))
			return err
		},
		func() error { _, err := bare.UserAdd(ctx, "edge", "edgepass"); return err },
		func() error { _, err := bare.UserGrantRole(ctx, "edge", "reader"); return err },
		func() error { _, err := bare.AuthEnable(ctx); return err },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := openURL("etcd://edge:wrong@" + host + "/fleet?ca=" + cert); !errors.Is(err, cells.ErrUnavailable) || strings.Contains(err.Error(), "wrong") {
		t.Errorf("with a wrong password: %v, want ErrUnavailable without it", err)
	}
	password := filepath.Join(dir, "password")
	writeFile(t, password, "", []byte("edgepass\n"))
	edge, err := openURL("etcd://edge@" + host + "/fleet?ca=" + cert + "&password_file=" + password)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := edge.Get(ctx, "t"); err != nil || got.Revision != r.Revision {
		t.Errorf("a reader reads %+v, %v", got, err)
	}
	w := watch(t, edge, 0)
	if rows := follow(t, w, r.Revision); rows["t"].Revision != r.Revision {
		t.Errorf("a reader watches %+v", rows)
	}
	if _, err := edge.CompareAndSet(ctx, r.Revision, stamped(r, "edge")); !errors.Is(err, cells.ErrUnavailable) || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a reader writes: %v", err)
	}
	if got, err := edge.Get(ctx, "t"); err != nil || got.Stamp != "" {
		t.Errorf("after the refused write: %+v, %v", got, err)
	}
}
