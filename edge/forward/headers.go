// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bytes"
	"net/http"
	"net/url"
	"strings"

	"github.com/cloister-dev/cloister/internal/headername"
)

// Passes reports whether a client's header is passed on: it is not the platform's in
// any spelling ([headername.Platform]), and claims nothing about the hops before. It makes no garbage for names of 64 bytes.
func Passes[S string | []byte](name S) bool {
	if len(name) == 0 {
		return true
	}
	switch name[0] | 0x20 { // cheaply: most names are none of those
	case 'c', 'x', 'f':
	default:
		return true
	}
	var buf [64]byte
	f := headername.Fold(buf[:0], name)
	switch string(f) {
	case "forwarded", "x-forwarded", "x-original-forwarded-for", "x-real-ip", "x-client-ip", "x-cluster-client-ip",
		"x-host", "x-original-host", "x-http-host-override", "x-original-url", "x-rewrite-url":
		return false
	}
	return !bytes.HasPrefix(f, []byte("cell-")) && !bytes.HasPrefix(f, []byte("x-forwarded-"))
}

// CleanRequest drops from a client's headers everything that is the platform's to
// say. It may be used for trailers as well.
func CleanRequest(h http.Header) {
	for name := range h {
		if !Passes(name) {
			delete(h, name)
		}
	}
}

// SetForwarded sets X-Forwarded-For, -Host and -Proto to the edge's own view of the
// request, and -Prefix when a prefix was cut from its path.
func SetForwarded(h http.Header, in *http.Request, from Client, prefix string) {
	if from.Addr != "" {
		h["X-Forwarded-For"] = []string{from.Addr}
	}
	h["X-Forwarded-Host"] = []string{in.Host}
	h["X-Forwarded-Proto"] = []string{from.Proto}
	if prefix != "" {
		h["X-Forwarded-Prefix"] = []string{prefix}
	}
}

// CleanAnswer drops from an answer what must not leave the fleet.
func CleanAnswer(h http.Header) { delete(h, "Cell-Admission") }

// SetPath gives out the raw path and query of in, without the raw prefix strip.
// What is sent is what the client sent, byte for byte: also characters that
// net/url would encode, and queries that it would not parse.
func SetPath(out, in *url.URL, requestURI, strip string) {
	out.RawQuery, out.ForceQuery = in.RawQuery, in.ForceQuery
	out.Path, out.RawPath, out.Opaque = in.Path, in.RawPath, ""
	if strip != "" {
		raw := strings.TrimPrefix(in.EscapedPath(), strip)
		if raw == "" {
			raw = "/"
		}
		out.RawPath = raw
		if p, err := url.PathUnescape(raw); err == nil {
			out.Path = p
		}
		return
	}
	// A request line may hold what EscapedPath would encode. Opaque is sent as it is.
	raw, _, _ := strings.Cut(requestURI, "?")
	if strings.HasPrefix(raw, "/") && !strings.HasPrefix(raw, "//") && raw != in.EscapedPath() {
		out.Opaque = raw
	}
}

// Reserved reports whether a raw path is under /cells/, or is /cells itself, for
// any server that might read it: percent-encoded once or more, with repeated
// slashes, backslashes, dot segments, path parameters or other case.
func Reserved(raw string) bool {
	if len(raw) < len("/cells") {
		return false
	}
	path := raw
	for range 4 {
		if reservedDecoded(path) {
			return true
		}
		dec, err := url.PathUnescape(path)
		if err != nil {
			dec = lenient(path)
		}
		if dec == path {
			return false
		}
		path = dec
	}
	return reservedDecoded(path)
}

// lenient decodes what can be decoded.
func lenient(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if v, err := url.PathUnescape(s[i : i+3]); err == nil {
				b.WriteString(v)
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func reservedDecoded(path string) bool {
	depth := 0 // of the segments that remain before this one
	for _, seg := range strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\\' }) {
		if i := strings.IndexAny(seg, ";?#\x00"); i >= 0 {
			seg = seg[:i]
		}
		seg = strings.TrimFunc(seg, func(r rune) bool { return r <= ' ' || r == 0x7f })
		switch {
		case seg == "" || seg == ".":
		case seg == "..":
			depth = max(0, depth-1)
		case depth == 0 && strings.EqualFold(strings.TrimRight(seg, ". "), "cells"):
			return true
		default:
			depth++
		}
	}
	return false
}

// Climbs reports whether a raw path has a dot segment for any server that might read
// it, percent-encoded once or more.
func Climbs(raw string) bool {
	path := raw
	for range 4 {
		for _, seg := range strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\\' }) {
			seg, _, _ = strings.Cut(seg, ";")
			if seg == "." || seg == ".." {
				return true
			}
		}
		dec := lenient(path)
		if dec == path {
			return false
		}
		path = dec
	}
	return false
}
