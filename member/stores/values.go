// SPDX-License-Identifier: Apache-2.0

package stores

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
)

// DeploymentID names a deployment for ever: 32 lower case hexadecimal digits, made
// at random when its authority was first opened.
type DeploymentID string

// Nonce is a value that is used once: 64 lower case hexadecimal digits.
type Nonce string

// Mark is an isolation probe's name: 32 lower case hexadecimal digits.
type Mark string

// NewDeploymentID returns a random id.
func NewDeploymentID() DeploymentID { return DeploymentID(random(16)) }

// NewNonce returns a random nonce.
func NewNonce() Nonce { return Nonce(random(32)) }

// NewMark returns a random mark.
func NewMark() Mark { return Mark(random(16)) }

func random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// Validate returns [cells.ErrInvalid] for anything but an id.
func (d DeploymentID) Validate() error { return checkHex("deployment id", string(d), 32) }

// Validate returns [cells.ErrInvalid] for anything but a nonce.
func (n Nonce) Validate() error { return checkHex("nonce", string(n), 64) }

// Validate returns [cells.ErrInvalid] for anything but a mark.
func (m Mark) Validate() error { return checkHex("mark", string(m), 32) }

// Validate returns [cells.ErrInvalid] for anything but a kind.
func (k Kind) Validate() error {
	if k == "" || len(k) > 32 {
		return fmt.Errorf("%w: a store's kind has 1 to 32 letters and digits", cells.ErrInvalid)
	}
	for _, c := range []byte(k) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return fmt.Errorf("%w: a store's kind is %q; want lower case letters and digits", cells.ErrInvalid, string(k))
		}
	}
	return nil
}

// checkHex does not repeat the value: what was stored under a reserved name may be
// anything.
func checkHex(what, s string, n int) error {
	if len(s) != n {
		return fmt.Errorf("%w: a %s has %d lower case hexadecimal digits; this has %d bytes", cells.ErrInvalid, what, n, len(s))
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return fmt.Errorf("%w: a %s has %d lower case hexadecimal digits and nothing else", cells.ErrInvalid, what, n)
		}
	}
	return nil
}

// NonTenants are the values of a tenant column that name no tenant.
var NonTenants = []string{"", "-", "*"}

// TenantColumns are the names of tenant columns that the database variants look
// for unless they are told others.
var TenantColumns = []string{"tenant", "tenant_id"}
