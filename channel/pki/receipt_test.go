// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/ed25519"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func TestReceiptKey(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadReceiptKey(filepath.Join(dir, ReceiptKeyFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("none yet: %v", err)
	}
	var wg sync.WaitGroup
	for range 4 { // whoever is first makes it
		wg.Go(func() {
			if _, _, err := EnsureReceiptKey(dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	key, public, err := EnsureReceiptKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(key); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	private, err := ReadReceiptKey(key)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ReadPublicKeys(public)
	if err != nil || len(keys) != 1 || !keys[0].Equal(private.Public()) {
		t.Fatalf("%v, %v", keys, err)
	}
	// Keys of older receipts are kept in front or behind.
	old, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := PublicPEM(old)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(public)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(public, append(a, b...), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := EnsureReceiptKey(dir); err != nil {
		t.Error(err)
	}
	if keys, err := ReadPublicKeys(public); err != nil || len(keys) != 2 || !keys[0].Equal(old) {
		t.Errorf("%v, %v", keys, err)
	}
	// A public key that is not the private one's is noticed.
	if err := os.WriteFile(public, a, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := EnsureReceiptKey(dir); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("%v", err)
	}
	for _, content := range []string{"", "x", string(b[:20]), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
		if err := os.WriteFile(public, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadPublicKeys(public); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", content, err)
		}
		if _, err := ReadReceiptKey(public); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q as a private key: %v", content, err)
		}
	}
}
