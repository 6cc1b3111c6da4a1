// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/credential"
)

// scimPrefix begins every SCIM token that names a cell.
const scimPrefix = "lsc_"

// NewSCIMToken makes a SCIM token that names its cell, lsc_<cell>_ and 128 lowercase
// hexadecimal digits, and its SHA-256. It is shown once and kept nowhere here. A cell's
// name has no '_', so a token of cell a-b is none of cell a. The error wraps
// [cells.ErrInvalid].
func NewSCIMToken(cell cells.CellID) (token string, hash credential.Hash, err error) {
	if err := cell.Validate(); err != nil {
		return "", credential.Hash{}, err
	}
	token, hash = credential.Kind(scimPrefix + string(cell) + "_").New()
	return token, hash, nil
}

// minSCIMSecret and maxSCIMSecret bound the secret of a token that names a cell, in
// hexadecimal digits.
const minSCIMSecret, maxSCIMSecret = 32, 1024

// SCIMTokenCell returns the cell that a SCIM token names, "" for one that begins
// otherwise and names none. One that begins as a named token and is not
// lsc_<cell>_<32 or more lowercase hexadecimal digits> in full is nobody's: the error
// wraps [cells.ErrInvalid] and does not hold the token.
func SCIMTokenCell(token string) (cells.CellID, error) {
	rest, ok := strings.CutPrefix(token, scimPrefix)
	if !ok {
		return "", nil
	}
	name, secret, _ := strings.Cut(rest, "_")
	if cells.CellID(name).Validate() != nil || len(secret) < minSCIMSecret || len(secret) > maxSCIMSecret || strings.Trim(secret, "0123456789abcdef") != "" {
		return "", fmt.Errorf("%w: a SCIM token that names a cell is %s<cell>_ and %d or more lowercase hexadecimal digits", cells.ErrInvalid, scimPrefix, minSCIMSecret)
	}
	return cells.CellID(name), nil
}
