// SPDX-License-Identifier: Apache-2.0

package hostname_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/internal/hostname"
)

var same = map[string]string{
	"example.com":                    "example.com",
	"EXAMPLE.Com":                    "example.com",
	"example.com.":                   "example.com",
	"example.com.:443":               "example.com",
	"example.com:80":                 "example.com",
	"example.com:443":                "example.com",
	"example.com:":                   "example.com",
	"example.com:8443":               "example.com:8443",
	"localhost":                      "localhost",
	"b\u00fccher.example":            "xn--bcher-kva.example",
	"B\u00dcCHER.example":            "xn--bcher-kva.example",
	"bu\u0308cher.example":           "xn--bcher-kva.example",
	"xn--bcher-kva.example":          "xn--bcher-kva.example",
	"XN--BCHER-KVA.example":          "xn--bcher-kva.example",
	"b\u00fccher\u3002example":       "xn--bcher-kva.example",
	"example.com\u3002":              "example.com",
	"\uff42.example.com":             "b.example.com", // a full-width b is a b
	"fa\u00df.example":               "xn--fa-hia.example",
	"\u0430.example.com":             "xn--80a.example.com", // a Cyrillic a is another letter
	"127.0.0.1":                      "127.0.0.1",
	"127.0.0.1:8080":                 "127.0.0.1:8080",
	"127.0.0.1.":                     "127.0.0.1",
	"[::1]":                          "[::1]",
	"[::1]:443":                      "[::1]",
	"[::1]:8080":                     "[::1]:8080",
	"[0:0:0:0:0:0:0:1]":              "[::1]",
	"[2001:DB8::0001]":               "[2001:db8::1]",
	"[::ffff:1.2.3.4]":               "[::ffff:1.2.3.4]",
	"[::ffff:102:304]":               "[::ffff:1.2.3.4]",
	"a--b.example":                   "a--b.example",
	"1.example":                      "1.example",
	"0x.example":                     "0x.example",
	strings.Repeat("a", 63) + ".com": strings.Repeat("a", 63) + ".com",
}

var refused = []string{
	"", ".", "..", ":80", "example..com", ".example.com", "example.com..", "exa mple.com", " example.com", "example.com ",
	"user@example.com", "user:pass@example.com", "example.com@evil.com", "example.com/path", "example.com?x", "example.com#x", "example.com\\evil",
	"example.com:80:80", "example.com:http", "example.com:0", "example.com:080", "example.com:65536", "example.com:-1", "example.com:\uff18\uff10",
	"example\uff1acom", "ex%61mple.com", "b%2eexample.com", "example.com%00", "exam\x00ple.com", "example.com\n", "example.com,evil.com",
	"::1", "::1:80", "fe80::1", "[::1", "[::1]x", "[::1]x:80", "::1]", "[]", "[127.0.0.1]", "[example.com]", "[fe80::1%eth0]", "[fe80::1%25eth0]", "[::1%]", "[v1.x]",
	"127.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "127.0.0.0x1", "0177.0.0.1", "127.0.0.01", "127.0.0.256", "127.0.0.1.1", "1.2.3", "example.1",
	"a_b.example.com", "-a.example.com", "a-.example.com", "*.example.com", "xn--", "xn--.example", "xn--a.example", "xn--abc-.example", "xn--example-.com",
	"xn--80a\u0430.example", "xn--bcher-kvA\u200d.example.x y", "\u200b\u2060", "a\u200db.example",
	strings.Repeat("a", 64) + ".com", strings.Repeat("a.", 127) + "com", strings.Repeat("a", 300),
	"\xff.example.com", "example.com\xc3",
}

func TestNormalize(t *testing.T) {
	for in, want := range same {
		if got, err := hostname.Normalize(in); err != nil || got != want {
			t.Errorf("%q: %q %v, want %q", in, got, err, want)
		}
	}
	for _, in := range refused {
		if got, err := hostname.Normalize(in); err == nil || !errors.Is(err, hostname.ErrInvalid) {
			t.Errorf("%q became %q, %v", in, got, err)
		}
	}
}

func TestWithoutPort(t *testing.T) {
	for in, want := range map[string][2]string{
		"example.com": {"example.com", ""}, "example.com:81": {"example.com", "81"}, "[::1]": {"[::1]", ""}, "[::1]:81": {"[::1]", "81"},
	} {
		if n, p := hostname.WithoutPort(in); n != want[0] || p != want[1] {
			t.Errorf("%s: %s, %s", in, n, p)
		}
	}
}

// Whatever comes in: what comes out is plain, short, and stays what it is.
func FuzzNormalize(f *testing.F) {
	for in := range same {
		f.Add(in)
	}
	for _, in := range refused {
		f.Add(in)
	}
	f.Fuzz(func(t *testing.T, in string) {
		out, err := hostname.Normalize(in)
		if err != nil {
			if out != "" || !errors.Is(err, hostname.ErrInvalid) {
				t.Fatalf("%q: %q, %v", in, out, err)
			}
			return
		}
		if out == "" || len(out) > hostname.MaxBytes {
			t.Fatalf("%q became %q", in, out)
		}
		for i, c := range []byte(out) {
			plain := c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == ':'
			if !plain && !(out[0] == '[' && (i == 0 || c == ']')) {
				t.Fatalf("%q became %q", in, out)
			}
		}
		name, port := hostname.WithoutPort(out)
		if strings.HasSuffix(name, ".") || strings.HasPrefix(name, ".") || strings.Contains(name, "..") || port == "80" || port == "443" || strings.HasPrefix(port, "0") {
			t.Fatalf("%q became %q", in, out)
		}
		if again, err := hostname.Normalize(out); err != nil || again != out {
			t.Fatalf("%q became %q, and that %q, %v", in, out, again, err)
		}
		if upper, err := hostname.Normalize(strings.ToUpper(out)); err != nil || upper != out {
			t.Fatalf("%q became %q, and its upper case %q, %v", in, out, upper, err)
		}
	})
}
