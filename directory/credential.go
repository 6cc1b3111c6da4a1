// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/credential"
)

// CredentialPrefix begins every operator credential.
const CredentialPrefix = string(credential.Operator)

// NewOperatorCredential makes a credential and the SHA-256 that a directory is
// configured with. The credential is shown once and stored nowhere by this
// package.
func NewOperatorCredential() (cred, sha256Hex string) {
	cred, sum := credential.Operator.New()
	return cred, sum.String()
}

// HashOperatorCredential returns the SHA-256 of a credential as a directory is
// configured with it. The error wraps [cells.ErrInvalid] and never contains the
// credential.
func HashOperatorCredential(cred string) (string, error) {
	sum, err := credential.Operator.Hash(cred)
	if err != nil {
		return "", fmt.Errorf("%w: operator %w", cells.ErrInvalid, err)
	}
	return sum.String(), nil
}

// CheckOperatorCredential reports whether the credential is well formed: lco_ and
// 128 lowercase hex digits. The error wraps [cells.ErrInvalid] and never contains
// the credential.
func CheckOperatorCredential(cred string) error {
	_, err := HashOperatorCredential(cred)
	return err
}

// parseHashes reads the hashes of the accepted credentials.
func parseHashes(list []string) ([]credential.Hash, error) {
	out := make([]credential.Hash, len(list))
	for i, s := range list {
		var err error
		if out[i], err = credential.ParseHash(s); err != nil {
			return nil, fmt.Errorf("%w: operator %w", cells.ErrInvalid, err)
		}
	}
	return out, nil
}
