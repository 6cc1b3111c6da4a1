// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// A key set follows its file: a new key is taken up, a removed one is gone, and what
// cannot be read leaves the last one in use.
func TestKeysFollowTheirFile(t *testing.T) {
	one, two := ecKey(t), ecKey(t)
	jwk := func(id string, pub any) jose.JSONWebKey { return jose.JSONWebKey{Key: pub, KeyID: id, Use: "sig"} }
	path := writeKeys(t, jwk("one", &one.PublicKey))
	replace := func(with string) {
		t.Helper()
		if err := os.Rename(with, path); err != nil {
			t.Fatal(err)
		}
	}
	var logs bytes.Buffer
	k, err := newKeyFile(path, slog.New(slog.NewTextHandler(&logs, nil)))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	ids := func(later time.Duration) string {
		now = now.Add(later)
		var out []string
		for _, key := range k.get(now).Keys {
			out = append(out, key.KeyID)
		}
		return strings.Join(out, " ")
	}
	replace(writeKeys(t, jwk("one", &one.PublicKey), jwk("two", &two.PublicKey)))
	if got := ids(time.Second); got != "one" {
		t.Fatal("it was read before its time:", got)
	}
	if got := ids(2 * time.Second); got != "one two" {
		t.Fatal(got)
	}
	for range 3 {
		if err := os.WriteFile(path, []byte(`{"keys":[`), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := ids(keysEvery); got != "one two" {
			t.Fatal("half a file was taken:", got)
		}
	}
	private := writeKeys(t, jwk("three", two))
	replace(private)
	if got := ids(keysEvery); got != "one two" {
		t.Fatal("a private key was taken:", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if got := ids(keysEvery); got != "one two" {
		t.Fatal("the file is gone, and with it the keys:", got)
	}
	if n := strings.Count(logs.String(), "cannot be read again"); n != 3 {
		t.Errorf("three failures are told %d times:\n%s", n, logs.String())
	}
	replace(writeKeys(t, jwk("two", &two.PublicKey)))
	if got := ids(keysEvery); got != "two" {
		t.Fatal(got)
	}
}

// The extractor uses what is in the file now.
func TestVerifiedByNewKeys(t *testing.T) {
	one, two := ecKey(t), ecKey(t)
	path := writeKeys(t, jose.JSONWebKey{Key: &one.PublicKey, KeyID: "one"})
	l, err := New([]Spec{{JWT: &JWTSpec{Claim: "org", JWKS: path}}}, WithLog(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]any{"org": "acme", "exp": time.Now().Add(time.Hour).Unix()}
	asks := func(tok string) error {
		_, err := l.Resolve(request(t, "GET / HTTP/1.1\nHost: h\nAuthorization: Bearer "+tok))
		return err
	}
	old, fresh := sign(t, jose.ES256, one, "one", claims), sign(t, jose.ES256, two, "two", claims)
	if asks(old) != nil || asks(fresh) == nil {
		t.Fatal("before:", asks(old), asks(fresh))
	}
	if err := os.Rename(writeKeys(t, jose.JSONWebKey{Key: &two.PublicKey, KeyID: "two"}), path); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for asks(old) == nil || asks(fresh) != nil {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("after:", asks(old), asks(fresh))
		}
	}
}
