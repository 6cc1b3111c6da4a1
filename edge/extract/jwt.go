// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/internal/claims"
)

// MaxToken bounds a token that is looked at, in bytes. Larger ones are refused.
const MaxToken = claims.MaxToken

// maxKeys bounds a key set; a token without a kid may be checked by each key.
const maxKeys = 64

// leeway is what clocks may differ by.
const leeway = 30 * time.Second

// algorithms are those that may be listed. Symmetric ones are left out: an edge
// that holds the secret could sign.
var algorithms = []jose.SignatureAlgorithm{
	jose.ES256, jose.ES384, jose.ES512, jose.RS256, jose.RS384, jose.RS512,
	jose.PS256, jose.PS384, jose.PS512, jose.EdDSA,
}

type jwtRule struct {
	pointer []string
	header  string
	bearer  bool // the scheme is required
	keys    *keyFile
	algs    []jose.SignatureAlgorithm
	expect  jwt.Expected
}

func (j *JWTSpec) compile(o *options) (rule, error) {
	c := &jwtRule{header: "Authorization", bearer: true}
	switch {
	case j.Claim == "" || len(j.Claim) > 256:
		return rule{}, fmt.Errorf("%w: jwt: claim is missing or too long", cells.ErrInvalid)
	case strings.HasPrefix(j.Claim, "/"):
		c.pointer = strings.Split(j.Claim[1:], "/")
		if len(c.pointer) > 8 {
			return rule{}, fmt.Errorf("%w: jwt: claim %q is too deep", cells.ErrInvalid, j.Claim)
		}
		for i, p := range c.pointer {
			c.pointer[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(p)
		}
	default:
		c.pointer = []string{j.Claim}
	}
	if j.Header != "" {
		name, err := headerName(j.Header)
		if err != nil {
			return rule{}, err
		}
		c.header, c.bearer = name, name == "Authorization"
	}
	if j.JWKS == "" && (len(j.Algorithms) > 0 || j.Issuer != "" || j.Audience != "") {
		return rule{}, fmt.Errorf("%w: jwt: algorithms, issuer and audience need jwks: without keys nothing is verified", cells.ErrInvalid)
	}
	text := "jwt claim " + j.Claim
	if j.JWKS != "" {
		c.algs = []jose.SignatureAlgorithm{jose.ES256, jose.RS256, jose.EdDSA}
		if len(j.Algorithms) > 0 {
			c.algs = nil
			for _, a := range j.Algorithms {
				if !slices.Contains(algorithms, jose.SignatureAlgorithm(a)) {
					return rule{}, fmt.Errorf("%w: jwt: algorithm %q; known are %v", cells.ErrInvalid, a, algorithms)
				}
				c.algs = append(c.algs, jose.SignatureAlgorithm(a))
			}
		}
		c.expect.Issuer = j.Issuer
		if j.Audience != "" {
			c.expect.AnyAudience = jwt.Audience{j.Audience}
		}
		text += " (verified)"
		if o != nil {
			keys, err := newKeyFile(j.JWKS, o.log)
			if err != nil {
				return rule{}, err
			}
			c.keys = keys
		}
	}
	return rule{kind: "jwt", text: text, find: c.find}, nil
}

// readKeys reads a key set and refuses private and symmetric keys in it.
func readKeys(path string) (*jose.JSONWebKeySet, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("jwt: key set: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxConfigBytes+1))
	if err != nil {
		return nil, fmt.Errorf("jwt: key set: %w", err)
	}
	if len(b) > MaxConfigBytes {
		return nil, fmt.Errorf("%w: jwt: key set %s is larger than %d bytes", cells.ErrInvalid, path, MaxConfigBytes)
	}
	set := new(jose.JSONWebKeySet)
	if err := json.Unmarshal(b, set); err != nil {
		return nil, fmt.Errorf("%w: jwt: key set %s: %v", cells.ErrInvalid, path, err)
	}
	if len(set.Keys) == 0 || len(set.Keys) > maxKeys {
		return nil, fmt.Errorf("%w: jwt: key set %s has %d keys, want 1 to %d", cells.ErrInvalid, path, len(set.Keys), maxKeys)
	}
	for _, k := range set.Keys {
		if !k.Valid() || !k.IsPublic() {
			return nil, fmt.Errorf("%w: jwt: key set %s: key %q is not a public key; only public ones belong here", cells.ErrInvalid, path, k.KeyID)
		}
		if r, ok := k.Key.(*rsa.PublicKey); ok && r.N.BitLen() < 2048 {
			return nil, fmt.Errorf("%w: jwt: key set %s: key %q has %d bits, want 2048", cells.ErrInvalid, path, k.KeyID, r.N.BitLen())
		}
	}
	return set, nil
}

// token returns the request's token; ok is false when there is none that could be
// a signed token.
func (c *jwtRule) token(r *http.Request) (string, bool, *cells.Answer) {
	return bearerToken(r, c.header, c.bearer)
}

func bearerToken(r *http.Request, header string, bearer bool) (string, bool, *cells.Answer) {
	v, ok, refuse := oneValue(r.Header, header)
	if !ok {
		return "", false, refuse
	}
	if scheme, tok, two := strings.Cut(v, " "); two {
		if !strings.EqualFold(scheme, "Bearer") {
			return "", false, nil
		}
		v = strings.TrimSpace(tok)
	} else if bearer {
		return "", false, nil
	}
	if strings.Count(v, ".") != 2 {
		return "", false, nil // opaque, or encrypted: not ours to read
	}
	if len(v) > MaxToken {
		return "", false, &cells.Answer{Code: cells.CodeBadRequest, Detail: fmt.Sprintf("the token has %d bytes, at most %d", len(v), MaxToken)}
	}
	return v, true, nil
}

func (c *jwtRule) find(r *http.Request) (Found, bool, *cells.Answer, *cells.Answer) {
	tok, ok, refuse := c.token(r)
	if !ok {
		return Found{}, false, nil, refuse
	}
	var payload []byte
	var err error
	if c.keys != nil {
		if payload, err = c.verify(tok); err != nil {
			return Found{}, false, nil, &cells.Answer{Code: cells.CodeUnknownIssuer, Detail: "the token was not accepted", Err: err}
		}
	} else if payload, err = claims.Payload(tok); err != nil {
		return Found{}, false, nil, nil // two dots, but no token
	}
	v, err := claims.Lookup(payload, c.pointer)
	switch {
	case errors.Is(err, claims.ErrNone):
		return Found{}, false, nil, nil
	case err != nil:
		return Found{}, false, nil, &cells.Answer{Code: cells.CodeBadRequest, Detail: "the token's claims are malformed", Err: err}
	}
	return Found{Tenant: cells.TenantID(v), Verified: c.keys != nil}, true, nil, nil
}

// verify returns the payload of a token that one of the keys signed and that is
// valid now.
func (c *jwtRule) verify(raw string) ([]byte, error) {
	tok, err := jwt.ParseSigned(raw, c.algs)
	if err != nil {
		return nil, err
	}
	if len(tok.Headers) != 1 {
		return nil, errors.New("want one signature")
	}
	set := c.keys.get(time.Now())
	keys := set.Keys
	if kid := tok.Headers[0].KeyID; kid != "" {
		if keys = set.Key(kid); len(keys) == 0 {
			return nil, errors.New("no key of this id")
		}
	}
	err = errors.New("no key fits")
	for _, k := range keys {
		if k.Use != "" && k.Use != "sig" || k.Algorithm != "" && k.Algorithm != tok.Headers[0].Algorithm {
			continue
		}
		var std jwt.Claims
		if err = tok.Claims(k.Key, &std); err != nil {
			continue
		}
		if std.Expiry == nil {
			return nil, errors.New("the token has no exp")
		}
		expect := c.expect
		expect.Time = time.Now()
		if err = std.ValidateWithLeeway(expect, leeway); err != nil {
			return nil, err
		}
		return claims.Payload(raw)
	}
	return nil, err
}

func (s *Spec) compileIssuers() (rule, error) {
	if len(s.Issuers) > 10000 {
		return rule{}, fmt.Errorf("%w: issuers: %d entries, at most 10000", cells.ErrInvalid, len(s.Issuers))
	}
	m := make(map[string]cells.TenantID, len(s.Issuers))
	for iss, t := range s.Issuers {
		if iss == "" || len(iss) > 512 {
			return rule{}, fmt.Errorf("%w: issuers: an issuer has 1 to 512 bytes", cells.ErrInvalid)
		}
		if err := t.Validate(); err != nil {
			return rule{}, fmt.Errorf("issuers: %s: %w", iss, err)
		}
		m[iss] = t
	}
	strict := s.Strict
	return rule{kind: "issuers", text: "the issuer of the token",
		find: func(r *http.Request) (Found, bool, *cells.Answer, *cells.Answer) {
			unknown := &cells.Answer{Code: cells.CodeUnknownIssuer}
			tok, ok, refuse := bearerToken(r, "Authorization", true)
			if !ok {
				if refuse == nil && strict {
					unknown.Detail = "the request has no token that names an issuer"
					refuse = unknown
				}
				return Found{}, false, nil, refuse
			}
			iss, err := claims.Issuer(tok)
			if err == nil {
				if t, ok := m[iss]; ok {
					return Found{Tenant: t}, true, nil, nil
				}
			}
			unknown.Err = err
			if strict {
				return Found{}, false, nil, unknown
			}
			return Found{}, false, unknown, nil
		}}, nil
}
