// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// conflict is a refusal.
func conflict(format string, args ...any) error {
	return fmt.Errorf("%w: %s", cells.ErrConflict, fmt.Sprintf(format, args...))
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", cells.ErrInvalid, fmt.Sprintf(format, args...))
}

// Overlap says what c may not share with another cell and does; nil if nothing. Both
// values of both cells count. The error wraps [cells.ErrConflict] and names the cell.
func Overlap(c, other *Cell) error {
	with := func(what, value string) error { return conflict("%s %q is cell %s's", what, value, other.Name) }
	for _, h := range append(c.Hosts(), c.Get(tenancy.FieldHosts)...) {
		if slices.Contains(other.Hosts(), h) || slices.Contains(other.Get(tenancy.FieldHosts), h) {
			return with("host", h)
		}
	}
	if c.DeploymentID == other.DeploymentID {
		return with("deployment id", c.DeploymentID)
	}
	if Nested(c.Stores, other.Stores) {
		return conflict("bucket %q prefix %q and cell %s's prefix %q hold one another", c.Bucket, c.Prefix, other.Name, other.Prefix)
	}
	for _, h := range c.Hashes() {
		if slices.Contains(other.Hashes(), h) {
			return conflict("the router credential is cell %s's", other.Name)
		}
	}
	if c.KeysFP != "" && c.KeysFP == other.KeysFP {
		return conflict("the root secret is cell %s's", other.Name)
	}
	for _, f := range []struct{ field, what string }{
		{tenancy.FieldIssuers, "issuer"}, {tenancy.FieldOIDC, "OIDC client"}, {tenancy.FieldTenants, "configured tenant"},
	} {
		theirs := other.Get(f.field)
		for _, v := range c.Get(f.field) {
			if slices.Contains(theirs, v) {
				return with(f.what, v)
			}
		}
	}
	return patterns(c, other)
}

// patterns: no pattern of one cell overlaps a pattern or a configured tenant of the
// other.
func patterns(c, other *Cell) error {
	for _, pair := range [][2]*Cell{{c, other}, {other, c}} {
		for _, p := range pair[0].Get(tenancy.FieldPatterns) {
			for _, q := range append(pair[1].Get(tenancy.FieldPatterns), pair[1].Get(tenancy.FieldTenants)...) {
				if Meets(p, q) {
					return conflict("tenant pattern %q of cell %s and %q of cell %s overlap", p, pair[0].Name, q, pair[1].Name)
				}
			}
		}
	}
	return nil
}

// Meets reports whether some tenant matches both patterns: a tenant, or a prefix of
// one followed by '*'.
func Meets(p, q string) bool {
	pp, pOpen := strings.CutSuffix(p, "*")
	qq, qOpen := strings.CutSuffix(q, "*")
	switch {
	case pOpen && qOpen:
		return strings.HasPrefix(pp, qq) || strings.HasPrefix(qq, pp)
	case pOpen:
		return strings.HasPrefix(qq, pp)
	case qOpen:
		return strings.HasPrefix(pp, qq)
	}
	return pp == qq
}

// Nested reports whether the prefix of one is, or is inside, that of the other, in a
// bucket of the same name. Cells without a bucket share none.
func Nested(a, b Stores) bool {
	if a.Bucket == "" || a.Bucket != b.Bucket {
		return false
	}
	p, q := strings.Trim(a.Prefix, "/"), strings.Trim(b.Prefix, "/")
	return p == "" || q == "" || strings.HasPrefix(p+"/", q+"/") || strings.HasPrefix(q+"/", p+"/")
}

// overlaps runs the refusals of the changed cell against every other.
func (ch *Change) overlaps() error {
	for i := range ch.Others {
		if err := Overlap(&ch.Cell, &ch.Others[i]); err != nil {
			return err
		}
	}
	return nil
}
