// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"net/http"
	"net/url"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/internal/claims"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// Rule names what decided.
type Rule string

// The rules.
const (
	// RuleHost is rule 1: the host is a cell's own, or nobody's.
	RuleHost Rule = "host"
	// RuleSCIM is rule 2.
	RuleSCIM Rule = "scim"
	// RuleIssuer is rule 3.
	RuleIssuer Rule = "issuer"
	// RuleFirst is rule 4.
	RuleFirst Rule = "first"
	// RuleBefore is rule 4's cell taking everything until the first cell serves.
	RuleBefore Rule = "before"
	// RuleOwn: the path is the router's.
	RuleOwn Rule = "own"
)

// Request is what the rules look at.
type Request struct {
	Method string
	// Host as the client sent it: the authority of an absolute target or of HTTP/2, else
	// the Host header.
	Host string
	// Path is the raw path, percent-encoded as it came.
	Path string
	// Authorization holds the values of that header, one a line.
	Authorization []string
	// Revoked is the token that a revocation names; see [Index.NeedsRevoked].
	Revoked string
}

// Decision says where a request goes, or what it gets instead.
type Decision struct {
	Rule Rule
	// Cell is the cell, "" for the deployment behind the router before the first cell
	// is registered. Upstream is its address.
	Cell     cells.CellID
	Upstream string
	// Answer, if it is not "", is what the request gets; Detail says more, to a client.
	Answer cells.Code
	Detail string
	// Err is the cause, for logs.
	Err error
}

// credential is what the Authorization header holds.
type credential struct {
	jwt string // a bearer token that looks like a JWT
	bad string // why the header cannot be understood
}

// readCredential looks for a bearer token.
func readCredential(values []string) credential {
	if len(values) > 1 {
		return credential{bad: "the request has more than one Authorization header"}
	}
	if len(values) == 0 {
		return credential{}
	}
	v := strings.Trim(values[0], " \t")
	i := strings.IndexAny(v, " \t")
	if i < 0 {
		return credential{}
	}
	if scheme := v[:i]; !strings.EqualFold(scheme, "Bearer") && !strings.EqualFold(scheme, "DPoP") {
		return credential{}
	}
	tok := strings.Trim(v[i:], " \t")
	switch {
	case strings.ContainsAny(tok, " \t,"):
		return credential{bad: "the request has more than one bearer token in its Authorization header"}
	case len(tok) > claims.MaxToken:
		return credential{bad: "the bearer token is too long"}
	case claims.Shaped(tok):
		return credential{jwt: tok}
	}
	return credential{}
}

// Decide applies the rules.
func (x *Index) Decide(r Request) Decision {
	if forward.Reserved(r.Path) {
		return Decision{Rule: RuleOwn, Answer: cells.CodeNotServed, Detail: "paths under /cells/ are the platform's"}
	}
	host, err := requested(r.Host)
	if err != nil {
		return Decision{Rule: RuleHost, Answer: cells.CodeUnknownHost, Err: err}
	}
	if !x.shared[host] {
		i, ok := x.hosts[host]
		if !ok || i == nobody {
			return Decision{Rule: RuleHost, Answer: cells.CodeUnknownHost}
		}
		return x.to(RuleHost, i)
	}
	if !x.serving() {
		return x.byDefault(RuleBefore)
	}
	path := segments(r.Path)
	switch {
	case path.under(x.cfg.Paths.SCIM):
		if !path.under(x.cfg.Paths.SCIM + "/" + x.cfg.Paths.Groups) {
			return x.byDefault(RuleSCIM)
		}
		return x.byToken(r, RuleSCIM)
	case path.under(x.cfg.Paths.Discovery):
		return x.byDefault(RuleFirst)
	case claims.Shaped(r.Revoked) && x.revocation(r, path) && readCredential(r.Authorization) == credential{}:
		return x.byIssuer(r.Revoked)
	}
	return x.byToken(r, RuleFirst)
}

// requested returns a request's host in its normal form. On the wire a name is ASCII;
// what is not would reach the cell in another spelling than the one decided by.
func requested(host string) (string, error) {
	for i := range len(host) {
		if host[i] >= 0x80 {
			return "", errors.New("the host is not ASCII")
		}
	}
	return hostname.Normalize(host)
}

// NeedsRevoked reports whether the decision depends on the token that a revocation
// names in its body: decide again with Revoked set.
func (x *Index) NeedsRevoked(r Request) bool {
	host, err := requested(r.Host)
	return err == nil && x.shared[host] && x.serving() && x.revocation(r, segments(r.Path)) && readCredential(r.Authorization) == credential{}
}

func (x *Index) revocation(r Request, path rawPath) bool {
	return r.Method == http.MethodPost && path.under(x.cfg.Paths.Revoke)
}

// serving reports whether rules 2 to 4 hold.
func (x *Index) serving() bool {
	return x.firsts > 1 || x.first != nobody && x.cells[x.first].State == Serving
}

// byToken goes by the issuer of a bearer JWT; without one it goes to the first cell,
// by the given rule.
func (x *Index) byToken(r Request, rule Rule) Decision {
	switch c := readCredential(r.Authorization); {
	case c.bad != "":
		return Decision{Rule: RuleIssuer, Answer: cells.CodeBadRequest, Detail: c.bad}
	case c.jwt != "":
		return x.byIssuer(c.jwt)
	}
	return x.byDefault(rule)
}

func (x *Index) byIssuer(token string) Decision {
	unknown := Decision{Rule: RuleIssuer, Answer: cells.CodeUnknownIssuer}
	if len(token) > claims.MaxToken {
		unknown.Err = errors.New("the token is too long")
		return unknown
	}
	iss, err := claims.Issuer(token)
	if err != nil {
		unknown.Err = err
		return unknown
	}
	i, ok := x.issuers[iss]
	if !ok || i == nobody {
		return unknown
	}
	return x.to(RuleIssuer, i)
}

// byDefault goes to rule 4's cell.
func (x *Index) byDefault(rule Rule) Decision {
	switch {
	case x.first != nobody:
		return x.to(rule, x.first)
	case x.firsts > 1:
		return Decision{Rule: rule, Answer: cells.CodeBackendUnavailable, Detail: "the directory names two first cells"}
	}
	return Decision{Rule: rule, Upstream: x.cfg.Upstream}
}

func (x *Index) to(rule Rule, i int) Decision {
	c := &x.cells[i]
	d := Decision{Rule: rule, Cell: c.Name, Upstream: c.Upstream}
	if c.Upstream == "" {
		d.Answer, d.Detail = cells.CodeBackendUnavailable, "the cell has no upstream address"
	}
	return d
}

// rawPath is a path as most servers read it: decoded once, without empty segments,
// dot segments resolved.
type rawPath []string

func segments(raw string) rawPath {
	dec, err := url.PathUnescape(raw)
	if err != nil {
		dec = raw
	}
	var out rawPath
	for seg := range strings.SplitSeq(dec, "/") {
		switch seg {
		case "", ".":
		case "..":
			out = out[:max(0, len(out)-1)]
		default:
			out = append(out, seg)
		}
	}
	return out
}

// under reports whether the path is prefix or below it.
func (p rawPath) under(prefix string) bool {
	n := 0
	for seg := range strings.SplitSeq(strings.TrimPrefix(prefix, "/"), "/") {
		if n >= len(p) || p[n] != seg {
			return false
		}
		n++
	}
	return true
}
