// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/guard/tenancy"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// issuer is one entry of the issuers file.
type issuer struct {
	// Issuer is the iss claim, Keys the path of its JSON Web Key Set (relative to the
	// file), Audience the aud claim that its tokens must have, if set.
	Issuer   string `json:"issuer"`
	Keys     string `json:"jwks"`
	Audience string `json:"audience,omitempty"`
	// Tenants, if set, are the patterns of the only tenants it may name.
	Tenants []string `json:"tenants,omitempty"`

	list *extract.List
}

// issuers are whose tokens the service accepts.
type issuers []issuer

// readIssuers reads the issuers file: a JSON list.
func readIssuers(path string) (issuers, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	bad := func(format string, args ...any) (issuers, error) {
		return nil, fmt.Errorf("%w: %s: %s", cells.ErrInvalid, path, fmt.Sprintf(format, args...))
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var out issuers
	if err := dec.Decode(&out); err != nil {
		return bad("%v", err)
	}
	if _, err := dec.Token(); err != io.EOF || len(out) == 0 {
		return bad("want one list with at least one issuer")
	}
	for i := range out {
		e := &out[i]
		if e.Issuer == "" || e.Keys == "" {
			return bad("entry %d has no issuer or no jwks", i+1)
		}
		for _, other := range out[:i] {
			if other.Issuer == e.Issuer {
				return bad("issuer %s is there twice", e.Issuer)
			}
		}
		keys := e.Keys
		if !filepath.IsAbs(keys) {
			keys = filepath.Join(filepath.Dir(path), keys)
		}
		if e.list, err = extract.New([]extract.Spec{{JWT: &extract.JWTSpec{Claim: "tenant", JWKS: keys, Issuer: e.Issuer, Audience: e.Audience}}}); err != nil {
			return bad("issuer %s: %v", e.Issuer, err)
		}
	}
	return out, nil
}

// configure puts the issuers into what the fingerprint is made of.
func (is issuers) configure(c *tenancy.Config) error {
	if len(c.BearerIssuers)+len(c.EndUserIssuers) > 0 {
		return fmt.Errorf("%w: CELL_BEARER_ISSUERS and CELL_END_USER_ISSUERS are not set where --issuers says whom the service accepts", cells.ErrInvalid)
	}
	for _, e := range is {
		if e.Tenants == nil {
			c.BearerIssuers = append(c.BearerIssuers, e.Issuer)
		} else {
			c.EndUserIssuers = append(c.EndUserIssuers, tenancy.EndUserIssuer{Issuer: e.Issuer, Tenants: e.Tenants})
		}
	}
	return nil
}

// resolve verifies the request's bearer token. The principal is scoped to its tenant
// claim; X-Tenant may name the tenant too, and then it has to be the same one.
func (is issuers) resolve(r *http.Request) (cells.TenantID, checks.Principal, error) {
	if len(r.Header.Values("Authorization")) != 1 {
		return "", checks.Principal{}, &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "want one Authorization header with a bearer token"}
	}
	for _, e := range is {
		found, err := e.list.Resolve(r)
		if err != nil || !found.Verified {
			continue
		}
		if e.Tenants != nil && !matches(e.Tenants, found.Tenant) {
			return "", checks.Principal{}, &cells.Answer{Code: cells.CodeForbidden, Detail: "the issuer may not name this tenant"}
		}
		tenant := found.Tenant
		if named := r.Header.Values("X-Tenant"); len(named) > 0 {
			if len(named) > 1 {
				return "", checks.Principal{}, &cells.Answer{Code: cells.CodeBadRequest, Detail: "X-Tenant is there twice"}
			}
			tenant = cells.TenantID(named[0])
		}
		return tenant, checks.Principal{Tenant: found.Tenant, Subject: e.Issuer}, nil
	}
	return "", checks.Principal{}, &cells.Answer{Code: cells.CodeUnknownIssuer, Detail: "the token was not accepted"}
}

func matches(patterns []string, t cells.TenantID) bool {
	for _, p := range patterns {
		if prefix, ok := strings.CutSuffix(p, "*"); ok && strings.HasPrefix(string(t), prefix) || p == string(t) {
			return true
		}
	}
	return false
}
