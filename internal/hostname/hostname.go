// SPDX-License-Identifier: Apache-2.0

package hostname

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/net/idna"
)

// MaxBytes bounds what [Normalize] looks at, and what it returns.
const MaxBytes = 260

// ErrInvalid says that a string is no host. The errors of [Normalize] wrap it.
var ErrInvalid = errors.New("not a host")

// profile is that of looking names up: mapped, checked, and with the lengths of DNS.
var profile = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.StrictDomainName(true), idna.VerifyDNSLength(true), idna.Transitional(false))

// Normalize returns the host, with its port if that is not 80 or 443: names in lower
// case and as ASCII (IDNA 2008 with the mapping of UTS 46), without a final dot;
// IPv6 addresses in brackets and in their shortest form. What it returns it returns
// again when it is given that. The error wraps [ErrInvalid].
func Normalize(host string) (string, error) {
	name, port, err := split(host)
	if err != nil {
		return "", err
	}
	if port == "80" || port == "443" {
		port = ""
	}
	if strings.HasPrefix(name, "[") {
		name, err = bracketed(name)
	} else {
		name, err = named(name)
	}
	if err != nil {
		return "", err
	}
	if port != "" {
		name += ":" + port
	}
	return name, nil
}

// WithoutPort returns a normal host's name or address, and its port, "" if it has none.
func WithoutPort(normal string) (name, port string) {
	if i := strings.LastIndexByte(normal, ':'); i > strings.LastIndexByte(normal, ']') {
		return normal[:i], normal[i+1:]
	}
	return normal, ""
}

func invalid(host, why string) error { return fmt.Errorf("%w: %.80q: %s", ErrInvalid, host, why) }

// split parts a host from its port. The name keeps its brackets.
func split(host string) (name, port string, err error) {
	switch {
	case host == "":
		return "", "", invalid(host, "it is empty")
	case len(host) > MaxBytes:
		return "", "", invalid(host, "it is too long")
	}
	rest := ""
	if host[0] == '[' {
		end := strings.IndexByte(host, ']')
		if end < 0 {
			return "", "", invalid(host, "a bracket is not closed")
		}
		name, rest = host[:end+1], host[end+1:]
	} else if i := strings.IndexByte(host, ':'); i >= 0 {
		name, rest = host[:i], host[i:]
	} else {
		name = host
	}
	if rest == "" {
		return name, "", nil
	}
	if rest[0] != ':' {
		return "", "", invalid(host, "something follows the address")
	}
	port = rest[1:]
	if len(port) > 5 || strings.HasPrefix(port, "0") {
		return "", "", invalid(host, "the port is malformed")
	}
	n := 0
	for _, c := range []byte(port) {
		if c < '0' || c > '9' {
			return "", "", invalid(host, "the port is malformed")
		}
		n = 10*n + int(c-'0')
	}
	if n > 65535 {
		return "", "", invalid(host, "the port is malformed")
	}
	return name, port, nil
}

func bracketed(name string) (string, error) {
	inner := name[1 : len(name)-1]
	a, err := netip.ParseAddr(inner)
	switch {
	case err != nil || !a.Is6():
		return "", invalid(name, "it is no IPv6 address")
	case a.Zone() != "":
		return "", invalid(name, "a zone means nothing to another machine")
	}
	return "[" + a.String() + "]", nil
}

func named(name string) (string, error) {
	ascii, err := profile.ToASCII(name)
	if err == nil && strings.HasSuffix(ascii, ".") {
		// The lengths were checked with the dot.
		ascii, err = profile.ToASCII(strings.TrimSuffix(ascii, "."))
	}
	if err != nil {
		return "", invalid(name, err.Error())
	}
	if ascii == "" || len(ascii) > 253 || strings.HasSuffix(ascii, ".") {
		return "", invalid(name, "a label is empty")
	}
	labels := strings.Split(ascii, ".")
	for _, l := range labels {
		if l == "" {
			return "", invalid(name, "a label is empty")
		}
		for _, c := range []byte(l) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return "", invalid(name, "a character does not belong into a name")
			}
		}
		if rest, ok := strings.CutPrefix(l, "xn--"); ok {
			// What is encoded must need it, and be encoded as anybody would.
			u, err := profile.ToUnicode(l)
			if err != nil || rest == "" || isASCII(u) {
				return "", invalid(name, "a label is not well encoded")
			}
			if back, err := profile.ToASCII(u); err != nil || back != l {
				return "", invalid(name, "a label is not well encoded")
			}
		}
	}
	if last := labels[len(labels)-1]; numeric(last) {
		a, err := netip.ParseAddr(ascii)
		if err != nil || !a.Is4() {
			return "", invalid(name, "it is no IPv4 address")
		}
		return a.String(), nil
	}
	return ascii, nil
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

// numeric reports whether a last label makes some parser take the whole for an IPv4
// address: 1, 0x7f, 017.
func numeric(label string) bool {
	digits := label
	if rest, ok := strings.CutPrefix(label, "0x"); ok {
		for _, c := range []byte(rest) {
			if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
				return false
			}
		}
		return true
	}
	for _, c := range []byte(digits) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
