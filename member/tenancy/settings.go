// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
)

// Settings are the environment of a process of a deployment that is one cell, or of
// a command on it.
type Settings struct {
	// Cell is CELL. Without it the others are read, and nothing is required.
	Cell cells.CellID
	// RouterURL and RouterToken are CELL_ROUTER_URL and CELL_ROUTER_TOKEN, the directory's
	// address and the cell's credential for it: lcr_ and 128 lowercase hexadecimal digits.
	RouterURL, RouterToken string
	// Timing is CELL_TENANCY_MODE_CACHE_S, CELL_TENANCY_MAX_STALE_S and
	// CELL_ROUTER_TIMEOUT_S.
	CacheFor, MaxStale, RouterTimeout time.Duration
	// SCIMTokensFile is CELL_SCIM_TOKENS_FILE: the SCIM tokens that the cell accepts, one a
	// line.
	SCIMTokensFile string
	// Configuration is what the fingerprint is made of: CELL_PUBLIC_BASE_URL,
	// CELL_ISSUER_URL, CELL_OIDC_ISSUER, CELL_OIDC_CLIENT_ID, CELL_SCIM,
	// CELL_BEARER_ISSUERS (separated by commas), CELL_END_USER_ISSUERS (JSON),
	// CELL_BEARER_AUDIENCES (JSON, issuer to audience),
	// CELL_TENANTS (separated by commas). Its DeploymentID, Bucket and Prefix are the
	// stores' to tell.
	Configuration tenancy.Config
}

// FromEnv reads the settings. It refuses what is malformed, and with CELL set a
// process without a public base URL: no URL that it hands out may come from a
// request. The error wraps [cells.ErrInvalid], names the variable and never holds the
// credential.
func FromEnv() (Settings, error) { return From(os.LookupEnv) }

// From is [FromEnv] with variables that lookup finds, for a command that reads the
// settings of several cells.
func From(lookup func(string) (string, bool)) (s Settings, err error) {
	get := func(name string) string { v, _ := lookup(name); return v }
	bad := func(name, format string, args ...any) (Settings, error) {
		return Settings{}, fmt.Errorf("%w: %s: %s", cells.ErrInvalid, name, fmt.Sprintf(format, args...))
	}
	cell, set := lookup("CELL")
	if s.Cell = cells.CellID(cell); set && cell != "" {
		if err := s.Cell.Validate(); err != nil {
			return Settings{}, fmt.Errorf("CELL: %w", err)
		}
	}
	s.SCIMTokensFile = get("CELL_SCIM_TOKENS_FILE")
	s.RouterURL, s.RouterToken = get("CELL_ROUTER_URL"), get("CELL_ROUTER_TOKEN")
	if s.RouterToken != "" && credential.Router.Check(s.RouterToken) != nil {
		return bad("CELL_ROUTER_TOKEN", "it is not lcr_ and 128 lowercase hexadecimal digits; make one with cell credential new")
	}
	for _, d := range []struct {
		name string
		to   *time.Duration
	}{{"CELL_TENANCY_MODE_CACHE_S", &s.CacheFor}, {"CELL_TENANCY_MAX_STALE_S", &s.MaxStale}, {"CELL_ROUTER_TIMEOUT_S", &s.RouterTimeout}} {
		v := get(d.name)
		if v == "" {
			continue
		}
		n, err := strconv.ParseFloat(v, 64)
		if err != nil || !(n >= 0.05 && n <= 3600) {
			return bad(d.name, "%q is not between 0.05 and 3600 seconds", v)
		}
		*d.to = time.Duration(n * float64(time.Second))
	}
	c := &s.Configuration
	c.PublicBaseURL, c.Issuer = get("CELL_PUBLIC_BASE_URL"), get("CELL_ISSUER_URL")
	c.OIDCIssuer, c.OIDCClientID = get("CELL_OIDC_ISSUER"), get("CELL_OIDC_CLIENT_ID")
	c.BearerIssuers = list(get("CELL_BEARER_ISSUERS"))
	for _, t := range list(get("CELL_TENANTS")) {
		c.Tenants = append(c.Tenants, cells.TenantID(t))
	}
	if v := get("CELL_SCIM"); v != "" {
		if c.SCIM, err = strconv.ParseBool(v); err != nil {
			return bad("CELL_SCIM", "%q is not true or false", v)
		}
	}
	if v := get("CELL_END_USER_ISSUERS"); v != "" {
		dec := json.NewDecoder(bytes.NewReader([]byte(v)))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&c.EndUserIssuers); err != nil {
			return bad("CELL_END_USER_ISSUERS", "want [{\"issuer\": ..., \"tenants\": [...]}]: %v", err)
		}
		if _, err := dec.Token(); err != io.EOF {
			return bad("CELL_END_USER_ISSUERS", "there is something behind the list")
		}
	}
	if v := get("CELL_BEARER_AUDIENCES"); v != "" {
		dec := json.NewDecoder(bytes.NewReader([]byte(v)))
		if err := dec.Decode(&c.Audiences); err != nil {
			return bad("CELL_BEARER_AUDIENCES", "want {issuer: audience, ...}: %v", err)
		}
		if _, err := dec.Token(); err != io.EOF {
			return bad("CELL_BEARER_AUDIENCES", "there is something behind the object")
		}
	}
	if _, err := c.Fingerprint(); err != nil {
		return Settings{}, err
	}
	if s.Cell != "" && c.PublicBaseURL == "" {
		return bad("CELL_PUBLIC_BASE_URL", "CELL is %s and this is not set", s.Cell)
	}
	return s, nil
}

func list(v string) []string {
	var out []string
	for _, e := range strings.Split(v, ",") {
		if e = strings.TrimSpace(e); e != "" {
			out = append(out, e)
		}
	}
	return out
}
