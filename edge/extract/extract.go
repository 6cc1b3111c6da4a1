// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/cloister-dev/cloister/cells"
)

// Found is a tenant and how it was found.
type Found struct {
	Tenant cells.TenantID
	// Index is the extractor's place in the list, from 0.
	Index int
	// Kind is the extractor's kind (see [Spec.Kind]) and Rule what it was told to
	// look at, for people: `header X-Tenant`.
	Kind string
	Rule string
	// Verified: the tenant comes from a token whose signature was checked.
	Verified bool
	// StripHeader is a header that must not reach the cell, or "".
	StripHeader string
	// StripPath is the raw prefix that must be cut from the raw path, or "". What is
	// left is empty or begins with "/".
	StripPath string
}

// List is an ordered list of extractors. It never changes after [New], but for key sets
// whose files change, and is safe for concurrent use.
type List struct {
	rules    []rule
	hostOnly bool
	ways     string
}

// rule is one compiled extractor. find returns ok when it found a tenant that is
// not yet validated; a non-nil answer refuses the request at once; miss, if set,
// is what the request gets when nobody finds a tenant.
type rule struct {
	kind, text string
	find       func(r *http.Request) (f Found, ok bool, miss, refuse *cells.Answer)

	// For [List.Quick]: the header, in lower case, and whether it is kept from the cell;
	// the fixed tenant.
	header string
	strip  bool
	fixed  []byte
}

// New makes a list and reads the key sets that it names. Errors wrap
// [cells.ErrInvalid], or say which file could not be read.
func New(specs []Spec, opts ...Option) (*List, error) {
	o := options{log: slog.Default()}
	for _, opt := range opts {
		opt(&o)
	}
	if len(specs) == 0 || len(specs) > MaxSpecs {
		return nil, fmt.Errorf("%w: %d extractors, want 1 to %d", cells.ErrInvalid, len(specs), MaxSpecs)
	}
	l := &List{hostOnly: true}
	var ways []string
	for i := range specs {
		r, err := specs[i].compile(&o)
		if err != nil {
			return nil, fmt.Errorf("extractor %d: %w", i+1, err)
		}
		if r.kind != "host" {
			l.hostOnly = false
		}
		l.rules = append(l.rules, r)
		ways = append(ways, r.text)
	}
	l.ways = strings.Join(ways, ", ")
	return l, nil
}

// Rules lists the extractors in order, for people.
func (l *List) Rules() []string {
	out := make([]string, len(l.rules))
	for i, r := range l.rules {
		out[i] = r.text
	}
	return out
}

// Resolve returns the tenant of the request. The error is always a
// [*cells.Answer]: BAD_REQUEST, INVALID_TENANT, UNKNOWN_HOST or UNKNOWN_ISSUER.
func (l *List) Resolve(r *http.Request) (Found, error) {
	var miss *cells.Answer
	for i := range l.rules {
		f, ok, m, refuse := l.rules[i].find(r)
		if refuse != nil {
			return Found{}, refuse
		}
		if !ok {
			if miss == nil {
				miss = m
			}
			continue
		}
		f.Index, f.Kind, f.Rule = i, l.rules[i].kind, l.rules[i].text
		if err := f.Tenant.Validate(); err != nil {
			return f, &cells.Answer{Code: cells.CodeInvalidTenant, Detail: "named by " + f.Rule, Err: err}
		}
		return f, nil
	}
	switch {
	case miss != nil:
		return Found{}, miss
	case l.hostOnly:
		return Found{}, &cells.Answer{Code: cells.CodeUnknownHost, Detail: "this edge serves " + l.ways}
	}
	return Found{}, &cells.Answer{Code: cells.CodeBadRequest, Detail: "the request names no tenant; it can be named by " + l.ways}
}

// Option is an option of [New].
type Option func(*options)

type options struct{ log *slog.Logger }

// WithLog sets where key sets that cannot be read again are told; the default is
// slog.Default.
func WithLog(log *slog.Logger) Option { return func(o *options) { o.log = log } }

// compile makes the rule. It reads no files without options.
func (s *Spec) compile(o *options) (rule, error) {
	kind := s.Kind()
	if kind == "" {
		return rule{}, fmt.Errorf("%w: set exactly one of header, host, path, jwt, issuers, fixed", cells.ErrInvalid)
	}
	if s.Strip && kind != "header" && kind != "path" {
		return rule{}, fmt.Errorf("%w: strip applies to header and path, not to %s", cells.ErrInvalid, kind)
	}
	if s.Strict && kind != "host" && kind != "issuers" {
		return rule{}, fmt.Errorf("%w: strict applies to host and issuers, not to %s", cells.ErrInvalid, kind)
	}
	switch kind {
	case "header":
		return s.compileHeader()
	case "host":
		return s.compileHost()
	case "path":
		return s.compilePath()
	case "jwt":
		return s.JWT.compile(o)
	case "issuers":
		return s.compileIssuers()
	}
	if err := s.Fixed.Validate(); err != nil {
		return rule{}, err
	}
	tenant := s.Fixed
	return rule{kind: kind, text: "fixed " + string(tenant), fixed: []byte(tenant),
		find: func(*http.Request) (Found, bool, *cells.Answer, *cells.Answer) {
			return Found{Tenant: tenant}, true, nil, nil
		}}, nil
}

// headerName checks a header that a configuration names.
func headerName(name string) (string, error) {
	if len(name) > 64 || !httpguts.ValidHeaderFieldName(name) {
		return "", fmt.Errorf("%w: header %q is not a header name", cells.ErrInvalid, name)
	}
	canon := http.CanonicalHeaderKey(name)
	switch {
	case strings.HasPrefix(canon, "Cell-"):
		return "", fmt.Errorf("%w: header %s: clients' Cell-* headers are dropped", cells.ErrInvalid, canon)
	case canon == "Host":
		return "", fmt.Errorf("%w: header Host: use host", cells.ErrInvalid)
	case canon == "Connection" || canon == "Te" || canon == "Transfer-Encoding" || canon == "Upgrade" || canon == "Content-Length":
		return "", fmt.Errorf("%w: header %s describes the connection", cells.ErrInvalid, canon)
	}
	return canon, nil
}

// oneValue returns the only value of a header; an answer when there are more.
func oneValue(h http.Header, name string) (string, bool, *cells.Answer) {
	vv := h[name]
	if len(vv) == 0 {
		return "", false, nil
	}
	if len(vv) > 1 {
		return "", false, &cells.Answer{Code: cells.CodeBadRequest, Detail: fmt.Sprintf("%d %s headers, want one", len(vv), name)}
	}
	return vv[0], true, nil
}

func (s *Spec) compileHeader() (rule, error) {
	name, err := headerName(s.Header)
	if err != nil {
		return rule{}, err
	}
	strip := ""
	if s.Strip {
		strip = name
	}
	return rule{kind: "header", text: "header " + name, header: strings.ToLower(name), strip: s.Strip,
		find: func(r *http.Request) (Found, bool, *cells.Answer, *cells.Answer) {
			v, ok, refuse := oneValue(r.Header, name)
			return Found{Tenant: cells.TenantID(v), StripHeader: strip}, ok, nil, refuse
		}}, nil
}

const hole = "{tenant}"

func (s *Spec) compileHost() (rule, error) {
	pattern := strings.ToLower(s.Host)
	before, after, ok := strings.Cut(pattern, hole)
	bad := !ok || strings.Contains(after, hole) || len(pattern) > 253 || strings.HasSuffix(pattern, ".") || strings.HasPrefix(pattern, ".")
	for _, c := range before + after {
		bad = bad || (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.'
	}
	if bad || strings.Contains(pattern, "..") {
		return rule{}, fmt.Errorf("%w: host %q: want a host name with one %s and no port, as in %s.example.com", cells.ErrInvalid, s.Host, hole, hole)
	}
	text := "host " + pattern
	var refused *cells.Answer
	if s.Strict {
		refused = &cells.Answer{Code: cells.CodeUnknownHost, Detail: "this edge serves " + text}
	}
	return rule{kind: "host", text: text,
		find: func(r *http.Request) (Found, bool, *cells.Answer, *cells.Answer) {
			host := hostName(r.Host)
			if len(host) <= len(before)+len(after) || !strings.HasPrefix(host, before) || !strings.HasSuffix(host, after) {
				return Found{}, false, nil, refused
			}
			label := host[len(before) : len(host)-len(after)]
			if strings.Contains(label, ".") {
				return Found{}, false, nil, refused
			}
			return Found{Tenant: cells.TenantID(label)}, true, nil, nil
		}}, nil
}

// hostName returns the host without its port and final dot, in lower case; "" for
// an address.
func hostName(hostport string) string {
	host := hostport
	if strings.HasPrefix(host, "[") {
		return ""
	}
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		h, _, err := net.SplitHostPort(host)
		if err != nil {
			return ""
		}
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if _, err := netip.ParseAddr(host); err == nil {
		return ""
	}
	return host
}

func (s *Spec) compilePath() (rule, error) {
	pattern := strings.TrimSuffix(s.Path, "...")
	pattern = strings.TrimSuffix(pattern, "/")
	bad := !strings.HasPrefix(pattern, "/") || len(pattern) > 512 || strings.Count(pattern, hole) != 1 || !strings.HasSuffix(pattern, "/"+hole)
	segs := strings.Split(strings.TrimSuffix(strings.TrimPrefix(pattern, "/"), hole), "/")
	segs = segs[:len(segs)-1]
	for _, seg := range segs {
		bad = bad || seg == "" || seg == "." || seg == ".." || strings.ContainsAny(seg, "%?#;\\{}") || strings.IndexFunc(seg, func(c rune) bool { return c <= ' ' || c > '~' }) >= 0
	}
	if bad {
		return rule{}, fmt.Errorf("%w: path %q: want plain segments that end in %s, as in /t/%s/", cells.ErrInvalid, s.Path, hole, hole)
	}
	if len(segs) > 0 && strings.EqualFold(segs[0], "cells") {
		return rule{}, fmt.Errorf("%w: path %q: /cells/ is never forwarded", cells.ErrInvalid, s.Path)
	}
	strip := s.Strip
	return rule{kind: "path", text: "path " + pattern + "/",
		find: func(r *http.Request) (Found, bool, *cells.Answer, *cells.Answer) {
			raw := r.URL.EscapedPath()
			rest, ok := strings.CutPrefix(raw, "/")
			if !ok {
				return Found{}, false, nil, nil
			}
			for _, seg := range segs {
				var have string
				if have, rest, ok = strings.Cut(rest, "/"); !ok || !sameSegment(have, seg) {
					return Found{}, false, nil, nil
				}
			}
			have, tail, _ := strings.Cut(rest, "/")
			if have == "" {
				return Found{}, false, nil, nil
			}
			tenant, err := url.PathUnescape(have)
			if err != nil {
				return Found{}, false, nil, &cells.Answer{Code: cells.CodeBadRequest, Detail: "the path is not well encoded", Err: err}
			}
			f := Found{Tenant: cells.TenantID(tenant)}
			if strip {
				f.StripPath = strings.TrimSuffix(raw[:len(raw)-len(tail)], "/")
			}
			return f, true, nil, nil
		}}, nil
}

func sameSegment(raw, want string) bool {
	if raw == want {
		return true
	}
	if !strings.Contains(raw, "%") {
		return false
	}
	dec, err := url.PathUnescape(raw)
	return err == nil && dec == want
}
