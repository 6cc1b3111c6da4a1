// SPDX-License-Identifier: Apache-2.0

package channel_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/channeltest"
	"github.com/cloister-dev/cloister/channel/pki"
)

func serialOf(t testing.TB, file string) string {
	t.Helper()
	in, err := pki.Inspect(file, "", "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return in.Serial
}

func TestRevocationEndsOpenConnections(t *testing.T) {
	f := channeltest.New(t, "prod")
	a := f.Open(t, channel.RoleCell, "a")
	u := serve(t, a.Server(), a.Require(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })))
	bCfg := f.Config(t, channel.RoleCell, "b")
	bCfg.RevokedFile = "" // b does not know about its own revocation
	bc := client(t, open(t, bCfg), cellA)
	if _, status, err := get(t, bc, u); err != nil || status != 200 {
		t.Fatalf("%d %v", status, err)
	}
	if err := f.Revoke(serialOf(t, bCfg.CertFile), "lost"); err != nil {
		t.Fatal(err)
	}
	// The connection is open and still used; the request is refused.
	if body, status, err := get(t, bc, u); err != nil || status != http.StatusForbidden || !strings.Contains(body, "revoked") {
		t.Fatalf("on the open connection: %q %d %v", body, status, err)
	}
	// A new one is refused in the handshake.
	bc.CloseIdleConnections()
	if _, _, err := get(t, client(t, open(t, bCfg), cellA), u); err == nil {
		t.Fatal("a new connection was accepted")
	}
	// And as a server.
	ub := serve(t, open(t, bCfg).Server(), nil)
	if _, _, err := get(t, client(t, a, cellB), ub); reasonOf(err) != channel.ReasonRevoked {
		t.Fatal(err)
	}
}

func TestClientNoticesRevokedServerOnOpenConnection(t *testing.T) {
	f := channeltest.New(t, "prod")
	bCfg := f.Config(t, channel.RoleCell, "b")
	ub := serve(t, open(t, bCfg).Server(), nil)
	c := client(t, f.Open(t, channel.RoleCell, "a"), cellB)
	if _, _, err := get(t, c, ub); err != nil {
		t.Fatal(err)
	}
	if err := f.Revoke(serialOf(t, bCfg.CertFile), "lost"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := get(t, c, ub); reasonOf(err) != channel.ReasonRevoked {
		t.Fatal(err)
	}
}

// Tickets are off; this test turns them on to show that the check does not
// depend on it: a resumed session is judged like a new one.
func TestResumedSessionIsJudgedAgain(t *testing.T) {
	f := channeltest.New(t, "prod")
	a := f.Open(t, channel.RoleCell, "a")
	bCfg := f.Config(t, channel.RoleCell, "b")
	b := open(t, bCfg)

	dial := func(t *testing.T, addr string, conf *tls.Config) (resumed bool, err error) {
		t.Helper()
		conn, err := tls.Dial("tcp", addr, conf)
		if err != nil {
			return false, err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"); err != nil {
			return false, err
		}
		_, err = io.ReadAll(conn) // reads the ticket, too
		return conn.ConnectionState().DidResume, err
	}
	withCache := func() *tls.Config {
		conf := b.ClientTLS(cellA)
		conf.SessionTicketsDisabled = false
		conf.ClientSessionCache = tls.NewLRUClientSessionCache(4)
		conf.ServerName = "a"
		conf.NextProtos = []string{"http/1.1"}
		return conf
	}

	// As shipped: nothing to resume, although the client would.
	conf := withCache()
	addr := strings.TrimPrefix(serve(t, a.Server(), nil), "https://")
	for range 2 {
		if resumed, err := dial(t, addr, conf); err != nil || resumed {
			t.Fatalf("resumed %v, %v", resumed, err)
		}
	}

	// With tickets on.
	srv := a.Server()
	srv.GetConfigForClient = nil
	srv.SessionTicketsDisabled = false
	addr = strings.TrimPrefix(serve(t, srv, nil), "https://")
	conf = withCache()
	if _, err := dial(t, addr, conf); err != nil {
		t.Fatal(err)
	}
	if resumed, err := dial(t, addr, conf); err != nil || !resumed {
		t.Fatalf("the test's premise fails: resumed %v, %v", resumed, err)
	}
	if err := f.Revoke(serialOf(t, bCfg.CertFile), "lost"); err != nil {
		t.Fatal(err)
	}
	if resumed, err := dial(t, addr, conf); err == nil {
		t.Fatalf("a revoked peer got through (resumed %v)", resumed)
	}
}

func TestCertificateIsReloaded(t *testing.T) {
	f := channeltest.New(t, "prod")
	cfg := f.Config(t, channel.RoleCell, "a")
	a := open(t, cfg)
	b := f.Open(t, channel.RoleCell, "b")
	u := serve(t, a.Server(), nil)
	seen := func() string {
		t.Helper()
		c := b.Client(cellA)
		defer c.CloseIdleConnections()
		resp, err := c.Get(u)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return channel.FormatSerial(resp.TLS.PeerCertificates[0].SerialNumber)
	}
	first := serialOf(t, cfg.CertFile)
	if got := seen(); got != first {
		t.Fatalf("serial %s, want %s", got, first)
	}
	before := a.NotAfter()
	is, err := f.Renew(cfg.CertFile, cfg.KeyFile, channel.Identity{}, 48*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if got := seen(); got != is.Serial || got == first {
		t.Fatalf("serial %s after the renewal to %s", got, is.Serial)
	}
	if !a.NotAfter().Equal(is.NotAfter) || a.NotAfter().Equal(before) {
		t.Fatalf("NotAfter %s, want %s", a.NotAfter(), is.NotAfter)
	}
	if m := gather(t, a); m["cell_channel_certificate_not_after_seconds"] != float64(is.NotAfter.Unix()) {
		t.Fatalf("metric %v", m)
	}

	// Half a rotation, another identity, another CA's, nonsense: the last good stays.
	good, _ := os.ReadFile(cfg.CertFile)
	other, _ := os.ReadFile(f.Config(t, channel.RoleCell, "b").CertFile)
	foreign := channeltest.New(t, "prod").Config(t, channel.RoleCell, "a")
	foreignCert, _ := os.ReadFile(foreign.CertFile)
	for _, b := range [][]byte{other, foreignCert, []byte("nonsense"), nil, good[:len(good)/2]} {
		write(t, cfg.CertFile, b)
		if err := a.Reload(); err == nil {
			t.Errorf("reload took %.30q", b)
		}
		if got := seen(); got != is.Serial {
			t.Fatalf("serial %s, want %s", got, is.Serial)
		}
	}
	if m := gather(t, a); m["cell_channel_reloads_total refused"] < 5 {
		t.Fatalf("metrics %v", m)
	}
	// A whole pair of another identity is not taken over either.
	bCfg := f.Config(t, channel.RoleCell, "b")
	bKey, _ := os.ReadFile(bCfg.KeyFile)
	aKey, _ := os.ReadFile(cfg.KeyFile)
	write(t, cfg.CertFile, other)
	write(t, cfg.KeyFile, bKey)
	if err := a.Reload(); !errors.Is(err, cells.ErrInvalid) || a.Self().Name != "a" {
		t.Fatalf("another identity's pair: %v, self %v", err, a.Self())
	}
	write(t, cfg.CertFile, good)
	write(t, cfg.KeyFile, aKey)
	if err := a.Reload(); err != nil {
		t.Fatal(err)
	}
	// A damaged revocation list does not forget what was revoked.
	if err := f.Revoke(serialOf(t, bCfg.CertFile), ""); err != nil {
		t.Fatal(err)
	}
	if _, _, err := get(t, client(t, b, cellA), u); err == nil {
		t.Fatal("revoked and accepted")
	}
	write(t, cfg.RevokedFile, []byte("garbage!\n"))
	if _, _, err := get(t, client(t, open(t, withoutRevoked(bCfg)), cellA), u); err == nil {
		t.Fatal("the damaged list was taken for an empty one")
	}
}

func withoutRevoked(c channel.Config) channel.Config { c.RevokedFile = ""; return c }

// The CA is replaced: both are trusted for a while, then only the new one.
func TestCAIsReplaced(t *testing.T) {
	oldCA := (*testCA)(nil).sign(t, asCA("old"))
	newCA := (*testCA)(nil).sign(t, asCA("new"))
	leaf := func(ca *testCA, name string) *testCA {
		return ca.sign(t, func(c *x509.Certificate) { c.URIs = uris(t, "cell://prod/cell/"+name) })
	}
	aCfg, bCfg := end(t, oldCA, leaf(oldCA, "a")), end(t, oldCA, leaf(oldCA, "b"))
	a, b := open(t, aCfg), open(t, bCfg)
	u := serve(t, a.Server(), nil)
	c := client(t, b, cellA)
	try := func(what string, ok bool) {
		t.Helper()
		if _, _, err := get(t, c, u); (err == nil) != ok {
			t.Fatalf("%s: %v", what, err)
		}
	}
	try("before", true)
	both := pemOf(oldCA.cert, newCA.cert)
	write(t, aCfg.CAFile, both)
	write(t, bCfg.CAFile, both)
	try("both trusted", true)
	nb := leaf(newCA, "b")
	write(t, bCfg.KeyFile, keyPEM(t, nb.key))
	write(t, bCfg.CertFile, pemOf(nb.cert))
	try("the client's is new", true)
	// The server trusts the new one only. Its own certificate is still of the old
	// one, so its files do not fit together and the last good state stays.
	write(t, aCfg.CAFile, pemOf(newCA.cert))
	try("files that do not fit together", true)
	if a.Reload() == nil {
		t.Fatal("taken over")
	}
	na := leaf(newCA, "a")
	write(t, aCfg.KeyFile, keyPEM(t, na.key))
	write(t, aCfg.CertFile, pemOf(na.cert))
	try("the server's is new", true)
	ob := leaf(oldCA, "b")
	write(t, bCfg.KeyFile, keyPEM(t, ob.key))
	write(t, bCfg.CertFile, pemOf(ob.cert))
	try("a client of the old CA", false)
}

func TestValidityByTheClock(t *testing.T) {
	f := channeltest.New(t, "prod")
	now := time.Now()
	cfg := f.Config(t, channel.RoleCell, "a")
	cfg.Now = func() time.Time { return now }
	a := open(t, cfg)
	u := serve(t, a.Server(), a.Require(http.NotFoundHandler()))
	bc := client(t, f.Open(t, channel.RoleCell, "b"), cellA)
	if _, status, err := get(t, bc, u); err != nil || status != 404 {
		t.Fatalf("%d %v", status, err)
	}
	now = now.Add(pki.DefaultLifetime + time.Hour)
	if _, status, err := get(t, bc, u); err != nil || status != http.StatusForbidden {
		t.Fatalf("on an open connection after its end: %d %v", status, err)
	}
	// Nobody starts with a certificate that has ended.
	if _, err := channel.Open(cfg); !errors.Is(err, cells.ErrInvalid) {
		t.Fatal(err)
	}
}

// The client's clock passes the end of a server whose connection is open.
func TestClientNoticesExpiryOnOpenConnection(t *testing.T) {
	f := channeltest.New(t, "prod")
	u := serve(t, f.Open(t, channel.RoleCell, "a").Server(), nil)
	now := time.Now()
	cfg := f.Config(t, channel.RoleCell, "b")
	cfg.Now = func() time.Time { return now }
	c := client(t, open(t, cfg), cellA)
	if _, _, err := get(t, c, u); err != nil {
		t.Fatal(err)
	}
	now = now.Add(pki.DefaultLifetime + time.Hour)
	if _, _, err := get(t, c, u); reasonOf(err) != channel.ReasonExpired {
		t.Fatal(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	f := channeltest.New(t, "prod")
	good := f.Config(t, channel.RoleCell, "a")
	b := f.Config(t, channel.RoleCell, "b")
	alien := channeltest.New(t, "prod").Config(t, channel.RoleCell, "a")
	junk := write(t, t.TempDir()+"/junk", []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"))
	bads := map[string]func(*channel.Config){
		"no CA":               func(c *channel.Config) { c.CAFile = "" },
		"no certificate":      func(c *channel.Config) { c.CertFile = "" },
		"no key":              func(c *channel.Config) { c.KeyFile = "" },
		"missing CA":          func(c *channel.Config) { c.CAFile += ".x" },
		"missing key":         func(c *channel.Config) { c.KeyFile += ".x" },
		"missing list":        func(c *channel.Config) { c.RevokedFile += ".x" },
		"another's key":       func(c *channel.Config) { c.KeyFile = b.KeyFile },
		"another CA":          func(c *channel.Config) { c.CAFile = alien.CAFile },
		"a leaf as CA":        func(c *channel.Config) { c.CAFile = c.CertFile },
		"key as CA":           func(c *channel.Config) { c.CAFile = c.KeyFile },
		"junk CA":             func(c *channel.Config) { c.CAFile = junk },
		"somebody else":       func(c *channel.Config) { c.Self = channel.Identity{Fleet: "prod", Role: channel.RoleCell, Name: "b"} },
		"malformed self":      func(c *channel.Config) { c.Self = channel.Identity{Fleet: "prod"} },
		"CA as identity":      func(c *channel.Config) { c.CertFile = c.CAFile },
		"a list that is none": func(c *channel.Config) { c.RevokedFile = c.CertFile },
	}
	for name, edit := range bads {
		cfg := good
		edit(&cfg)
		if _, err := channel.Open(cfg); err == nil {
			t.Errorf("%s: opened", name)
		} else if !errors.Is(err, cells.ErrInvalid) && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := channel.Open(good); err != nil {
		t.Fatal(err)
	}
}

func TestReloadIsBounded(t *testing.T) {
	f := channeltest.New(t, "prod")
	cfg := f.Config(t, channel.RoleCell, "a")
	cfg.ReloadEvery = time.Hour
	a := open(t, cfg)
	before := a.NotAfter()
	if _, err := f.Renew(cfg.CertFile, cfg.KeyFile, channel.Identity{}, time.Hour); err != nil {
		t.Fatal(err)
	}
	if !a.NotAfter().Equal(before) {
		t.Fatal("looked at the files before its time")
	}
	if err := a.Reload(); err != nil || a.NotAfter().Equal(before) {
		t.Fatalf("Reload: %v, still %s", err, before)
	}
}

func gather(t testing.TB, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c)
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range fams {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				if l.GetName() != "identity" {
					name += " " + l.GetValue()
				}
			}
			out[name] = value(m)
		}
	}
	return out
}

func value(m *dto.Metric) float64 {
	if m.Gauge != nil {
		return m.Gauge.GetValue()
	}
	return m.Counter.GetValue()
}
