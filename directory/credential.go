// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// CredentialPrefix begins every operator credential.
const CredentialPrefix = "lco_"

const credentialBytes = 64 // 512 bits, 128 hex digits

// NewOperatorCredential makes a credential and the SHA-256 that a directory is
// configured with. The credential is shown once and stored nowhere by this
// package.
func NewOperatorCredential() (credential, sha256Hex string) {
	var b [credentialBytes]byte
	rand.Read(b[:]) //nolint:errcheck // crypto/rand.Read never fails; it ends the program instead.
	credential = CredentialPrefix + hex.EncodeToString(b[:])
	sum := sha256.Sum256([]byte(credential))
	return credential, hex.EncodeToString(sum[:])
}

// HashOperatorCredential returns the SHA-256 of a credential as a directory is
// configured with it. The error wraps [cells.ErrInvalid] and never contains the
// credential.
func HashOperatorCredential(credential string) (string, error) {
	if err := CheckOperatorCredential(credential); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(credential))
	return hex.EncodeToString(sum[:]), nil
}

// CheckOperatorCredential reports whether the credential is well formed: lco_ and
// 128 lowercase hex digits. The error wraps [cells.ErrInvalid] and never contains
// the credential.
func CheckOperatorCredential(credential string) error {
	rest, ok := strings.CutPrefix(credential, CredentialPrefix)
	if !ok || len(rest) != 2*credentialBytes || !lowerHex(rest) {
		return fmt.Errorf("%w: an operator credential is %s and %d lowercase hex digits", cells.ErrInvalid, CredentialPrefix, 2*credentialBytes)
	}
	return nil
}

func parseHash(s string) ([sha256.Size]byte, error) {
	var out [sha256.Size]byte
	if len(s) != 2*sha256.Size || !lowerHex(s) {
		return out, fmt.Errorf("%w: an operator credential's SHA-256 is %d lowercase hex digits; give the hash, never the credential",
			cells.ErrInvalid, 2*sha256.Size)
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

// verifier knows the hashes of the accepted credentials.
type verifier [][sha256.Size]byte

func newVerifier(hashes []string) (verifier, error) {
	var v verifier
	for _, h := range hashes {
		b, err := parseHash(h)
		if err != nil {
			return nil, err
		}
		v = append(v, b)
	}
	return v, nil
}

// accepts compares in constant time with every hash.
func (v verifier) accepts(credential string) bool {
	sum := sha256.Sum256([]byte(credential))
	ok := 0
	for i := range v {
		ok |= subtle.ConstantTimeCompare(sum[:], v[i][:])
	}
	return ok == 1
}
