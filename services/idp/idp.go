// SPDX-License-Identifier: Apache-2.0

package idp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/zitadel/oidc/v3/pkg/oidc"
	"github.com/zitadel/oidc/v3/pkg/op"
)

// User is one who may sign in.
type User struct {
	Name     string `json:"name"`
	Password string `json:"password"`
	// Subject is the sub claim; the name by default.
	Subject string `json:"subject,omitempty"`
	Email   string `json:"email,omitempty"`
	// Verified says that the email is the user's.
	Verified bool `json:"verified,omitempty"`
	// Tenant is the tenant claim of the user's tokens.
	Tenant string `json:"tenant,omitempty"`
}

// Options of a provider. Issuer, Client and Users are required.
type Options struct {
	// Issuer is the provider's own address; http is allowed.
	Issuer string `json:"issuer"`
	// Client is the id of its client, and the audience of its tokens.
	Client string `json:"client"`
	Users  []User `json:"users"`
	// Lifetime of its tokens; 5 min by default.
	Lifetime time.Duration `json:"lifetime,omitempty"`
	// Poll is the interval of the device flow; 5 s by default.
	Poll time.Duration `json:"poll,omitempty"`
	Log  *slog.Logger  `json:"-"`
}

// Provider is an OpenID Provider. It is safe for concurrent use.
type Provider struct {
	o        Options
	provider *op.Provider

	mu       sync.Mutex // guards what follows
	keys     []*key     // the newest first; it signs
	requests map[string]*request
	codes    map[string]string // to requests
	devices  map[string]*op.DeviceAuthorizationState
	userCode map[string]string // to device codes
	refresh  map[string]*request
}

type key struct {
	id      string
	private *ecdsa.PrivateKey
}

func newKey() (*key, error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	return &key{rand.Text(), k}, err
}

// ID, Key and SignatureAlgorithm are op.SigningKey's.
func (k *key) ID() string                                  { return k.id }
func (k *key) Key() any                                    { return k.private }
func (k *key) SignatureAlgorithm() jose.SignatureAlgorithm { return jose.ES256 }

// public is a key as the set has it.
type public struct{ *key }

func (p public) Key() any                           { return &p.private.PublicKey }
func (p public) Algorithm() jose.SignatureAlgorithm { return jose.ES256 }
func (p public) Use() string                        { return "sig" }

// New makes a provider with a key of its own.
func New(o Options) (*Provider, error) {
	if o.Issuer == "" || o.Client == "" || len(o.Users) == 0 {
		return nil, errors.New("idp: an issuer, a client and users are needed")
	}
	if o.Lifetime == 0 {
		o.Lifetime = 5 * time.Minute
	}
	if o.Poll == 0 {
		o.Poll = 5 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Users = slices.Clone(o.Users)
	for i := range o.Users {
		if o.Users[i].Subject == "" {
			o.Users[i].Subject = o.Users[i].Name
		}
	}
	p := &Provider{o: o, requests: map[string]*request{}, codes: map[string]string{}, devices: map[string]*op.DeviceAuthorizationState{}, userCode: map[string]string{}, refresh: map[string]*request{}}
	if err := p.Rotate(); err != nil {
		return nil, err
	}
	cfg := &op.Config{CodeMethodS256: true, GrantTypeRefreshToken: true, SupportedScopes: []string{"openid", "email", "profile", "offline_access"},
		DeviceAuthorization: op.DeviceAuthorizationConfig{Lifetime: 5 * time.Minute, PollInterval: o.Poll, UserFormPath: "/device", UserCode: op.UserCodeBase20}}
	if _, err := rand.Read(cfg.CryptoKey[:]); err != nil {
		return nil, err
	}
	var err error
	if p.provider, err = op.NewProvider(cfg, storage{p}, op.StaticIssuer(o.Issuer), op.WithAllowInsecure(), op.WithLogger(o.Log)); err != nil {
		return nil, fmt.Errorf("idp: %w", err)
	}
	return p, nil
}

// Rotate makes a new key, which signs from now on. Earlier keys stay in the set.
func (p *Provider) Rotate() error {
	k, err := newKey()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = append([]*key{k}, p.keys...)
	return nil
}

// Retire drops every key but the one that signs.
func (p *Provider) Retire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = p.keys[:1]
}

// Handler serves the provider: its protocol, /login and /device.
func (p *Provider) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", p.provider)
	issuer := op.NewIssuerInterceptor(p.provider.IssuerFromRequest)
	mux.Handle("GET /login", form("id"))
	mux.Handle("POST /login", issuer.Handler(http.HandlerFunc(p.login)))
	mux.Handle("GET /device", form("user_code"))
	mux.Handle("POST /device", http.HandlerFunc(p.device))
	return mux
}

var page = template.Must(template.New("").Parse(`<!doctype html><title>Sign in</title><form method="post">
<input type="hidden" name="{{.Name}}" value="{{.Value}}"><label>Name <input name="name" autofocus></label>
<label>Password <input name="password" type="password"></label><button>Sign in</button></form>
`))

// form asks for a name and a password, and keeps one parameter of the query.
func form(param string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
		_ = page.Execute(w, struct{ Name, Value string }{param, r.URL.Query().Get(param)})
	})
}

func (p *Provider) user(r *http.Request) (*User, bool) {
	name, password := r.PostFormValue("name"), r.PostFormValue("password")
	for i := range p.o.Users {
		u := &p.o.Users[i]
		if u.Name == name && subtle.ConstantTimeCompare([]byte(u.Password), []byte(password)) == 1 {
			return u, true
		}
	}
	return nil, false
}

func (p *Provider) login(w http.ResponseWriter, r *http.Request) {
	u, ok := p.user(r)
	if !ok {
		http.Error(w, "the name or the password is wrong", http.StatusForbidden)
		return
	}
	id := r.PostFormValue("id")
	p.mu.Lock()
	req := p.requests[id]
	if req != nil {
		req.subject, req.done, req.at = u.Subject, true, time.Now()
	}
	p.mu.Unlock()
	if req == nil {
		http.Error(w, "there is no such sign-in", http.StatusNotFound)
		return
	}
	http.Redirect(w, r, op.AuthCallbackURL(p.provider)(r.Context(), id), http.StatusFound)
}

func (p *Provider) device(w http.ResponseWriter, r *http.Request) {
	u, ok := p.user(r)
	if !ok {
		http.Error(w, "the name or the password is wrong", http.StatusForbidden)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.devices[p.userCode[r.PostFormValue("user_code")]]
	if d == nil {
		http.Error(w, "there is no such code", http.StatusNotFound)
		return
	}
	d.Subject, d.Done, d.AuthTime = u.Subject, true, time.Now()
	_, _ = w.Write([]byte("signed in\n"))
}

// request is one sign-in.
type request struct {
	*oidc.AuthRequest
	id, subject string
	done        bool
	at          time.Time
}

func (r *request) GetID() string             { return r.id }
func (r *request) GetACR() string            { return "" }
func (r *request) GetAMR() []string          { return []string{"pwd"} }
func (r *request) GetAudience() []string     { return []string{r.ClientID} }
func (r *request) GetAuthTime() time.Time    { return r.at }
func (r *request) GetClientID() string       { return r.ClientID }
func (r *request) GetNonce() string          { return r.Nonce }
func (r *request) GetRedirectURI() string    { return r.RedirectURI }
func (r *request) GetScopes() []string       { return r.Scopes }
func (r *request) GetState() string          { return r.State }
func (r *request) GetSubject() string        { return r.subject }
func (r *request) Done() bool                { return r.done }
func (r *request) SetCurrentScopes([]string) {}
func (r *request) GetResponseType() oidc.ResponseType {
	return r.ResponseType
}
func (r *request) GetResponseMode() oidc.ResponseMode { return r.ResponseMode }
func (r *request) GetCodeChallenge() *oidc.CodeChallenge {
	return &oidc.CodeChallenge{Challenge: r.CodeChallenge, Method: r.CodeChallengeMethod}
}
