// SPDX-License-Identifier: Apache-2.0

package fastpath

import "bytes"

// Field is one header line. Its bytes belong to the connection's buffer.
type Field struct{ Name, Value []byte }

// maxFields bounds the header lines of what is taken.
const maxFields = 64

// Request is a request that can be taken. Its bytes belong to the connection's buffer
// and are gone with the answer.
type Request struct {
	Method, Target, Path, Host []byte
	Fields                     []Field // without those that were read here: Host, Connection, Content-Length
	Close                      bool    // no other request follows on the connection
	Length                     int     // of the body
}

// Header returns the value of a header by its name in lower case, and how often it is
// there.
func (r *Request) Header(lower string) (value []byte, n int) {
	for i := range r.Fields {
		if equalLower(r.Fields[i].Name, lower) {
			if n == 0 {
				value = r.Fields[i].Value
			}
			n++
		}
	}
	return value, n
}

// equalLower compares a name with one in lower case.
func equalLower(name []byte, lower string) bool {
	if len(name) != len(lower) {
		return false
	}
	for i, c := range name {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

func hasPrefixLower(name []byte, lower string) bool {
	return len(name) >= len(lower) && equalLower(name[:len(lower)], lower)
}

// token marks the characters of RFC 9110's tokens; value those of field values; plain
// those of paths that mean the same to every server.
var token, value, plain [256]bool

func init() {
	for c := range 256 {
		alnum := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		token[c] = alnum || bytes.IndexByte([]byte("!#$%&'*+-.^_`|~"), byte(c)) >= 0
		value[c] = c == '\t' || c >= ' ' && c != 0x7f
		plain[c] = alnum || bytes.IndexByte([]byte("-._~!$&'()*+,=:@/"), byte(c)) >= 0
	}
}

// lines splits a head, which ends in an empty line, and checks every line but the first.
// It returns the first line and the fields.
func lines(head []byte, into []Field) (first []byte, fields []Field, ok bool) {
	end := bytes.IndexByte(head, '\n')
	if end < 1 || head[end-1] != '\r' {
		return nil, nil, false
	}
	first, head = head[:end-1], head[end+1:]
	fields = into[:0]
	for {
		end = bytes.IndexByte(head, '\n')
		if end < 1 || head[end-1] != '\r' {
			return nil, nil, false
		}
		line := head[:end-1]
		head = head[end+1:]
		if len(line) == 0 {
			return first, fields, len(head) == 0
		}
		if len(fields) == cap(into) {
			return nil, nil, false
		}
		colon := bytes.IndexByte(line, ':')
		if colon < 1 || colon > 64 {
			return nil, nil, false
		}
		for _, c := range line[:colon] {
			if !token[c] {
				return nil, nil, false
			}
		}
		v := line[colon+1:]
		for _, c := range v {
			if !value[c] {
				return nil, nil, false
			}
		}
		fields = append(fields, Field{line[:colon], bytes.Trim(v, " \t")})
	}
}

// digits reads a length; ok is false for anything but 1 to 15 digits.
func digits(b []byte) (n int, ok bool) {
	if len(b) == 0 || len(b) > 15 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return n, true
}

var methods = [...]string{"GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS"}

// parse reads a head, which ends in an empty line, with the fields in a slice of the
// caller's. False means: not to be taken.
func (r *Request) parse(head []byte, into []Field) bool {
	*r = Request{}
	first, fields, ok := lines(head, into)
	if !ok || !r.line(first) {
		return false
	}
	kept := fields[:0]
	hosts, lengths, connections := 0, 0, 0
	for _, f := range fields {
		n := f.Name
		switch n[0] | 0x20 {
		case 'h':
			switch {
			case equalLower(n, "host"):
				hosts++
				r.Host = f.Value
				continue
			case equalLower(n, "http2-settings"):
				return false
			}
		case 'c':
			switch {
			case equalLower(n, "content-length"):
				lengths++
				if r.Length, ok = digits(f.Value); !ok {
					return false
				}
				continue
			case equalLower(n, "connection"):
				connections++
				switch {
				case equalLower(f.Value, "close"):
					r.Close = true
				case !equalLower(f.Value, "keep-alive"):
					return false
				}
				continue
			}
		case 't':
			if equalLower(n, "te") || hasPrefixLower(n, "transfer") || hasPrefixLower(n, "trailer") {
				return false
			}
		case 'u':
			if equalLower(n, "upgrade") {
				return false
			}
		case 'e':
			if equalLower(n, "expect") {
				return false
			}
		case 'k':
			if equalLower(n, "keep-alive") {
				return false
			}
		case 'p':
			if hasPrefixLower(n, "proxy") {
				return false
			}
		case 'a':
			if equalLower(n, "accept") && bytes.Contains(f.Value, []byte("event-stream")) {
				return false
			}
		}
		if odd(n) {
			return false
		}
		kept = append(kept, f)
	}
	r.Fields = kept
	return hosts == 1 && lengths <= 1 && connections <= 1 && plainHost(r.Host)
}

// odd reports whether some server could take the name for one of those that speak of
// the connection or the message's length: with other characters for the hyphen.
func odd(name []byte) bool {
	for _, lower := range [...]string{"content-length", "transfer-encoding"} {
		if len(name) != len(lower) {
			continue
		}
		same := true
		for i, c := range name {
			if l := lower[i]; l != '-' && c|0x20 != l {
				same = false
				break
			}
		}
		if same {
			return true
		}
	}
	return false
}

// line reads the request line.
func (r *Request) line(b []byte) bool {
	sp := bytes.IndexByte(b, ' ')
	if sp < 1 {
		return false
	}
	r.Method = b[:sp]
	known := false
	for _, m := range methods {
		known = known || string(r.Method) == m
	}
	rest, ok := bytes.CutSuffix(b[sp+1:], []byte(" HTTP/1.1"))
	if !known || !ok || len(rest) == 0 || rest[0] != '/' {
		return false
	}
	r.Target, r.Path = rest, rest
	if q := bytes.IndexByte(rest, '?'); q >= 0 {
		r.Path = rest[:q]
		for _, c := range rest[q:] {
			if c <= ' ' || c >= 0x7f || c == '#' {
				return false
			}
		}
	}
	before := byte(0)
	for _, c := range r.Path {
		if !plain[c] || before == '/' && (c == '/' || c == '.') {
			return false
		}
		before = c
	}
	switch string(r.Path) {
	case "/livez", "/readyz":
		return false
	}
	return !hasPrefixLower(r.Path, "/cells")
}

// plainHost: a name or an IPv4 address, with or without a port.
func plainHost(h []byte) bool {
	name, port, has := bytes.Cut(h, []byte(":"))
	if len(name) == 0 || len(name) > 253 {
		return false
	}
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.' {
			return false
		}
	}
	if !has {
		return true
	}
	number, ok := digits(port)
	return ok && len(port) <= 5 && number > 0 && number < 1<<16
}
