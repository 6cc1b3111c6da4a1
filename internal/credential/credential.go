// SPDX-License-Identifier: Apache-2.0

// Package credential makes and checks the long random credentials of operators and
// cells: a prefix and 128 lowercase hexadecimal digits (512 bits). Whoever verifies
// one keeps its SHA-256 only. 512 bits are not guessed, so verifying needs no delay
// and no lockout; comparing takes the same time whatever is presented. No error holds
// what it is about.
package credential

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// Kind is the prefix of one kind of credential.
type Kind string

const (
	// Operator may do everything that a directory or a router does for operators.
	Operator Kind = "lco_"
	// Router is what a cell calls the router with.
	Router Kind = "lcr_"
)

// secretBytes are the random bytes of a credential.
const secretBytes = 64

// ErrForm: a credential or a hash of one has another form. Returned by Check, Hash
// and ParseHash.
var ErrForm = errors.New("credential")

// Hash is the SHA-256 of a credential.
type Hash [sha256.Size]byte

// String is the hash in lowercase hexadecimal.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// New makes a credential and its hash. It is shown once and kept nowhere here.
func (k Kind) New() (credential string, hash Hash) {
	var b [secretBytes]byte
	rand.Read(b[:]) //nolint:errcheck // crypto/rand.Read never fails; it ends the program instead.
	credential = string(k) + hex.EncodeToString(b[:])
	return credential, Of(credential)
}

// Check reports whether the credential is of this kind and well formed. The error
// wraps [ErrForm].
func (k Kind) Check(credential string) error {
	rest, ok := strings.CutPrefix(credential, string(k))
	if !ok || len(rest) != 2*secretBytes || !lowerHex(rest) {
		return fmt.Errorf("%w: it must be %s and %d lowercase hex digits", ErrForm, k, 2*secretBytes)
	}
	return nil
}

// Hash checks the credential and returns its hash. The error wraps [ErrForm].
func (k Kind) Hash(credential string) (Hash, error) {
	if err := k.Check(credential); err != nil {
		return Hash{}, err
	}
	return Of(credential), nil
}

// Of is the hash of what was presented, whatever it is.
func Of(presented string) Hash { return sha256.Sum256([]byte(presented)) }

// ParseHash reads a hash: 64 lowercase hexadecimal digits, so neither a credential
// nor the secret in one is taken for it. The error wraps [ErrForm].
func ParseHash(s string) (Hash, error) {
	var out Hash
	if len(s) != 2*sha256.Size || !lowerHex(s) {
		return out, fmt.Errorf("%w: its SHA-256 is %d lowercase hex digits; give the hash, never the credential", ErrForm, 2*sha256.Size)
	}
	_, err := hex.Decode(out[:], []byte(s))
	return out, err
}

func lowerHex(s string) bool {
	for i := range len(s) {
		if (s[i] < '0' || s[i] > '9') && (s[i] < 'a' || s[i] > 'f') {
			return false
		}
	}
	return true
}

// Among reports whether the presented credential's hash is one of accepted, in a time
// that depends on their number only.
func Among(presented string, accepted []Hash) bool {
	sum, ok := Of(presented), 0
	for i := range accepted {
		ok |= subtle.ConstantTimeCompare(sum[:], accepted[i][:])
	}
	return ok == 1
}

// Presented returns the bearer token of a request's headers; "" when there is none,
// or more than one Authorization header.
func Presented(h http.Header) string {
	if list := h.Values("Authorization"); len(list) == 1 {
		if scheme, token, _ := strings.Cut(list[0], " "); strings.EqualFold(scheme, "Bearer") {
			return token
		}
	}
	return ""
}
