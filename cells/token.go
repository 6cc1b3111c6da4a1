// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
)

// minKeyLen is the least number of bytes of a key that tokens and snapshots are
// made with.
const minKeyLen = 16

// tokenPrefix is the version of an admission token.
const tokenPrefix = "1."

// tokenLen is the length of every token of this version.
const tokenLen = len(tokenPrefix) + 43

// Labels keep what is made with one key for one purpose from being good for
// another.
const (
	labelToken    = "cloister admission token 1"
	labelCellKey  = "cloister cell key 1"
	labelSnapshot = "cloister routes snapshot 1"
)

// MintToken returns the admission token that says "whoever holds key sent this
// tenant's request to this cell because of the route at this epoch": a version
// and an HMAC-SHA256 of the three, 45 printable bytes. It is the same for the same
// arguments, so an edge may keep it for as long as the route stands. It is not
// bound to a request and it is good for as long as its epoch is; it is no secret
// from the service.
func MintToken(key []byte, tenant TenantID, cell CellID, epoch Epoch) string {
	m := hmac.New(sha256.New, key)
	var n [8]byte
	for _, s := range [...]string{labelToken, string(tenant), string(cell)} {
		binary.BigEndian.PutUint64(n[:], uint64(len(s)))
		m.Write(n[:])
		m.Write([]byte(s))
	}
	binary.BigEndian.PutUint64(n[:], uint64(epoch))
	m.Write(n[:])
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// VerifyToken reports whether token is what [MintToken] returns for the other
// arguments. The time it takes does not depend on where they differ. Keys of less
// than 16 bytes verify nothing.
func VerifyToken(key []byte, token string, tenant TenantID, cell CellID, epoch Epoch) bool {
	if len(key) < minKeyLen || len(token) != tokenLen {
		return false
	}
	return sameToken(token, MintToken(key, tenant, cell, epoch))
}

// sameToken compares in constant time, for equal lengths. Unlike the comparison of
// crypto/subtle it needs no copies of strings.
func sameToken(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	var diff byte
	for i := range len(a) {
		diff |= a[i] ^ b[i]
	}
	return diff == 0
}

// DeriveCellKey returns the admission key of one cell, from the fleet's master key
// of at least 16 bytes: 32 bytes by HKDF-SHA256. A cell that is given only its own
// cannot make tokens for another. It returns nil when master is too short.
func DeriveCellKey(master []byte, cell CellID) []byte {
	return deriveKey(master, labelCellKey+" "+string(cell))
}

func deriveKey(master []byte, label string) []byte {
	if len(master) < minKeyLen {
		return nil
	}
	key, err := hkdf.Key(sha256.New, master, nil, label, 32)
	if err != nil {
		return nil // only for lengths that HKDF cannot give
	}
	return key
}
