// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cloister-dev/cloister/cells"
)

// The key that a fleet's directories sign receipts with, and its public half.
const (
	ReceiptKeyFile    = "receipt.key"
	ReceiptPublicFile = "receipt.pub"
)

// EnsureReceiptKey makes the Ed25519 key that receipts are signed with in the folder
// dir, unless there is one, and writes its public half beside it. It returns the paths
// of both. The folder is that of the CA; only the private key is secret.
func EnsureReceiptKey(dir string) (key, public string, err error) {
	key, public = filepath.Join(dir, ReceiptKeyFile), filepath.Join(dir, ReceiptPublicFile)
	unlock, err := (&Authority{dir: dir}).lock()
	if err != nil {
		return "", "", err
	}
	defer unlock()
	if _, err := os.Stat(key); errors.Is(err, fs.ErrNotExist) {
		_, fresh, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return "", "", err
		}
		der, err := x509.MarshalPKCS8PrivateKey(fresh)
		if err != nil {
			return "", "", err
		}
		block := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
		if err := createFile(key, block, 0o600); err != nil {
			return "", "", err
		}
	}
	private, err := ReadReceiptKey(key)
	if err != nil {
		return "", "", err
	}
	block, err := PublicPEM(private.Public().(ed25519.PublicKey))
	if err != nil {
		return "", "", err
	}
	keys, err := ReadPublicKeys(public)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createFile(public, block, 0o644); err != nil {
			return "", "", err
		}
		return key, public, nil
	}
	if err != nil {
		return "", "", err
	}
	for _, k := range keys {
		if k.Equal(private.Public()) {
			return key, public, nil
		}
	}
	return "", "", fmt.Errorf("%w: pki: %s does not hold the public half of %s; add it, or move the file away", cells.ErrInvalid, public, key)
}

// PublicPEM writes a public key as [ReadPublicKeys] reads it.
func PublicPEM(k ed25519.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(k)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// ReadReceiptKey reads a private key that [EnsureReceiptKey] has made. Errors wrap
// [cells.ErrInvalid] when the file holds something else.
func ReadReceiptKey(path string) (ed25519.PrivateKey, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("pki: receipt key: %w", err)
	}
	blk, rest := pem.Decode(b)
	if blk == nil || blk.Type != "PRIVATE KEY" || len(rest) > 0 {
		return nil, fmt.Errorf("%w: pki: %s holds no PKCS #8 key in PEM", cells.ErrInvalid, path)
	}
	k, err := x509.ParsePKCS8PrivateKey(blk.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: pki: %s: the key cannot be parsed", cells.ErrInvalid, path)
	}
	key, ok := k.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%w: pki: %s holds a %T, want an Ed25519 key", cells.ErrInvalid, path, k)
	}
	return key, nil
}

// ReadPublicKeys reads one or more Ed25519 public keys, in PEM one behind the other:
// older ones are kept so that older receipts go on verifying. Errors as
// [ReadReceiptKey].
func ReadPublicKeys(path string) ([]ed25519.PublicKey, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("pki: public key: %w", err)
	}
	var out []ed25519.PublicKey
	for {
		var blk *pem.Block
		if blk, b = pem.Decode(b); blk == nil {
			break
		}
		k, err := x509.ParsePKIXPublicKey(blk.Bytes)
		key, ok := k.(ed25519.PublicKey)
		if blk.Type != "PUBLIC KEY" || err != nil || !ok {
			return nil, fmt.Errorf("%w: pki: %s holds something else than Ed25519 public keys in PEM", cells.ErrInvalid, path)
		}
		out = append(out, key)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: pki: %s holds no public key in PEM", cells.ErrInvalid, path)
	}
	return out, nil
}
