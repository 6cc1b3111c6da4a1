// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"

	"github.com/cloister-dev/cloister/cells"
)

// MaxSpecs bounds the number of extractors in a list.
const MaxSpecs = 32

// MaxConfigBytes bounds what [Parse] reads.
const MaxConfigBytes = 1 << 20

// Spec is one extractor as a configuration writes it. Exactly one of Header,
// Host, Path, JWT, Issuers and Fixed is set.
type Spec struct {
	// Header is the name of a header whose only value is the tenant.
	Header string `json:"header,omitempty" yaml:"header,omitempty"`
	// Host is a host pattern with {tenant} inside one label: "{tenant}.example.com",
	// "app-{tenant}.example.com". Ports are ignored, names compared without case.
	Host string `json:"host,omitempty" yaml:"host,omitempty"`
	// Path is a prefix that ends in {tenant}: "/t/{tenant}/". Segments are compared
	// after decoding.
	Path string `json:"path,omitempty" yaml:"path,omitempty"`
	// JWT reads a claim of a bearer token.
	JWT *JWTSpec `json:"jwt,omitempty" yaml:"jwt,omitempty"`
	// Issuers maps the iss claim of a bearer token, read without verification, to a
	// tenant.
	Issuers map[string]cells.TenantID `json:"issuers,omitempty" yaml:"issuers,omitempty"`
	// Fixed is the tenant of every request.
	Fixed cells.TenantID `json:"fixed,omitempty" yaml:"fixed,omitempty"`

	// Strip, for Header and Path, keeps what named the tenant from the cell: the
	// header is dropped, the path begins behind the tenant.
	Strip bool `json:"strip,omitempty" yaml:"strip,omitempty"`
	// Strict, for Host and Issuers, answers UNKNOWN_HOST or UNKNOWN_ISSUER at once
	// when nothing matches; the extractors that follow are not asked.
	Strict bool `json:"strict,omitempty" yaml:"strict,omitempty"`
}

// JWTSpec says which claim of which token names the tenant.
type JWTSpec struct {
	// Claim is the name of a top-level claim, or, when it begins with "/", a JSON
	// pointer ("/org/id"). Its value is a string.
	Claim string `json:"claim" yaml:"claim"`
	// Header carries the token; "" means Authorization with the scheme Bearer. In
	// any other header the scheme is optional.
	Header string `json:"header,omitempty" yaml:"header,omitempty"`
	// JWKS is the path of a JSON Web Key Set. With it the token is verified:
	// signature, exp, nbf and, if set, Issuer and Audience. Without it the claim is
	// read as it stands. The file is read again when it has changed.
	JWKS string `json:"jwks,omitempty" yaml:"jwks,omitempty"`
	// Algorithms lists the accepted signature algorithms; needs JWKS. Empty means
	// ES256, RS256 and EdDSA. "none" is never accepted.
	Algorithms []string `json:"algorithms,omitempty" yaml:"algorithms,omitempty"`
	// Issuer and Audience, if set, must be in a verified token.
	Issuer   string `json:"issuer,omitempty" yaml:"issuer,omitempty"`
	Audience string `json:"audience,omitempty" yaml:"audience,omitempty"`
}

// Parse reads a YAML (or JSON) list of extractors, or a document with the one
// key "extractors". It is strict; every error wraps [cells.ErrInvalid].
func Parse(doc []byte) ([]Spec, error) {
	if len(doc) > MaxConfigBytes {
		return nil, fmt.Errorf("%w: extractors: %d bytes, at most %d", cells.ErrInvalid, len(doc), MaxConfigBytes)
	}
	dec := yaml.NewDecoder(bytes.NewReader(doc))
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, fmt.Errorf("%w: extractors: %v", cells.ErrInvalid, err)
	}
	var more any
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: extractors: more than one document", cells.ErrInvalid)
	}
	return ParseValue(v)
}

// ParseValue reads a list of extractors that was decoded already, as a
// configuration library hands it over: a []any of maps, or a map with the one key
// "extractors". It is as strict as [Parse].
func ParseValue(v any) ([]Spec, error) {
	if m, ok := v.(map[string]any); ok {
		list, ok := m["extractors"]
		if !ok || len(m) != 1 {
			return nil, fmt.Errorf("%w: extractors: want a list, or the one key \"extractors\"", cells.ErrInvalid)
		}
		v = list
	}
	list, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("%w: extractors: want a list, have %T", cells.ErrInvalid, v)
	}
	if len(list) == 0 || len(list) > MaxSpecs {
		return nil, fmt.Errorf("%w: extractors: %d entries, want 1 to %d", cells.ErrInvalid, len(list), MaxSpecs)
	}
	specs := make([]Spec, len(list))
	for i, e := range list {
		b, err := json.Marshal(e)
		if err != nil {
			return nil, fmt.Errorf("%w: extractor %d: %v", cells.ErrInvalid, i+1, err)
		}
		dec := json.NewDecoder(bytes.NewReader(b))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&specs[i]); err != nil {
			return nil, fmt.Errorf("%w: extractor %d: %v", cells.ErrInvalid, i+1, err)
		}
		if err := specs[i].Validate(); err != nil {
			return nil, fmt.Errorf("extractor %d: %w", i+1, err)
		}
	}
	return specs, nil
}

// Kind names the field that is set: header, host, path, jwt, issuers, fixed; ""
// when none or several are.
func (s *Spec) Kind() string {
	kind, n := "", 0
	for _, k := range []struct {
		name string
		set  bool
	}{
		{"header", s.Header != ""}, {"host", s.Host != ""}, {"path", s.Path != ""},
		{"jwt", s.JWT != nil}, {"issuers", len(s.Issuers) > 0}, {"fixed", s.Fixed != ""},
	} {
		if k.set {
			kind, n = k.name, n+1
		}
	}
	if n != 1 {
		return ""
	}
	return kind
}

// Validate reports what is malformed, without reading files. The error wraps
// [cells.ErrInvalid].
func (s *Spec) Validate() error {
	_, err := s.compile(nil)
	return err
}
