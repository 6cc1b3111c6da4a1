// SPDX-License-Identifier: Apache-2.0

package idp

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/zitadel/oidc/v3/pkg/oidc"
	"github.com/zitadel/oidc/v3/pkg/op"
)

var errUnknown = errors.New("idp: not known")

// storage is what the library asks.
type storage struct{ p *Provider }

var (
	_ op.Storage                        = storage{}
	_ op.DeviceAuthorizationStorage     = storage{}
	_ op.CanSetUserinfoFromRequest      = storage{}
	_ op.CanGetPrivateClaimsFromRequest = storage{}
)

func (s storage) CreateAuthRequest(_ context.Context, r *oidc.AuthRequest, subject string) (op.AuthRequest, error) {
	if r.CodeChallenge == "" || r.CodeChallengeMethod != oidc.CodeChallengeMethodS256 {
		return nil, oidc.ErrInvalidRequest().WithDescription("PKCE with S256 is required")
	}
	if slices.Contains(r.Prompt, "none") {
		return nil, oidc.ErrLoginRequired()
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	req := &request{AuthRequest: r, id: rand.Text(), subject: subject}
	s.p.requests[req.id] = req
	return req, nil
}

func (s storage) AuthRequestByID(_ context.Context, id string) (op.AuthRequest, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if r := s.p.requests[id]; r != nil {
		return r, nil
	}
	return nil, errUnknown
}

func (s storage) AuthRequestByCode(ctx context.Context, code string) (op.AuthRequest, error) {
	s.p.mu.Lock()
	id, ok := s.p.codes[code]
	s.p.mu.Unlock()
	if !ok {
		return nil, errUnknown
	}
	return s.AuthRequestByID(ctx, id)
}

func (s storage) SaveAuthCode(_ context.Context, id, code string) error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.codes[code] = id
	return nil
}

func (s storage) DeleteAuthRequest(_ context.Context, id string) error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	delete(s.p.requests, id)
	for code, of := range s.p.codes {
		if of == id {
			delete(s.p.codes, code)
		}
	}
	return nil
}

func (s storage) CreateAccessToken(context.Context, op.TokenRequest) (string, time.Time, error) {
	return rand.Text(), time.Now().Add(s.p.o.Lifetime), nil
}

func (s storage) CreateAccessAndRefreshTokens(_ context.Context, r op.TokenRequest, current string) (string, string, time.Time, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if current != "" {
		if s.p.refresh[current] == nil {
			return "", "", time.Time{}, op.ErrInvalidRefreshToken
		}
		delete(s.p.refresh, current)
	}
	next := rand.Text()
	s.p.refresh[next] = &request{AuthRequest: &oidc.AuthRequest{ClientID: s.p.o.Client, Scopes: r.GetScopes()}, subject: r.GetSubject(), at: time.Now()}
	return rand.Text(), next, time.Now().Add(s.p.o.Lifetime), nil
}

func (s storage) TokenRequestByRefreshToken(_ context.Context, token string) (op.RefreshTokenRequest, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if r := s.p.refresh[token]; r != nil {
		return r, nil
	}
	return nil, op.ErrInvalidRefreshToken
}

func (s storage) TerminateSession(_ context.Context, subject, _ string) error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	for t, r := range s.p.refresh {
		if r.subject == subject {
			delete(s.p.refresh, t)
		}
	}
	return nil
}

func (s storage) RevokeToken(_ context.Context, token, _, _ string) *oidc.Error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	delete(s.p.refresh, token)
	return nil
}

func (s storage) GetRefreshTokenInfo(_ context.Context, _, token string) (string, string, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if r := s.p.refresh[token]; r != nil {
		return r.subject, token, nil
	}
	return "", "", op.ErrInvalidRefreshToken
}

func (s storage) SigningKey(context.Context) (op.SigningKey, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	return s.p.keys[0], nil
}

func (s storage) SignatureAlgorithms(context.Context) ([]jose.SignatureAlgorithm, error) {
	return []jose.SignatureAlgorithm{jose.ES256}, nil
}

func (s storage) KeySet(context.Context) (out []op.Key, err error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	for _, k := range s.p.keys {
		out = append(out, public{k})
	}
	return out, nil
}

func (s storage) GetClientByClientID(_ context.Context, id string) (op.Client, error) {
	if id != s.p.o.Client {
		return nil, errUnknown
	}
	return client{s.p.o.Client, s.p.o.Lifetime}, nil
}

// AuthorizeClientIDSecret refuses: the client is public and has no secret.
func (s storage) AuthorizeClientIDSecret(context.Context, string, string) error { return errUnknown }

func (s storage) SetUserinfoFromScopes(context.Context, *oidc.UserInfo, string, string, []string) error {
	return nil
}

func (s storage) SetUserinfoFromRequest(_ context.Context, info *oidc.UserInfo, r op.IDTokenRequest, _ []string) error {
	return s.userinfo(info, r.GetSubject())
}

func (s storage) SetUserinfoFromToken(_ context.Context, info *oidc.UserInfo, _, subject, _ string) error {
	return s.userinfo(info, subject)
}

func (s storage) userinfo(info *oidc.UserInfo, subject string) error {
	u := s.bySubject(subject)
	if u == nil {
		return errUnknown
	}
	info.Subject, info.Email, info.EmailVerified = subject, u.Email, oidc.Bool(u.Verified)
	return nil
}

func (s storage) bySubject(subject string) *User {
	for i := range s.p.o.Users {
		if s.p.o.Users[i].Subject == subject {
			return &s.p.o.Users[i]
		}
	}
	return nil
}

// SetIntrospectionFromToken refuses: nobody may introspect.
func (s storage) SetIntrospectionFromToken(context.Context, *oidc.IntrospectionResponse, string, string, string) error {
	return errUnknown
}

func (s storage) GetPrivateClaimsFromScopes(_ context.Context, subject, _ string, _ []string) (map[string]any, error) {
	u := s.bySubject(subject)
	if u == nil {
		return nil, errUnknown
	}
	c := map[string]any{}
	if u.Tenant != "" {
		c["tenant"] = u.Tenant
	}
	if u.Email != "" {
		c["email"], c["email_verified"] = u.Email, u.Verified
	}
	return c, nil
}

func (s storage) GetPrivateClaimsFromRequest(ctx context.Context, r op.TokenRequest, scopes []string) (map[string]any, error) {
	return s.GetPrivateClaimsFromScopes(ctx, r.GetSubject(), s.p.o.Client, scopes)
}

// GetKeyByIDAndClientID refuses: the client has no keys.
func (s storage) GetKeyByIDAndClientID(context.Context, string, string) (*jose.JSONWebKey, error) {
	return nil, errUnknown
}

func (s storage) ValidateJWTProfileScopes(context.Context, string, []string) ([]string, error) {
	return nil, errUnknown
}

func (s storage) StoreDeviceAuthorization(_ context.Context, client, device, user string, expires time.Time, scopes []string) error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if _, ok := s.p.userCode[user]; ok {
		return op.ErrDuplicateUserCode
	}
	s.p.userCode[user] = device
	s.p.devices[device] = &op.DeviceAuthorizationState{ClientID: client, Audience: []string{client}, Scopes: scopes, Expires: expires}
	return nil
}

func (s storage) GetDeviceAuthorizatonState(_ context.Context, client, device string) (*op.DeviceAuthorizationState, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if d := s.p.devices[device]; d != nil && d.ClientID == client {
		state := *d
		return &state, nil
	}
	return nil, errUnknown
}

func (s storage) Health(context.Context) error { return nil }

// client is the provider's one client.
type client struct {
	id       string
	lifetime time.Duration
}

func (c client) GetID() string { return c.id }
func (c client) RedirectURIs() []string {
	return []string{"http://127.0.0.1/callback", "http://[::1]/callback"}
}
func (c client) PostLogoutRedirectURIs() []string    { return nil }
func (c client) ApplicationType() op.ApplicationType { return op.ApplicationTypeNative }
func (c client) AuthMethod() oidc.AuthMethod         { return oidc.AuthMethodNone }
func (c client) ResponseTypes() []oidc.ResponseType {
	return []oidc.ResponseType{oidc.ResponseTypeCode}
}
func (c client) GrantTypes() []oidc.GrantType {
	return []oidc.GrantType{oidc.GrantTypeCode, oidc.GrantTypeRefreshToken, oidc.GrantTypeDeviceCode}
}
func (c client) LoginURL(id string) string                                    { return "/login?id=" + id }
func (c client) AccessTokenType() op.AccessTokenType                          { return op.AccessTokenTypeJWT }
func (c client) IDTokenLifetime() time.Duration                               { return c.lifetime }
func (c client) DevMode() bool                                                { return false }
func (c client) RestrictAdditionalIdTokenScopes() func([]string) []string     { return same }
func (c client) RestrictAdditionalAccessTokenScopes() func([]string) []string { return same }
func (c client) IsScopeAllowed(string) bool                                   { return false }
func (c client) IDTokenUserinfoClaimsAssertion() bool                         { return true }
func (c client) ClockSkew() time.Duration                                     { return 0 }

func same(scopes []string) []string { return scopes }
