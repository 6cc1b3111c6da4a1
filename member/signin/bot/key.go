// SPDX-License-Identifier: Apache-2.0

package bot

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"

	"github.com/go-jose/go-jose/v4"

	"github.com/cloister-dev/cloister/cells"
)

// maxKey bounds a key as it is written, in bytes.
const maxKey = 4 << 10

// NewKey makes an Ed25519 key, as a private and as a public JSON Web Key, and its
// thumbprint.
func NewKey() (private, public []byte, thumbprint string, err error) {
	_, k, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, "", err
	}
	whole := jose.JSONWebKey{Key: k, Algorithm: string(jose.EdDSA), Use: "sig"}
	half := whole.Public()
	if private, err = whole.MarshalJSON(); err != nil {
		return nil, nil, "", err
	}
	if public, err = half.MarshalJSON(); err != nil {
		return nil, nil, "", err
	}
	thumbprint, err = thumb(&half)
	return private, public, thumbprint, err
}

func thumb(k *jose.JSONWebKey) (string, error) {
	b, err := k.Thumbprint(crypto.SHA256)
	return base64.RawURLEncoding.EncodeToString(b), err
}

// Public reads a key, private or public, and returns its public half as it is kept and
// its thumbprint (RFC 7638, SHA-256). Keys are Ed25519 or P-256. The error wraps
// [cells.ErrInvalid] and does not hold the key.
func Public(key []byte) (public []byte, thumbprint string, err error) {
	k, err := parse(key)
	if err != nil {
		return nil, "", err
	}
	half := jose.JSONWebKey{Key: k.Public().Key, Algorithm: string(algorithm(k)), Use: "sig"}
	if public, err = half.MarshalJSON(); err != nil {
		return nil, "", err
	}
	thumbprint, err = thumb(&half)
	return public, thumbprint, err
}

func parse(key []byte) (*jose.JSONWebKey, error) {
	var k jose.JSONWebKey
	if len(key) > maxKey || json.Unmarshal(key, &k) != nil || !k.Valid() || algorithm(&k) == "" || k.Algorithm != "" && k.Algorithm != string(algorithm(&k)) {
		return nil, fmt.Errorf("%w: a bot's key is a JSON Web Key of type Ed25519 or P-256", cells.ErrInvalid)
	}
	return &k, nil
}

// algorithm is what a key signs with; "" for one that is no bot's.
func algorithm(k *jose.JSONWebKey) jose.SignatureAlgorithm {
	switch key := k.Key.(type) {
	case ed25519.PrivateKey, ed25519.PublicKey:
		return jose.EdDSA
	case *ecdsa.PrivateKey:
		if key.Curve == elliptic.P256() {
			return jose.ES256
		}
	case *ecdsa.PublicKey:
		if key.Curve == elliptic.P256() {
			return jose.ES256
		}
	}
	return ""
}
