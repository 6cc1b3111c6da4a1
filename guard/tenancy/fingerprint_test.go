// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
)

func full() Config {
	return Config{PublicBaseURL: "https://Cell.Example.com:443", OIDCIssuer: "https://idp.example", OIDCClientID: "c1", SCIM: true,
		BearerIssuers: []string{"b", "a", "b"}, EndUserIssuers: []EndUserIssuer{{"https://users", []string{"u-*", "v"}}},
		Audiences: map[string]string{"a": "svc"}, Tenants: []cells.TenantID{"acme"}, DeploymentID: "d1", Bucket: "bk", Prefix: "/x/y/"}
}

func TestConfigFingerprint(t *testing.T) {
	f, err := full().Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"schema":3,"fields":{"audiences":["[\"a\",\"svc\"]"],"bucket":["bk"],"deployment_id":["d1"],"hosts":["cell.example.com"],"issuers":["a","b","https://users"],` +
		`"oidc":["[\"https://idp.example\",\"c1\"]"],"patterns":["u-*","v"],"prefix":["x/y"],"scim":["on"],"tenants":["acme"]}}`
	if got := string(f.Encode()); got != want {
		t.Fatalf("encoding\n%s\nwant\n%s", got, want)
	}
	// Everything that decides what a cell accepts changes the value; nothing else does.
	base := f.Sum()
	for name, change := range map[string]func(*Config){
		"host":        func(c *Config) { c.PublicBaseURL = "https://other.example" },
		"issuer host": func(c *Config) { c.Issuer = "https://sso.example" },
		"oidc issuer": func(c *Config) { c.OIDCIssuer += "/x" },
		"oidc client": func(c *Config) { c.OIDCClientID = "c2" },
		"scim":        func(c *Config) { c.SCIM = false },
		"bearer":      func(c *Config) { c.BearerIssuers = c.BearerIssuers[1:2] },
		"end users":   func(c *Config) { c.EndUserIssuers = nil },
		"pattern":     func(c *Config) { c.EndUserIssuers[0].Tenants = []string{"u-*"} },
		"tenants":     func(c *Config) { c.Tenants = nil },
		"audience":    func(c *Config) { c.Audiences = map[string]string{"a": "other"} },
		"deployment":  func(c *Config) { c.DeploymentID = "d2" },
		"bucket":      func(c *Config) { c.Bucket = "bk2" },
		"prefix":      func(c *Config) { c.Prefix = "x" },
	} {
		c := full()
		change(&c)
		g, err := c.Fingerprint()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if g.Sum() == base || g.Matches(f) {
			t.Errorf("%s changes nothing", name)
		}
	}
	same := full()
	same.PublicBaseURL, same.Issuer, same.Prefix = "http://cell.example.com./path", "https://CELL.example.com", "x/y"
	same.BearerIssuers = []string{"a", "b"}
	if g, err := same.Fingerprint(); err != nil || !g.Equal(f) {
		t.Errorf("another spelling is another value: %s, %v", g.Encode(), err)
	}
	if f.Value(FieldBucket) != "bk" || f.Value(FieldIssuers) != "" || len(f.Get("later")) != 0 {
		t.Error("values of fields")
	}
}

func TestConfigIsRefused(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"scheme":        func(c *Config) { c.PublicBaseURL = "ftp://x" },
		"userinfo":      func(c *Config) { c.PublicBaseURL = "https://u@x" },
		"no host":       func(c *Config) { c.Issuer = "https:///x" },
		"half a client": func(c *Config) { c.OIDCClientID = "" },
		"audience":      func(c *Config) { c.Audiences["nobody"] = "svc" },
		"no audience":   func(c *Config) { c.Audiences["a"] = "" },
		"empty issuer":  func(c *Config) { c.BearerIssuers = []string{""} },
		"pattern":       func(c *Config) { c.EndUserIssuers[0].Tenants = []string{"a*b"} },
		"everybody":     func(c *Config) { c.EndUserIssuers[0].Tenants = []string{"*"} },
		"tenant":        func(c *Config) { c.Tenants = []cells.TenantID{"a b"} },
		"dash tenant":   func(c *Config) { c.Tenants = []cells.TenantID{"-"} },
		"prefix alone":  func(c *Config) { c.Bucket = "" },
		"dotted prefix": func(c *Config) { c.Prefix = "a/../b" },
		"double slash":  func(c *Config) { c.Prefix = "a//b" },
	} {
		c := full()
		change(&c)
		if _, err := c.Fingerprint(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEncodingIsStableAndStrict(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := Fingerprint{Schema: rapid.IntRange(1, 9).Draw(t, "schema"),
			Fields: rapid.MapOfN(rapid.StringMatching(`[a-z_]{1,8}`), rapid.SliceOfN(rapid.String(), 0, 4), 0, 5).Draw(t, "fields")}
		enc := f.Encode()
		g, err := DecodeFingerprint(enc)
		if err != nil {
			t.Fatalf("%s: %v", enc, err)
		}
		if !g.Equal(f) || !bytes.Equal(g.Encode(), enc) || g.Sum() != f.Sum() || !f.Matches(g) {
			t.Fatalf("%s became %s", enc, g.Encode())
		}
	})
	for _, bad := range []string{``, `null`, `[]`, `{}`, `{"schema":1}`, `{"schema":0,"fields":{}}`, `{"schema":1,"fields":{},"more":1}`,
		`{"schema":1,"fields":{}}{}`, `{"schema":1,"fields":{"":[]}}`, `{"schema":"1","fields":{}}`, `{"schema":1,"fields":{"a":"b"}}`,
		`{"schema":1,"fields":{"a":["` + strings.Repeat("x", maxFingerprintEncoding) + `"]}}`} {
		if _, err := DecodeFingerprint([]byte(bad)); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%.60s: %v", bad, err)
		}
	}
}

func FuzzDecodeFingerprint(f *testing.F) {
	v, _ := full().Fingerprint()
	f.Add(v.Encode())
	f.Add([]byte(`{"schema":1,"fields":{"a":null}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeFingerprint(b)
		if err != nil {
			return
		}
		w, err := DecodeFingerprint(v.Encode())
		if err != nil || !w.Equal(v) {
			t.Fatalf("%q: %v, %v", b, v, err)
		}
	})
}
