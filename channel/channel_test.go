// SPDX-License-Identifier: Apache-2.0

package channel_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/channeltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testCA makes certificates that pki would not.
type testCA struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// sign makes a certificate; ca nil signs it by itself.
func (ca *testCA) sign(t testing.TB, edit func(*x509.Certificate)) *testCA {
	t.Helper()
	key := newKey(t)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		NotBefore:    time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	edit(tmpl)
	parent, signer := tmpl, key
	if ca != nil {
		parent, signer = ca.cert, ca.key
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &testCA{key, cert}
}

func asCA(name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: name}
		c.IsCA = true
		c.KeyUsage = x509.KeyUsageCertSign
		c.ExtKeyUsage = nil
	}
}

func uris(t testing.TB, us ...string) []*url.URL {
	t.Helper()
	var out []*url.URL
	for _, s := range us {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, u)
	}
	return out
}

func pemOf(certs ...*x509.Certificate) []byte {
	var b bytes.Buffer
	for _, c := range certs {
		_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
	}
	return b.Bytes()
}

func keyPEM(t testing.TB, k *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func write(t testing.TB, path string, b []byte) string {
	t.Helper()
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
	return path
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// end writes the files of one certificate and returns a configuration of them.
func end(t testing.TB, ca, leaf *testCA) channel.Config {
	t.Helper()
	dir := t.TempDir()
	return channel.Config{
		CAFile:      write(t, filepath.Join(dir, "ca"), pemOf(ca.cert)),
		CertFile:    write(t, filepath.Join(dir, "crt"), pemOf(leaf.cert)),
		KeyFile:     write(t, filepath.Join(dir, "key"), keyPEM(t, leaf.key)),
		RevokedFile: write(t, filepath.Join(dir, "revoked"), nil),
		ReloadEvery: -1, Log: quiet,
	}
}

func open(t testing.TB, cfg channel.Config) *channel.Channel {
	t.Helper()
	c, err := channel.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// serve answers who the peer is, on a real socket, and returns its URL.
func serve(t testing.TB, conf *tls.Config, h http.Handler) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if h == nil {
		h = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			id, ok := channel.PeerFrom(r)
			if !ok {
				http.Error(w, "no peer", http.StatusInternalServerError)
				return
			}
			io.WriteString(w, id.String())
		})
	}
	srv := &http.Server{Handler: h, TLSConfig: conf, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: 5 * time.Second}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.ServeTLS(l, "", "") }()
	t.Cleanup(func() { srv.Close(); <-done })
	return "https://" + l.Addr().String()
}

func get(t testing.TB, c *http.Client, url string) (string, int, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), resp.StatusCode, err
}

func client(t testing.TB, c *channel.Channel, want ...channel.Identity) *http.Client {
	t.Helper()
	h := c.Client(want...)
	t.Cleanup(h.CloseIdleConnections)
	return h
}

func reasonOf(err error) channel.Reason {
	var r *channel.RefusedError
	if errors.As(err, &r) {
		return r.Reason
	}
	return ""
}

var (
	cellA = channel.Identity{Role: channel.RoleCell, Name: "a"}
	cellB = channel.Identity{Role: channel.RoleCell, Name: "b"}
	dirID = channel.Identity{Role: channel.RoleDirectory, Name: "main"}
)

func TestTwoPeersKnowEachOther(t *testing.T) {
	f := channeltest.New(t, "prod")
	a, b := f.Open(t, channel.RoleCell, "a"), f.Open(t, channel.RoleCell, "b")
	u := serve(t, a.Server(), nil)
	body, status, err := get(t, client(t, b, cellA), u)
	if err != nil || status != 200 || body != "cell://prod/cell/b" {
		t.Fatalf("%q %d %v", body, status, err)
	}
	// Any name of a role.
	if _, _, err := get(t, client(t, b, channel.Identity{Role: channel.RoleCell}), u); err != nil {
		t.Fatal(err)
	}
	resp, err := client(t, b, cellA).Get(u)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.ProtoMajor != 2 || resp.TLS.Version != tls.VersionTLS13 {
		t.Fatalf("HTTP/%d over %s", resp.ProtoMajor, tls.VersionName(resp.TLS.Version))
	}
}

func TestPlainURLsAreRefused(t *testing.T) {
	f := channeltest.New(t, "prod")
	c := client(t, f.Open(t, channel.RoleCell, "b"), cellA)
	var hit atomic.Bool
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hit.Store(true) }), ReadHeaderTimeout: time.Second}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
	if _, _, err := get(t, c, "http://"+l.Addr().String()); !errors.Is(err, cells.ErrInvalid) || hit.Load() {
		t.Fatalf("err %v, reached %v", err, hit.Load())
	}
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	f := channeltest.New(t, "prod")
	u := serve(t, f.Open(t, channel.RoleCell, "a").Server(), http.RedirectHandler("https://127.0.0.1:1/", http.StatusFound))
	if _, status, err := get(t, client(t, f.Open(t, channel.RoleCell, "b"), cellA), u); err != nil || status != http.StatusFound {
		t.Fatalf("%d %v", status, err)
	}
}

// certCase is one certificate that must be refused, as a client's and as a
// server's.
type certCase struct {
	name   string
	reason channel.Reason
	// client, when set, is the reason on the server's side: there the handshake's
	// own chain check may come first, which gives no reason of ours.
	stdFirst bool
	edit     func(*x509.Certificate)
	signer   func(good *testCA) *testCA
	// present adds certificates to what is sent.
	present func(good, signer *testCA) []*x509.Certificate
}

func cases(t *testing.T) []certCase {
	x := uris(t, "cell://prod/cell/x")
	named := func(c *x509.Certificate) { c.URIs = x }
	ours := func(good *testCA) *testCA { return good }
	return []certCase{
		{name: "another CA", reason: channel.ReasonChain, stdFirst: true, edit: named,
			signer: func(*testCA) *testCA { return (*testCA)(nil).sign(t, asCA("prod CA")) }},
		{name: "self-signed", reason: channel.ReasonChain, stdFirst: true, edit: named, signer: func(*testCA) *testCA { return nil }},
		{name: "two URIs", reason: channel.ReasonNames, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = uris(t, "cell://prod/cell/x", "cell://prod/cell/y") }},
		{name: "a URI and a host", reason: channel.ReasonNames, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.DNSNames = []string{"localhost"} }},
		{name: "a URI and an address", reason: channel.ReasonNames, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }},
		{name: "no name", reason: channel.ReasonNames, signer: ours, edit: func(*x509.Certificate) {}},
		{name: "a host only", reason: channel.ReasonNames, signer: ours,
			edit: func(c *x509.Certificate) { c.DNSNames = []string{"localhost"} }},
		{name: "malformed URI", reason: channel.ReasonNames, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = uris(t, "cell://prod:1/cell/x") }},
		{name: "wrong fleet", reason: channel.ReasonFleet, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = uris(t, "cell://test/cell/x") }},
		{name: "unknown cell", reason: channel.ReasonUnknown, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = uris(t, "cell://prod/cell/stranger") }},
		{name: "expired", reason: channel.ReasonExpired, stdFirst: true, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.NotAfter = time.Now().Add(-time.Minute) }},
		{name: "not yet valid", reason: channel.ReasonNotYet, stdFirst: true, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.NotBefore = time.Now().Add(time.Minute) }},
		{name: "no usages at all", reason: channel.ReasonUsage, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.ExtKeyUsage = nil }},
		{name: "any usage", reason: channel.ReasonUsage, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} }},
		{name: "another usage", reason: channel.ReasonUsage, stdFirst: true, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} }},
		{name: "not for signatures", reason: channel.ReasonUsage, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.KeyUsage = x509.KeyUsageKeyEncipherment }},
		{name: "a CA as a peer", reason: channel.ReasonUsage, signer: ours,
			edit: func(c *x509.Certificate) { c.URIs = x; c.IsCA = true; c.KeyUsage |= x509.KeyUsageCertSign }},
		{name: "issued by an intermediate of our CA", reason: channel.ReasonChain, edit: named,
			signer:  func(good *testCA) *testCA { return good.sign(t, asCA("an intermediate")) },
			present: func(_, signer *testCA) []*x509.Certificate { return []*x509.Certificate{signer.cert} }},
		{name: "issued by a member's certificate", reason: channel.ReasonChain, stdFirst: true, edit: named,
			signer: func(good *testCA) *testCA {
				return good.sign(t, func(c *x509.Certificate) {
					c.Subject = pkix.Name{CommonName: "member"}
					c.URIs = uris(t, "cell://prod/cell/b")
				})
			},
			present: func(_, signer *testCA) []*x509.Certificate { return []*x509.Certificate{signer.cert} }},
	}
}

func TestBadCertificatesAreRefusedByBothEnds(t *testing.T) {
	good := (*testCA)(nil).sign(t, asCA("prod CA"))
	leaf := func(name string) *testCA {
		return good.sign(t, func(c *x509.Certificate) { c.URIs = uris(t, "cell://prod/cell/"+name) })
	}
	for _, tc := range cases(t) {
		t.Run(tc.name, func(t *testing.T) {
			signer := tc.signer(good)
			bad := signer.sign(t, tc.edit)
			chain := [][]byte{bad.cert.Raw}
			if tc.present != nil {
				for _, c := range tc.present(good, signer) {
					chain = append(chain, c.Raw)
				}
			}
			presented := tls.Certificate{Certificate: chain, PrivateKey: bad.key}

			cfg := end(t, good, leaf("a"))
			cfg.Known = func(id channel.Identity) bool { return id.Name != "stranger" }
			var reached atomic.Bool
			var refused atomic.Value
			cfg.Log = slog.New(&reasonLog{Handler: quiet.Handler(), reason: &refused})
			honest := open(t, cfg)

			// A client that has it.
			u := serve(t, honest.Server(), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Store(true) }))
			tr := &http.Transport{TLSClientConfig: &tls.Config{
				InsecureSkipVerify:   true,
				GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &presented, nil },
			}}
			defer tr.CloseIdleConnections()
			if body, status, err := get(t, &http.Client{Transport: tr}, u); err == nil || reached.Load() {
				t.Errorf("the server answered a bad client: %d %q (handler reached: %v)", status, body, reached.Load())
			}
			if r, _ := refused.Load().(string); !tc.stdFirst && r != string(tc.reason) {
				t.Errorf("the server's reason is %q, want %q", r, tc.reason)
			}

			// A server that has it.
			u = serve(t, &tls.Config{Certificates: []tls.Certificate{presented}, MinVersion: tls.VersionTLS13},
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Store(true) }))
			want := []channel.Identity{{Role: channel.RoleCell}, {Role: channel.RoleCell, Fleet: "test"}}
			_, _, err := get(t, client(t, honest, want...), u)
			if reasonOf(err) != tc.reason {
				t.Errorf("the client's error is %v, want reason %s", err, tc.reason)
			}
			if reached.Load() {
				t.Error("the client sent its request to a bad server")
			}
		})
	}
}

// reasonLog keeps the last refusal's reason.
type reasonLog struct {
	slog.Handler
	reason *atomic.Value
}

func (l *reasonLog) Enabled(context.Context, slog.Level) bool { return true }
func (l *reasonLog) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "reason" {
			l.reason.Store(a.Value.String())
		}
		return true
	})
	return nil
}

func TestNoCertificate(t *testing.T) {
	f := channeltest.New(t, "prod")
	var reached atomic.Bool
	u := serve(t, f.Open(t, channel.RoleCell, "a").Server(), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Store(true) }))
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer tr.CloseIdleConnections()
	if _, status, err := get(t, &http.Client{Transport: tr}, u); err == nil || reached.Load() {
		t.Fatalf("status %d without a certificate", status)
	}
}

func TestOnlyTLS13(t *testing.T) {
	f := channeltest.New(t, "prod")
	a, b := f.Open(t, channel.RoleCell, "a"), f.Open(t, channel.RoleCell, "b")
	u := serve(t, a.Server(), nil)
	old := b.ClientTLS(cellA)
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	tr := &http.Transport{TLSClientConfig: old}
	defer tr.CloseIdleConnections()
	if _, _, err := get(t, &http.Client{Transport: tr}, u); err == nil || !strings.Contains(err.Error(), "protocol version") {
		t.Fatalf("TLS 1.2 client: %v", err)
	}
	// A server that only speaks 1.2.
	srv := a.Server()
	srv.GetConfigForClient = nil
	srv.MinVersion, srv.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, _, err := get(t, client(t, b, cellA), serve(t, srv, nil)); err == nil {
		t.Fatal("a TLS 1.2 server was accepted")
	}
	// VerifyConnection does not rely on the version settings.
	tr2 := &http.Transport{TLSClientConfig: old}
	defer tr2.CloseIdleConnections()
	if _, _, err := get(t, &http.Client{Transport: tr2}, serve(t, srv, nil)); reasonOf(err) != channel.ReasonVersion {
		t.Fatalf("both ends forced to 1.2: %v", err)
	}
}

func TestAnotherCellIsNotTheServer(t *testing.T) {
	f := channeltest.New(t, "prod")
	u := serve(t, f.Open(t, channel.RoleCell, "b").Server(), nil)
	dir := f.Open(t, channel.RoleDirectory, "main")
	for _, want := range [][]channel.Identity{{cellA}, {dirID}, {}, {{Fleet: "test", Role: channel.RoleCell, Name: "b"}}} {
		if _, _, err := get(t, client(t, dir, want...), u); reasonOf(err) != channel.ReasonUnwanted {
			t.Errorf("want %v: %v", want, err)
		}
	}
	if _, _, err := get(t, client(t, dir, cellA, cellB), u); err != nil {
		t.Error(err)
	}
}

func TestClientOnlyRolesCannotServe(t *testing.T) {
	f := channeltest.New(t, "prod")
	u := serve(t, f.Open(t, channel.RoleEdge, "e").Server(), nil)
	_, _, err := get(t, client(t, f.Open(t, channel.RoleCell, "a"), channel.Identity{Role: channel.RoleEdge}), u)
	if reasonOf(err) != channel.ReasonUsage {
		t.Fatal(err)
	}
}

func TestRequire(t *testing.T) {
	f := channeltest.New(t, "prod")
	a := f.Open(t, channel.RoleCell, "a")
	u := serve(t, a.Server(), a.Require(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, ok := channel.PeerFromContext(r.Context())
		if !ok {
			t.Error("no peer in the context")
		}
		io.WriteString(w, id.String())
	}), channel.RoleDirectory))
	if body, status, err := get(t, client(t, f.Open(t, channel.RoleDirectory, "main"), cellA), u); err != nil || status != 200 || body != "cell://prod/directory/main" {
		t.Fatalf("%q %d %v", body, status, err)
	}
	for _, role := range []channel.Role{channel.RoleCell, channel.RoleEdge, channel.RoleOperator} {
		if _, status, err := get(t, client(t, f.Open(t, role, "b"), cellA), u); err != nil || status != http.StatusForbidden {
			t.Errorf("%s: %d %v", role, status, err)
		}
	}
	// Without TLS nobody is anybody.
	w := newRecorder()
	req, _ := http.NewRequest(http.MethodGet, "/", nil)
	a.Require(http.NotFoundHandler()).ServeHTTP(w, req)
	if w.status != http.StatusForbidden {
		t.Fatalf("plain request: %d", w.status)
	}
}

type recorder struct {
	h      http.Header
	status int
}

func newRecorder() *recorder                    { return &recorder{h: http.Header{}} }
func (r *recorder) Header() http.Header         { return r.h }
func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }
func (r *recorder) WriteHeader(s int)           { r.status = s }
