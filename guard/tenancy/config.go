// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"encoding/json"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// EndUserIssuer is an issuer whose tokens are for its own tenants only.
type EndUserIssuer struct {
	Issuer string `json:"issuer"`
	// Tenants are the patterns of the tenants it may name: a tenant, or a prefix
	// followed by '*'.
	Tenants []string `json:"tenants"`
}

// Config is the configuration that a fingerprint is made of. Processes and the
// commands that compute a next value use this one function of it.
type Config struct {
	// PublicBaseURL is where clients reach the service, http or https. Required in a
	// cell: no URL that it hands out may come from a request.
	PublicBaseURL string
	// Issuer is the URL under which sign-in runs; "" is PublicBaseURL.
	Issuer string
	// OIDCIssuer and OIDCClientID are the sign-in's upstream; both or neither.
	OIDCIssuer, OIDCClientID string
	// SCIM is on when people are provisioned.
	SCIM bool
	// BearerIssuers are accepted as they stand, compared byte for byte.
	BearerIssuers []string
	// EndUserIssuers are accepted too, for their tenants.
	EndUserIssuers []EndUserIssuer
	// Audiences has the audience that an accepted issuer's tokens must have, for each
	// issuer with one. Without it the issuer's tokens for other services are accepted.
	Audiences map[string]string
	// Tenants are those that the configuration itself names.
	Tenants []cells.TenantID
	// DeploymentID is the one that the process verified in its stores.
	DeploymentID string
	// Bucket and Prefix say where objects are kept; "" for none. A prefix is compared
	// without slashes at its ends.
	Bucket, Prefix string
}

// Fingerprint returns the value of c under [SchemaVersion]: it has the fields that this
// build knows. The error wraps
// [cells.ErrInvalid] and names the field.
func (c Config) Fingerprint() (Fingerprint, error) {
	bad := func(name string, err error) (Fingerprint, error) {
		return Fingerprint{}, fmt.Errorf("%w: %s: %w", cells.ErrInvalid, name, err)
	}
	f := Fingerprint{Schema: SchemaVersion(), Fields: map[Field][]string{
		FieldHosts: {}, FieldOIDC: {}, FieldSCIM: {}, FieldIssuers: {}, FieldTenants: {}, FieldPatterns: {}, FieldAudiences: {},
		FieldDeploymentID: one(c.DeploymentID), FieldBucket: one(c.Bucket), FieldPrefix: {},
	}}
	add := func(name Field, v ...string) { f.Fields[name] = append(f.Fields[name], v...) }
	for _, u := range []struct{ name, value string }{{"public base URL", c.PublicBaseURL}, {"issuer", c.Issuer}} {
		if u.value == "" {
			continue
		}
		host, err := hostOf(u.value)
		if err != nil {
			return bad(u.name, err)
		}
		add(FieldHosts, host)
	}
	if (c.OIDCIssuer == "") != (c.OIDCClientID == "") {
		return bad("OIDC", fmt.Errorf("an issuer needs a client id and a client id an issuer"))
	}
	if c.OIDCIssuer != "" {
		pair, err := json.Marshal([2]string{c.OIDCIssuer, c.OIDCClientID})
		if err != nil {
			return bad("OIDC", err)
		}
		add(FieldOIDC, string(pair))
	}
	if c.SCIM {
		add(FieldSCIM, "on")
	}
	add(FieldIssuers, c.BearerIssuers...)
	for _, e := range c.EndUserIssuers {
		add(FieldIssuers, e.Issuer)
		for _, p := range e.Tenants {
			if err := validPattern(p); err != nil {
				return bad("end-user issuer "+e.Issuer, err)
			}
			add(FieldPatterns, p)
		}
	}
	for _, i := range f.Fields[FieldIssuers] {
		if i == "" {
			return bad("issuers", fmt.Errorf("an issuer is empty"))
		}
	}
	for issuer, audience := range c.Audiences {
		if audience == "" || !slices.Contains(f.Fields[FieldIssuers], issuer) {
			return bad("audiences", fmt.Errorf("%q of issuer %q: it is empty, or the issuer is not accepted", audience, issuer))
		}
		pair, err := json.Marshal([2]string{issuer, audience})
		if err != nil {
			return bad("audiences", err)
		}
		add(FieldAudiences, string(pair))
	}
	for _, t := range c.Tenants {
		if err := t.Validate(); err != nil {
			return bad("tenants", err)
		}
		if Everybody(string(t)) {
			return bad("tenants", fmt.Errorf("%q names no tenant", t))
		}
		add(FieldTenants, string(t))
	}
	if c.Prefix != "" && c.Bucket == "" {
		return bad("prefix", fmt.Errorf("there is no bucket"))
	}
	if p := strings.Trim(c.Prefix, "/"); p != "" {
		if path.Clean("/"+p) != "/"+p {
			return bad("prefix", fmt.Errorf("%q is not in its shortest form", c.Prefix))
		}
		add(FieldPrefix, p)
	}
	for name, set := range f.Fields {
		f.Fields[name] = canonical(set)
		if !knows(SchemaVersion(), name) {
			delete(f.Fields, name)
		}
	}
	return f, nil
}

func one(v string) []string {
	if v == "" {
		return []string{}
	}
	return []string{v}
}

// validPattern accepts a tenant, or a tenant's prefix followed by '*'.
func validPattern(p string) error {
	if err := cells.TenantID(strings.TrimSuffix(p, "*")).Validate(); err != nil {
		return fmt.Errorf("pattern %q: %w", p, err)
	}
	return nil
}

func hostOf(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil {
		return "", fmt.Errorf("%q is no http or https URL", raw)
	}
	return hostname.Normalize(u.Host)
}

// Everybody reports whether a value of a tenant column names no single tenant: ”,
// '-' and '*' mark rows of the whole deployment. They are held nowhere, placed
// nowhere and refused nowhere.
func Everybody(tenant string) bool { return tenant == "" || tenant == "-" || tenant == "*" }
