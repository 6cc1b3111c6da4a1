// SPDX-License-Identifier: Apache-2.0

package channel

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

func TestParseIdentity(t *testing.T) {
	good := map[string]Identity{
		"cell://prod/cell/a":                       {"prod", RoleCell, "a"},
		"cell://f-1/edge/edge-7":                   {"f-1", RoleEdge, "edge-7"},
		"cell://x/directory/main":                  {"x", RoleDirectory, "main"},
		"cell://x/operator/alice":                  {"x", RoleOperator, "alice"},
		"cell://x/cell/" + strings.Repeat("a", 32): {"x", RoleCell, strings.Repeat("a", 32)},
	}
	for s, want := range good {
		got, err := ParseIdentity(s)
		if err != nil || got != want || got.String() != s {
			t.Errorf("ParseIdentity(%q) = %v, %v; want %v", s, got, err, want)
		}
	}
	bad := []string{
		"", "cell:", "cell://", "cell:///cell/a", "cell://prod", "cell://prod/cell", "cell://prod/cell/", "cell://prod//a",
		"cell://prod/cell/a/", "cell://prod/cell/a/b", "cell://prod/cell/a?x", "cell://prod/cell/a#x", "cell://prod/cell/a%62",
		"cell://u@prod/cell/a", "cell://u:p@prod/cell/a", "cell://prod:443/cell/a", "CELL://prod/cell/a", "cell://Prod/cell/a",
		"cell://prod/Cell/a", "cell://prod/cell/A", "cell://prod/root/a", "spiffe://prod/cell/a", "https://prod/cell/a",
		" cell://prod/cell/a", "cell://prod/cell/a ", "cell://prod/cell/a\x00", "cell://prod/cell/a\n", "cell:/prod/cell/a",
		"cell://prod/cell/..", "cell://prod/cell/" + strings.Repeat("a", 33), "cell://[::1]/cell/a", "cell://pröd/cell/a",
		"cell://prod\\cell\\a", "cell://prod/cell/a;b", "cell://" + strings.Repeat("a", 1<<20),
	}
	for _, s := range bad {
		if id, err := ParseIdentity(s); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("ParseIdentity(%.60q) = %v, %v; want ErrInvalid", s, id, err)
		}
	}
}

func FuzzParseIdentity(f *testing.F) {
	for _, s := range []string{"cell://prod/cell/a", "cell://u@prod/cell/a", "cell://prod/edge/", "cell://p/operator/x?y#z", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseIdentity(s)
		if err != nil {
			if !errors.Is(err, cells.ErrInvalid) || id != (Identity{}) {
				t.Fatalf("ParseIdentity(%q) = %v, %v", s, id, err)
			}
			return
		}
		// What is accepted is exactly what is written, and a general URL parser
		// sees the same three parts and nothing else.
		u, err := url.Parse(s)
		if id.String() != s || id.Validate() != nil || err != nil {
			t.Fatalf("ParseIdentity(%q) = %v", s, id)
		}
		if u.Scheme != "cell" || u.Host != id.Fleet || u.Path != "/"+string(id.Role)+"/"+id.Name ||
			u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || u.RawPath != "" {
			t.Fatalf("ParseIdentity(%q) = %v, a URL parser sees %#v", s, id, u)
		}
	})
}

func sanOf(t testing.TB, names ...asn1.RawValue) []byte {
	t.Helper()
	b, err := asn1.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func uriName(s string) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tagURI, Bytes: []byte(s)}
}

func TestParseSAN(t *testing.T) {
	const a = "cell://prod/cell/a"
	if got, err := parseSAN(sanOf(t, uriName(a))); err != nil || got != a {
		t.Fatalf("one URI: %q, %v", got, err)
	}
	other := asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: []byte{0x06, 0x01, 0x2a}}
	dns := asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 2, Bytes: []byte("a.example")}
	bad := map[string][]byte{
		"none":             sanOf(t),
		"two URIs":         sanOf(t, uriName(a), uriName(a)),
		"URI and DNS":      sanOf(t, uriName(a), dns),
		"DNS and URI":      sanOf(t, dns, uriName(a)),
		"URI and other":    sanOf(t, uriName(a), other),
		"DNS":              sanOf(t, dns),
		"other":            sanOf(t, other),
		"compound URI":     sanOf(t, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tagURI, IsCompound: true, Bytes: []byte{0x16, 1, 'a'}}),
		"application URI":  sanOf(t, asn1.RawValue{Class: asn1.ClassApplication, Tag: tagURI, Bytes: []byte(a)}),
		"trailing":         append(sanOf(t, uriName(a)), 0),
		"trailing inside":  {0x30, 0x04, 0x86, 0x01, 'a', 0x86},
		"truncated":        sanOf(t, uriName(a))[:10],
		"not a sequence":   {0x86, 0x01, 'a'},
		"empty":            nil,
		"indefinite":       {0x30, 0x80, 0x86, 0x01, 'a', 0, 0},
		"a set":            {0x31, 0x03, 0x86, 0x01, 'a'},
		"length too large": {0x30, 0x84, 0xff, 0xff, 0xff, 0xff, 0x86},
	}
	for name, der := range bad {
		if got, err := parseSAN(der); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %q, %v; want ErrInvalid", name, got, err)
		}
	}
}

func FuzzSAN(f *testing.F) {
	const a = "cell://prod/cell/a"
	f.Add(sanOf(f, uriName(a)))
	f.Add(sanOf(f, uriName(a), uriName(a)))
	f.Add([]byte{0x30, 0x04, 0x86, 0x01, 'a', 0x86})
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		uri, err := parseSAN(der)
		if err != nil {
			if !errors.Is(err, cells.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		id, err := ParseIdentity(uri)
		if err != nil {
			return
		}
		// The standard library, which reads the whole certificate, agrees that this
		// is the only name.
		tmpl := &x509.Certificate{
			SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0),
			ExtraExtensions: []pkix.Extension{{Id: oidSAN, Value: der}},
		}
		raw, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(raw)
		if err != nil {
			t.Fatalf("we read %v, the standard library refuses the certificate: %v", id, err)
		}
		if len(cert.URIs) != 1 || cert.URIs[0].String() != uri || len(cert.DNSNames)+len(cert.EmailAddresses)+len(cert.IPAddresses) != 0 {
			t.Fatalf("we read %v, the standard library %v %v", id, cert.URIs, cert.DNSNames)
		}
	})
}

func TestSerials(t *testing.T) {
	n, err := ParseSerial("0A:ff:10")
	if err != nil || FormatSerial(n) != "aff10" {
		t.Fatalf("%v %v", n, err)
	}
	for _, s := range []string{"", "0", "-1", "0x1", "zz", ":", strings.Repeat("f", 41), "1 2", "+1", "1_0"} {
		if _, err := ParseSerial(s); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("ParseSerial(%q): %v", s, err)
		}
	}
	l, err := ParseRevoked([]byte("# head\n\n aff10 # lost\r\nbb\n"))
	if err != nil || len(l) != 2 || FormatSerial(l[0]) != "aff10" || FormatSerial(l[1]) != "bb" {
		t.Fatalf("%v %v", l, err)
	}
	if _, err := ParseRevoked([]byte("aa\nnonsense\n")); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "line 2") {
		t.Fatalf("malformed list: %v", err)
	}
}
