// SPDX-License-Identifier: Apache-2.0

// Package idptest runs an OpenID Provider in a test, and signs its users in as a
// browser would. The provider is package idp's, and its state ends with the test; what
// goes wrong fails it.
package idptest

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/cloister-dev/cloister/services/idp"
)

// Provider is a provider at an address of its own.
type Provider struct {
	*idp.Provider
	// URL is its issuer.
	URL    string
	Client string
	// Down makes it answer 503 to everything; KeysRead counts the reads of its key set.
	Down     atomic.Bool
	KeysRead atomic.Int64

	t     testing.TB
	users []idp.User
}

// Start starts one, which ends with the test.
func Start(t testing.TB, client string, users ...idp.User) *Provider {
	t.Helper()
	p := &Provider{Client: client, t: t, users: users}
	var h http.Handler
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/keys" {
			p.KeysRead.Add(1)
		}
		if p.Down.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	var err error
	p.URL = srv.URL
	if p.Provider, err = idp.New(idp.Options{Issuer: srv.URL, Client: client, Users: users, Poll: 1}); err != nil {
		t.Fatal(err)
	}
	h = p.Handler()
	return p
}

// Browse signs a user in at an authorization request's address as a browser would,
// and returns where the provider sends it in the end: the client's callback.
func (p *Provider) Browse(address, name string) *url.URL {
	p.t.Helper()
	return Browse(p.t, address, name, p.password(name))
}

func (p *Provider) password(name string) string {
	for _, u := range p.users {
		if u.Name == name {
			return u.Password
		}
	}
	p.t.Fatalf("there is no user %s", name)
	return ""
}

// Browse is [Provider.Browse] for a provider elsewhere.
func Browse(t testing.TB, address, name, password string) *url.URL {
	t.Helper()
	c := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	where := func(resp *http.Response, err error) *url.URL {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		to, err := resp.Location()
		if err != nil {
			t.Fatalf("%s answers %d and leads nowhere", resp.Request.URL, resp.StatusCode)
		}
		return to
	}
	login := where(c.Get(address))
	callback := where(c.PostForm(login.String(), url.Values{"id": {login.Query().Get("id")}, "name": {name}, "password": {password}}))
	return where(c.Get(callback.String()))
}

// Approve signs a user in on the page of the device flow.
func (p *Provider) Approve(page, name string) {
	p.t.Helper()
	u, err := url.Parse(page)
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := http.PostForm(page, url.Values{"user_code": {u.Query().Get("user_code")}, "name": {name}, "password": {p.password(name)}})
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		p.t.Fatalf("the code is answered with %d", resp.StatusCode)
	}
}

// Token returns an access token of a user, by the authorization code with PKCE.
func (p *Provider) Token(name string) string {
	p.t.Helper()
	const verifier, back = "a-verifier-that-is-long-enough-for-the-protocol", "http://127.0.0.1:1/callback"
	sum := sha256.Sum256([]byte(verifier))
	to := p.Browse(p.URL+"/authorize?"+url.Values{"client_id": {p.Client}, "redirect_uri": {back}, "response_type": {"code"}, "scope": {"openid email"},
		"state": {"s"}, "code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])}, "code_challenge_method": {"S256"}}.Encode(), name)
	resp, err := http.PostForm(p.URL+"/oauth/token", url.Values{"grant_type": {"authorization_code"}, "code": {to.Query().Get("code")}, "redirect_uri": {back}, "client_id": {p.Client}, "code_verifier": {verifier}})
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	var out struct {
		Token string `json:"access_token"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || out.Token == "" {
		p.t.Fatalf("no token of %s: %d, %v", name, resp.StatusCode, err)
	}
	return out.Token
}
