// SPDX-License-Identifier: Apache-2.0

package stores

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cloister-dev/cloister/cells"
)

// Reserved begins the names of what this package keeps below a bucket's prefix. No
// prefix has a segment that begins so, and a service writes no such object.
const Reserved = "_cell_"

// maxPrefix leaves room for a service's own names: an object's name has at most
// 1024 bytes.
const maxPrefix = 512

// Location says where in which bucket a cell's objects are. The zero Location is
// that of a cell without a bucket. A bucket is known by its name alone, whatever
// the endpoint: see [Location.Overlaps].
type Location struct {
	// Bucket is the bucket's name.
	Bucket string `json:"bucket,omitempty"`
	// Prefix begins the names of the cell's objects, up to a slash that is not part of
	// it: "a/b" has "a/b/x" and not "a/bc". "" is the whole bucket.
	Prefix string `json:"prefix,omitempty"`
}

// IsZero reports whether there is no bucket.
func (l Location) IsZero() bool { return l == Location{} }

// String returns the location for people: bucket/prefix, or "none".
func (l Location) String() string {
	if l.IsZero() {
		return "none"
	}
	return strings.TrimSuffix(l.Bucket+"/"+l.Prefix, "/")
}

// Validate returns [cells.ErrInvalid] unless the location is zero, or a bucket's
// name (3 to 63 lower case letters, digits, dots and hyphens) with a prefix as
// [ParsePrefix] returns it.
func (l Location) Validate() error {
	if l.IsZero() {
		return nil
	}
	if err := checkBucket(l.Bucket); err != nil {
		return err
	}
	p, err := ParsePrefix(l.Prefix)
	if err != nil {
		return err
	}
	if p != l.Prefix {
		return fmt.Errorf("%w: the prefix %q is not in its normal form %q", cells.ErrInvalid, l.Prefix, p)
	}
	return nil
}

// Overlaps reports whether two cells' objects could be the same: the buckets have
// the same name, and one prefix is the other, or is above it. Endpoints are not
// looked at, so that an endpoint taken from the environment cannot lead into
// another cell's objects. Cells without a bucket overlap nobody.
func (l Location) Overlaps(o Location) bool {
	if l.Bucket == "" || o.Bucket == "" || l.Bucket != o.Bucket {
		return false
	}
	return holds(l.Prefix, o.Prefix) || holds(o.Prefix, l.Prefix)
}

// holds reports whether outer is inner or a folder above it.
func holds(outer, inner string) bool {
	return outer == "" || inner == outer || strings.HasPrefix(inner, outer+"/")
}

// Key returns the full name of an object of the cell.
func (l Location) Key(name string) string {
	if l.Prefix == "" {
		return name
	}
	return l.Prefix + "/" + name
}

// ParsePrefix reads a prefix as people write it and returns its normal form, without
// slashes at its ends. A prefix that could be read in two ways is refused with
// [cells.ErrInvalid]: empty segments, "." and "..", backslashes, control
// characters, text that is not UTF-8, segments that begin with [Reserved], and more
// than 512 bytes.
func ParsePrefix(s string) (string, error) {
	bad := func(what string) (string, error) {
		return "", fmt.Errorf("%w: the bucket's prefix %.80q %s", cells.ErrInvalid, s, what)
	}
	p := strings.TrimSuffix(strings.TrimPrefix(s, "/"), "/")
	if p == "" {
		if s == "" || s == "/" {
			return "", nil
		}
		return bad("has an empty segment")
	}
	if len(p) > maxPrefix {
		return bad(fmt.Sprintf("is longer than %d bytes", maxPrefix))
	}
	if !utf8.ValidString(p) {
		return bad("is not UTF-8")
	}
	for _, r := range p {
		if unicode.IsControl(r) || r == '\\' || r == utf8.RuneError {
			return bad("has a character that stores read differently")
		}
	}
	for seg := range strings.SplitSeq(p, "/") {
		switch {
		case seg == "":
			return bad("has an empty segment")
		case seg == "." || seg == "..":
			return bad("has a segment . or ..")
		case strings.HasPrefix(seg, Reserved):
			return bad("has a segment that begins with " + Reserved)
		}
	}
	return p, nil
}

func checkBucket(s string) error {
	if len(s) < 3 || len(s) > 63 {
		return fmt.Errorf("%w: the bucket's name %.80q has not 3 to 63 characters", cells.ErrInvalid, s)
	}
	for i, c := range []byte(s) {
		letter := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !letter && c != '-' && c != '.' {
			return fmt.Errorf("%w: the bucket's name %q has something else than lower case letters, digits, dots and hyphens", cells.ErrInvalid, s)
		}
		if !letter && (i == 0 || i == len(s)-1) || c == '.' && s[i-1] == '.' {
			return fmt.Errorf("%w: the bucket's name %q begins or ends with a dot or hyphen, or has two dots in a row", cells.ErrInvalid, s)
		}
	}
	return nil
}
