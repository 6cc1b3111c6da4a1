// SPDX-License-Identifier: Apache-2.0

package credential_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/internal/credential"
)

func TestForms(t *testing.T) {
	for _, k := range []credential.Kind{credential.Operator, credential.Router} {
		c, sum := k.New()
		if other, _ := k.New(); other == c {
			t.Fatal("two credentials are the same")
		}
		if got, err := k.Hash(c); err != nil || got != sum {
			t.Errorf("%s: %v, %v", k, got, err)
		}
		secret := strings.TrimPrefix(c, string(k))
		for _, wrong := range []string{"", secret, c + "0", c[:len(c)-1], strings.ToUpper(c), "lcx_" + secret, " " + c, c + "\n", string(k) + strings.Repeat("g", 128)} {
			if err := k.Check(wrong); !errors.Is(err, credential.ErrForm) || strings.Contains(err.Error(), secret) {
				t.Errorf("%s: %.20q: %v", k, wrong, err)
			}
		}
		if got, err := credential.ParseHash(sum.String()); err != nil || got != sum {
			t.Errorf("hash: %v, %v", got, err)
		}
		for _, wrong := range []string{"", c, secret, sum.String() + "0", strings.ToUpper(sum.String()), sum.String()[:63] + "g"} {
			if _, err := credential.ParseHash(wrong); !errors.Is(err, credential.ErrForm) || strings.Contains(err.Error(), secret) {
				t.Errorf("hash %.20q: %v", wrong, err)
			}
		}
		if credential.Among(c, nil) || !credential.Among(c, []credential.Hash{{}, sum}) || credential.Among(c+"0", []credential.Hash{sum}) {
			t.Error("Among")
		}
	}
	if credential.Operator.Check("lcr_"+strings.Repeat("0", 128)) == nil {
		t.Error("a router credential passes for an operator's")
	}
}

func TestPresented(t *testing.T) {
	for header, want := range map[string]string{"Bearer x": "x", "bearer x": "x", "Basic x": "", "": "", "x": "", "Bearer": ""} {
		h := http.Header{}
		h.Set("Authorization", header)
		if got := credential.Presented(h); got != want {
			t.Errorf("%q: %q", header, got)
		}
		if h.Add("Authorization", "Bearer y"); credential.Presented(h) != "" {
			t.Errorf("two headers were taken")
		}
	}
	if credential.Presented(http.Header{}) != "" {
		t.Error("no header is a credential")
	}
}
