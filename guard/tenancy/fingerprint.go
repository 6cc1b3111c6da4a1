// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/cloister-dev/cloister/cells"
)

// Field names one field of a fingerprint.
type Field = string

// The fields. Each is a set of strings; the empty set is its default.
const (
	FieldHosts        Field = "hosts"         // of the public base URL and the issuer of sign-in, normalised
	FieldOIDC         Field = "oidc"          // "issuer" and "client id" as one JSON pair
	FieldSCIM         Field = "scim"          // "on" or nothing
	FieldIssuers      Field = "issuers"       // accepted bearer issuers, end-user issuers included
	FieldTenants      Field = "tenants"       // configured tenants
	FieldPatterns     Field = "patterns"      // tenant patterns of the end-user issuers
	FieldDeploymentID Field = "deployment_id" // what the stores carry
	FieldBucket       Field = "bucket"        // the bucket's name
	FieldPrefix       Field = "prefix"        // the prefix in it
	FieldAudiences    Field = "audiences"     // "issuer" and "audience" as one JSON pair, for each issuer whose tokens need one; version 2
)

// Bounds of a decoded fingerprint.
const (
	maxFields              = 64
	maxValues              = 4096    // of one field
	maxFingerprintEncoding = 1 << 20 // bytes
)

// Fingerprint is the part of a process's configuration that decides what it accepts
// and where it stores. A field that is in Fields is one that its maker knows, also
// when its set is empty. Values are not secret.
type Fingerprint struct {
	// Schema is the version of the fields, at least 1.
	Schema int `json:"schema"`
	// Fields are sets: sorted, without duplicates, never nil in a canonical value.
	Fields map[Field][]string `json:"fields"`
}

// Matches reports whether a process with fingerprint f may run under the accepted
// value: every field that both know is equal, and a field that the value lacks is
// at its default (the empty set) in f. A field that only the value has is one that
// the process's build does not know; so builds that differ by a field and have the
// same configuration match one value.
func (f Fingerprint) Matches(value Fingerprint) bool { return len(f.Differs(value)) == 0 }

// Differs names the fields because of which f does not match the value, sorted.
func (f Fingerprint) Differs(value Fingerprint) []Field {
	var out []Field
	for name, have := range f.Fields {
		// A field that the value lacks is nil here: equal only to an empty set.
		if !equalSets(have, value.Fields[name]) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Get returns a field's set; a field that is not known is at its default.
func (f Fingerprint) Get(name Field) []string { return f.Fields[name] }

// Value returns the only value of a field, or "" for the default.
func (f Fingerprint) Value(name Field) string {
	if v := f.Fields[name]; len(v) == 1 {
		return v[0]
	}
	return ""
}

// Equal reports whether two fingerprints are the same value, fields and all.
func (f Fingerprint) Equal(g Fingerprint) bool {
	return f.Schema == g.Schema && maps.EqualFunc(f.Fields, g.Fields, equalSets)
}

// SameStores reports whether two fingerprints name the same stores: deployment id,
// bucket and prefix, each at its default where it is not known. These never change
// after a cell was prepared.
func (f Fingerprint) SameStores(g Fingerprint) bool {
	for _, name := range []Field{FieldDeploymentID, FieldBucket, FieldPrefix} {
		if !equalSets(f.Fields[name], g.Fields[name]) {
			return false
		}
	}
	return true
}

func equalSets(a, b []string) bool { return slices.Equal(canonical(a), canonical(b)) }

// canonical sorts a copy of a set and drops duplicates.
func canonical(set []string) []string {
	out := slices.Clone(set)
	slices.Sort(out)
	out = slices.Compact(out)
	if out == nil {
		out = []string{}
	}
	return out
}

// Encode returns the stable encoding: the same bytes for the same value, whatever
// the order in which its sets were filled.
func (f Fingerprint) Encode() []byte {
	c := Fingerprint{Schema: f.Schema, Fields: make(map[Field][]string, len(f.Fields))}
	for name, set := range f.Fields {
		c.Fields[name] = canonical(set)
	}
	b := new(bytes.Buffer)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(c); err != nil {
		panic(err) // strings and a number always encode
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// Sum is the SHA-256 of the encoding, in lowercase hexadecimal: a name for a value
// in logs and listings. Decisions compare fields.
func (f Fingerprint) Sum() string {
	sum := sha256.Sum256(f.Encode())
	return hex.EncodeToString(sum[:])
}

// DecodeFingerprint is the inverse of Encode. It is strict: one JSON object with
// exactly the two members, bounded, the schema at least 1. Fields of later schemas
// are kept as they are. The error wraps [cells.ErrInvalid].
func DecodeFingerprint(b []byte) (Fingerprint, error) {
	bad := func(err error) (Fingerprint, error) {
		return Fingerprint{}, fmt.Errorf("%w: fingerprint: %w", cells.ErrInvalid, err)
	}
	if len(b) > maxFingerprintEncoding {
		return bad(fmt.Errorf("%d bytes", len(b)))
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var f Fingerprint
	if err := dec.Decode(&f); err != nil {
		return bad(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return bad(errors.New("there is something behind the object"))
	}
	if f.Schema < 1 {
		return bad(fmt.Errorf("schema %d", f.Schema))
	}
	if f.Fields == nil || len(f.Fields) > maxFields {
		return bad(fmt.Errorf("%d fields", len(f.Fields)))
	}
	for name, set := range f.Fields {
		if name == "" || len(name) > 64 || len(set) > maxValues {
			return bad(fmt.Errorf("field %.64q with %d values", name, len(set)))
		}
		f.Fields[name] = canonical(set)
	}
	return f, nil
}
