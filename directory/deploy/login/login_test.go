// SPDX-License-Identifier: Apache-2.0

package login_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy/login"
	"github.com/cloister-dev/cloister/member/signin"
)

// provider is a deployment and its provider in one, that says what a test wants.
type provider struct {
	*httptest.Server
	document, device map[string]any
	token            string // what the token endpoint refuses with
	asked            []string
}

func newProvider(t *testing.T) *provider {
	p := &provider{}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.asked = append(p.asked, r.URL.Path)
		switch r.URL.Path {
		case signin.PathMetadata:
			_ = json.NewEncoder(w).Encode(signin.Metadata{Resource: "https://a.example", Servers: []string{p.URL}, Client: "c"})
		case "/.well-known/openid-configuration":
			_ = json.NewEncoder(w).Encode(p.document)
		case "/device":
			_ = json.NewEncoder(w).Encode(p.device)
		case "/token":
			w.WriteHeader(http.StatusBadRequest)
			_, _ = w.Write([]byte(p.token))
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(p.Close)
	p.document = map[string]any{"issuer": p.URL, "authorization_endpoint": p.URL + "/authorize", "token_endpoint": p.URL + "/token", "jwks_uri": p.URL + "/keys", "device_authorization_endpoint": p.URL + "/device"}
	p.device = map[string]any{"device_code": "d", "user_code": "AB\x1b[2JCD", "verification_uri": "https://x.example/v", "expires_in": 60, "interval": 1}
	return p
}

var badAddresses = []string{"http://x.example/a", "file:///etc/passwd", "javascript:alert(1)", "-a", "--help", "https:", "https://", "https://u:p@x.example/", "x.example", "//x.example/a", "smb://x.example/s", "https://x.example/\x1b[2J", "https://x.example/a b", " https://x.example/a", "HTTPS-x://x.example/", "https://x.example/" + strings.Repeat("a", 9000)}

// Nothing that a provider names is asked, shown or opened unless it is https, or http on
// a loopback address.
func TestAddressesOfTheProvider(t *testing.T) {
	run := func(what string, device bool, change func(*provider)) {
		t.Helper()
		p := newProvider(t)
		change(p)
		_, err := login.Run(t.Context(), login.Config{Host: p.URL, Device: device, Show: func(address, code string) { t.Errorf("%s: %s is shown", what, address) }})
		if !errors.Is(err, cells.ErrInvalid) || strings.ContainsFunc(err.Error(), unicode.IsControl) {
			t.Errorf("%s: %v", what, err)
		}
		for _, at := range p.asked {
			if at == "/token" || at == "/keys" {
				t.Errorf("%s: %s was asked", what, at)
			}
		}
	}
	for _, bad := range badAddresses {
		for what, device := range map[string]bool{"authorization_endpoint": false, "token_endpoint": false, "jwks_uri": false, "device_authorization_endpoint": true} {
			run(what+" "+bad, device, func(p *provider) { p.document[what] = bad })
		}
		run("token_endpoint for a device "+bad, true, func(p *provider) { p.document["token_endpoint"] = bad })
		for _, what := range []string{"verification_uri", "verification_uri_complete"} {
			run(what+" "+bad, true, func(p *provider) { p.device[what] = bad })
		}
		if err := login.CheckAddress(bad); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, good := range []string{"https://x.example/a?b=c", "http://127.0.0.1:80/", "http://[::1]/x", "http://localhost:1/", "https://x.example"} {
		if err := login.CheckAddress(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// What a provider answers is bounded, and shown without what a terminal would act on.
func TestTextsOfTheProvider(t *testing.T) {
	p := newProvider(t)
	p.token = "no\x1b]0;x\x07\r\u202e" + strings.Repeat("x", 5000)
	shown := ""
	begun := time.Now()
	_, err := login.Run(t.Context(), login.Config{Host: p.URL, Device: true, Show: func(address, code string) { shown = address + " " + code }})
	if shown != "https://x.example/v AB[2JCD" {
		t.Errorf("shown: %q", shown)
	}
	if err == nil || strings.ContainsFunc(err.Error(), func(r rune) bool { return !unicode.IsPrint(r) }) || len(err.Error()) > 1200 || !strings.Contains(err.Error(), "not approved") {
		t.Errorf("after %s: %q", time.Since(begun), err)
	}
	p.document["filler"] = strings.Repeat("x", 2<<20)
	if _, err := login.Run(t.Context(), login.Config{Host: p.URL, Show: func(string, string) { t.Error("shown") }}); !errors.Is(err, cells.ErrUnavailable) || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("a long document: %v", err)
	}
}
