// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// EmailKey is what a person's row is found by: made of an email, the same for every
// way to write it.
type EmailKey string

// MaxEmail bounds an email, in bytes.
const MaxEmail = 254

// NormalEmail is an email as it is compared: NFC, lower case, the domain in ASCII. The
// error wraps [cells.ErrInvalid].
func NormalEmail(s string) (string, error) {
	bad := fmt.Errorf("%w: %.100q is no email", cells.ErrInvalid, s)
	if len(s) > MaxEmail || !utf8.ValidString(s) {
		return "", bad
	}
	local, domain, ok := strings.Cut(s, "@")
	if !ok || local == "" || strings.ContainsAny(domain, "@:[]") ||
		strings.ContainsFunc(local, func(r rune) bool {
			return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune(`"(),:;<>[\]`, r)
		}) {
		return "", bad
	}
	domain, err := hostname.Normalize(domain)
	if err != nil || !strings.Contains(domain, ".") {
		return "", bad
	}
	// Lower case can undo the normal form, and the normal form lower case: until neither
	// changes anything.
	for range 4 {
		next := norm.NFC.String(strings.ToLower(local))
		if next == local {
			break
		}
		local = next
	}
	return local + "@" + domain, nil
}

// KeyOf is the key of an email. The error wraps [cells.ErrInvalid].
func KeyOf(email string) (EmailKey, error) {
	n, err := NormalEmail(email)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(n))
	return EmailKey(hex.EncodeToString(sum[:16])), nil
}
