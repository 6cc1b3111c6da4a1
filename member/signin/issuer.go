// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/go-jose/go-jose/v4"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// Kind is what the subjects of an issuer are.
type Kind string

const (
	// People signs for people and for what acts for them: their service accounts, bots.
	People Kind = "people"
	// EndUsers is a service that signs for its own users, in the tenants of its patterns.
	EndUsers Kind = "end-users"
	// Machines signs for machines and workloads, none of which is a person.
	Machines Kind = "machines"
)

// Bounds of what is configured and presented.
const (
	// MaxToken bounds a token, in bytes.
	MaxToken = 16 << 10
	// MaxIssuers bounds the issuers of a cell.
	MaxIssuers = 256
	maxConfig  = 1 << 20
	maxKeySet  = 256 << 10
	maxKeys    = 64
	maxName    = 512
)

// algorithms are those that may be listed. Symmetric ones are left out: who can
// verify could sign.
var algorithms = []jose.SignatureAlgorithm{
	jose.ES256, jose.ES384, jose.ES512, jose.RS256, jose.RS384, jose.RS512,
	jose.PS256, jose.PS384, jose.PS512, jose.EdDSA,
}

// defaultAlgorithms are those of an issuer that lists none.
var defaultAlgorithms = []string{"ES256", "RS256", "EdDSA"}

// Issuer is one whose tokens a cell accepts.
type Issuer struct {
	// Issuer is the iss claim, compared exactly.
	Issuer string `json:"issuer"`
	// Keys is the address of its key set, or a file's path; "" finds the address by the
	// issuer's discovery document. An address is https, or http on a loopback address.
	Keys string `json:"jwks,omitempty"`
	// Audience is the aud claim that its tokens must have, if set. An issuer that signs for
	// other services too needs one: without it what was meant for them is accepted.
	Audience string `json:"audience,omitempty"`
	// Kind defaults to EndUsers with Tenants, to People without.
	Kind Kind `json:"kind,omitempty"`
	// Tenants are the patterns of the only tenants that its tokens may name: names, or
	// prefixes with * behind. For EndUsers only, which need them.
	Tenants []string `json:"tenants,omitempty"`
	// TenantClaim names the claim with the tenant; "tenant" by default.
	TenantClaim string `json:"tenant_claim,omitempty"`
	// Algorithms that its tokens may be signed with; ES256, RS256 and EdDSA by default.
	Algorithms []string `json:"algorithms,omitempty"`
}

func (i *Issuer) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: issuer %.100q: %s", cells.ErrInvalid, i.Issuer, fmt.Sprintf(format, args...))
	}
	if i.Issuer == "" || len(i.Issuer) > maxName || len(i.Audience) > maxName {
		return bad("it and its audience have at most %d bytes, and it is needed", maxName)
	}
	if i.Keys == "" || strings.Contains(i.Keys, "://") {
		at := i.Keys
		if at == "" {
			at = i.Issuer
		}
		if err := checkAddress(at); err != nil {
			return bad("where its keys are: %v", err)
		}
	}
	if i.Kind == "" {
		if i.Kind = People; i.Tenants != nil {
			i.Kind = EndUsers
		}
	}
	switch i.Kind {
	case People, Machines:
		if i.Tenants != nil {
			return bad("tenants are for kind %s", EndUsers)
		}
	case EndUsers:
		if len(i.Tenants) == 0 {
			return bad("kind %s needs the patterns of its tenants", EndUsers)
		}
	default:
		return bad("kind %q; known are %s, %s, %s", i.Kind, People, EndUsers, Machines)
	}
	if i.TenantClaim == "" {
		i.TenantClaim = "tenant"
	}
	if slices.Contains([]string{"iss", "sub", "aud", "exp", "nbf", "iat", "jti", "act", "email", "email_verified", "creator"}, i.TenantClaim) || len(i.TenantClaim) > maxName {
		return bad("tenant_claim %.100q means something else", i.TenantClaim)
	}
	if i.Algorithms == nil {
		i.Algorithms = defaultAlgorithms
	}
	for _, a := range i.Algorithms {
		if !slices.Contains(algorithms, jose.SignatureAlgorithm(a)) {
			return bad("algorithm %q; known are %v", a, algorithms)
		}
	}
	if len(i.Algorithms) == 0 {
		return bad("it lists no algorithm")
	}
	return nil
}

// checkAddress accepts https, and http where nobody is in between.
func checkAddress(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Host == "" || u.User != nil || u.Fragment != "":
		return fmt.Errorf("%.100q is no address", s)
	case !hostname.Private(u):
		return fmt.Errorf("%.100q is not https", s)
	}
	return nil
}

// may reports whether the issuer's tokens may name a tenant.
func (i *Issuer) may(t cells.TenantID) bool {
	if i.Kind != EndUsers {
		return true
	}
	return slices.ContainsFunc(i.Tenants, func(p string) bool {
		prefix, ok := strings.CutSuffix(p, "*")
		return ok && strings.HasPrefix(string(t), prefix) || p == string(t)
	})
}

// Issuers are whose tokens a cell accepts.
type Issuers []Issuer

// ReadIssuers reads a file with a JSON list of [Issuer], strictly. The paths of key
// sets are relative to it. Errors wrap [cells.ErrInvalid] or are those of the file.
func ReadIssuers(path string) (Issuers, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return nil, err
	}
	out, err := parseIssuers(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for i := range out {
		if k := &out[i].Keys; *k != "" && !strings.Contains(*k, "://") && !filepath.IsAbs(*k) {
			*k = filepath.Join(filepath.Dir(path), *k)
		}
	}
	return out, nil
}

func parseIssuers(b []byte) (out Issuers, err error) {
	if len(b) > maxConfig {
		return nil, fmt.Errorf("%w: more than %d bytes", cells.ErrInvalid, maxConfig)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&out); err != nil {
		return nil, fmt.Errorf("%w: %v", cells.ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: want one list", cells.ErrInvalid)
	}
	return out, out.check()
}

// check also fills in what is left out.
func (is Issuers) check() error {
	if len(is) == 0 || len(is) > MaxIssuers {
		return fmt.Errorf("%w: there are %d issuers, want 1 to %d", cells.ErrInvalid, len(is), MaxIssuers)
	}
	for i := range is {
		if err := is[i].check(); err != nil {
			return err
		}
		for j := range is[:i] {
			if is[j].Issuer == is[i].Issuer {
				return fmt.Errorf("%w: issuer %.100q is there twice", cells.ErrInvalid, is[i].Issuer)
			}
		}
	}
	return nil
}

// Configure puts the issuers into what a cell's fingerprint is made of. The error
// wraps [cells.ErrInvalid]: it lists issuers already, from elsewhere.
func (is Issuers) Configure(c *tenancy.Config) error {
	if len(c.BearerIssuers)+len(c.EndUserIssuers)+len(c.Audiences) > 0 {
		return fmt.Errorf("%w: CELL_BEARER_ISSUERS, CELL_END_USER_ISSUERS and CELL_BEARER_AUDIENCES are not set where a list says whom the service accepts", cells.ErrInvalid)
	}
	for i := range is {
		if is[i].Kind == EndUsers {
			c.EndUserIssuers = append(c.EndUserIssuers, tenancy.EndUserIssuer{Issuer: is[i].Issuer, Tenants: is[i].Tenants})
		} else {
			c.BearerIssuers = append(c.BearerIssuers, is[i].Issuer)
		}
		if is[i].Audience != "" {
			if c.Audiences == nil {
				c.Audiences = map[string]string{}
			}
			c.Audiences[is[i].Issuer] = is[i].Audience
		}
	}
	return nil
}
