// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/cells"
)

func ecKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func sign(t *testing.T, alg jose.SignatureAlgorithm, key any, kid string, claims any) string {
	t.Helper()
	opts := new(jose.SignerOptions)
	if kid != "" {
		opts = opts.WithHeader("kid", kid)
	}
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, opts)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := jwt.Signed(s).Claims(claims).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func writeKeys(t *testing.T, keys ...jose.JSONWebKey) string {
	t.Helper()
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: keys})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "jwks.json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestVerified(t *testing.T) {
	key, other := ecKey(t), ecKey(t)
	path := writeKeys(t, jose.JSONWebKey{Key: &key.PublicKey, KeyID: "k1", Use: "sig", Algorithm: "ES256"})
	l, err := New([]Spec{
		{JWT: &JWTSpec{Claim: "org", JWKS: path, Algorithms: []string{"ES256"}, Issuer: "iss", Audience: "edge"}},
		{Fixed: "demo"},
	})
	if err != nil {
		t.Fatal(err)
	}
	claims := func(change func(m map[string]any)) map[string]any {
		m := map[string]any{"org": "acme", "iss": "iss", "aud": []string{"x", "edge"}, "exp": time.Now().Add(time.Hour).Unix()}
		if change != nil {
			change(m)
		}
		return m
	}
	good := sign(t, jose.ES256, key, "k1", claims(nil))
	parts := strings.Split(good, ".")
	forged := parts[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(`{"org":"evil","iss":"iss","aud":"edge","exp":99999999999}`)) + "." + parts[2]
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none"}`)) + "." + parts[1] + "."
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := json.Marshal(jose.JSONWebKey{Key: &key.PublicKey})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		tok    string
		tenant cells.TenantID
	}{
		"good":          {good, "acme"},
		"no kid":        {sign(t, jose.ES256, key, "", claims(nil)), "acme"},
		"no token":      {"", "demo"},
		"no claim":      {sign(t, jose.ES256, key, "k1", claims(func(m map[string]any) { delete(m, "org") })), "demo"},
		"forged":        {forged, ""},
		"none":          {none, ""},
		"other key":     {sign(t, jose.ES256, other, "k1", claims(nil)), ""},
		"other kid":     {sign(t, jose.ES256, key, "k2", claims(nil)), ""},
		"algorithm":     {sign(t, jose.RS256, rsaKey, "", claims(nil)), ""},
		"public as mac": {sign(t, jose.HS256, pub, "k1", claims(nil)), ""},
		"expired":       {sign(t, jose.ES256, key, "k1", claims(func(m map[string]any) { m["exp"] = time.Now().Add(-time.Hour).Unix() })), ""},
		"no exp":        {sign(t, jose.ES256, key, "k1", claims(func(m map[string]any) { delete(m, "exp") })), ""},
		"not yet":       {sign(t, jose.ES256, key, "k1", claims(func(m map[string]any) { m["nbf"] = time.Now().Add(time.Hour).Unix() })), ""},
		"issuer":        {sign(t, jose.ES256, key, "k1", claims(func(m map[string]any) { m["iss"] = "other" })), ""},
		"audience":      {sign(t, jose.ES256, key, "k1", claims(func(m map[string]any) { m["aud"] = "other" })), ""},
	} {
		t.Run(name, func(t *testing.T) {
			raw := "GET / HTTP/1.1\nHost: h"
			if c.tok != "" {
				raw += "\nAuthorization: Bearer " + c.tok
			}
			f, err := l.Resolve(request(t, raw))
			if c.tenant == "" {
				a := cells.AnswerOf(err)
				if a == nil || a.Code != cells.CodeUnknownIssuer {
					t.Fatalf("got %+v, %v", f, err)
				}
				if strings.Contains(a.Detail, parts[2]) {
					t.Fatal("the answer holds the token")
				}
				return
			}
			if err != nil || f.Tenant != c.tenant || f.Verified != (c.tenant == "acme") {
				t.Fatalf("got %+v, %v; want %s", f, err, c.tenant)
			}
		})
	}
}

func TestKeySetRefused(t *testing.T) {
	key := ecKey(t)
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Skip("the runtime refuses weak keys by itself")
	}
	for name, path := range map[string]string{
		"missing":   filepath.Join(t.TempDir(), "none.json"),
		"private":   writeKeys(t, jose.JSONWebKey{Key: key, KeyID: "k"}),
		"symmetric": writeKeys(t, jose.JSONWebKey{Key: []byte("0123456789abcdef0123456789abcdef"), KeyID: "k"}),
		"weak":      writeKeys(t, jose.JSONWebKey{Key: &weak.PublicKey, KeyID: "k"}),
		"empty":     writeKeys(t),
	} {
		if _, err := New([]Spec{{JWT: &JWTSpec{Claim: "org", JWKS: path}}}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
