// SPDX-License-Identifier: Apache-2.0

package claims_test

import (
	"encoding/base64"
	"errors"
	"testing"

	"github.com/cloister-dev/cloister/edge/internal/claims"
)

func seg(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) }

func TestShaped(t *testing.T) {
	for tok, want := range map[string]bool{
		seg(`{"alg":"ES256"}`) + ".x.y": true, seg(` {}`) + "..": true, base64.StdEncoding.EncodeToString([]byte(`{"a":"??>"}`)) + ".x.y": true,
		"": false, "a": false, "a.b": false, "a.b.c": false, seg(`{}`): false, seg(`{}`) + ".x": false, seg(`{}`) + ".x.y.z": false, seg(`[]`) + ".x.y": false,
		"v4.public.abc": false, ".x.y": false, seg(`"{"`) + ".x.y": false,
	} {
		if got := claims.Shaped(tok); got != want {
			t.Errorf("%q: %t", tok, got)
		}
	}
}

func TestIssuer(t *testing.T) {
	for payload, want := range map[string]string{
		`{"iss":"a"}`: "a", `{"x":{"iss":"b"},"iss":"a"}`: "a", `{"iss":""}`: "", `{"iss":"a\u0062"}`: "ab",
	} {
		if got, err := claims.Issuer("h." + seg(payload) + ".s"); err != nil || got != want {
			t.Errorf("%s: %q %v", payload, got, err)
		}
	}
	for _, payload := range []string{`{}`, `{"iss":null}`, `{"ISS":"a"}`} {
		if _, err := claims.Issuer("h." + seg(payload) + ".s"); !errors.Is(err, claims.ErrNone) {
			t.Errorf("%s: %v", payload, err)
		}
	}
	for _, payload := range []string{``, `[]`, `{"iss":1}`, `{"iss":["a"]}`, `{"iss":"a","iss":"a"}`, `{"iss":"a","\u0069ss":"b"}`, `{"iss":"a"`, `{"iss":"a"}{}`} {
		if got, err := claims.Issuer("h." + seg(payload) + ".s"); err == nil || errors.Is(err, claims.ErrNone) {
			t.Errorf("%s: %q %v", payload, got, err)
		}
	}
}
