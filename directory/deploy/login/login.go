// SPDX-License-Identifier: Apache-2.0

package login

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/internal/hostname"
	"github.com/cloister-dev/cloister/member/signin"
)

// DefaultWait is how long a router that refuses for its pace is asked again.
const DefaultWait = 2 * time.Minute

// maxDocument bounds what is read of an answer, in bytes.
const maxDocument = 256 << 10

// Config of a sign-in. Host is required, and Show.
type Config struct {
	// Host is the deployment's address, http(s)://host[:port]; http only on loopback.
	Host string
	// Tenant, if set, is looked up there.
	Tenant cells.TenantID
	// Wait bounds the waits for the router's pace; [DefaultWait] by default, negative for
	// none.
	Wait time.Duration
	// Device uses the device flow: no browser on this machine.
	Device bool
	// Client, if set, is used in place of the one that the cell names.
	Client string
	// Scopes beside openid; email and offline_access by default.
	Scopes []string
	// Show is given the address to open, which [CheckAddress] accepts, and in the device
	// flow the code to type, printable.
	Show func(address, code string)
	// Tell hears of waits; may be nil.
	Tell func(string)
	// HTTP makes the requests; its redirects are not followed. A client of its own by
	// default.
	HTTP *http.Client
	// At maps a cell's host to the address that it is asked at; for tests. The host at the
	// scheme of Host by default.
	At func(host string) string
}

// Token is what a sign-in ends with.
type Token struct {
	// Cell is "" where no directory names one. Host is the address of the cell.
	Cell    cells.CellID   `json:"cell,omitempty"`
	Host    string         `json:"host"`
	Tenant  cells.TenantID `json:"tenant,omitempty"`
	Issuer  string         `json:"issuer"`
	Client  string         `json:"client"`
	Subject string         `json:"subject"`
	Email   string         `json:"email,omitempty"`
	Access  string         `json:"access_token,omitempty"`
	Refresh string         `json:"refresh_token,omitempty"`
	Expires time.Time      `json:"expires,omitzero"`
}

func (c *Config) check() error {
	if c.Show == nil {
		return fmt.Errorf("%w: login: nobody would be shown the address", cells.ErrInvalid)
	}
	if err := checkHost(c.Host); err != nil {
		return err
	}
	if c.Tenant != "" {
		if err := c.Tenant.Validate(); err != nil {
			return err
		}
	}
	if c.Wait == 0 {
		c.Wait = DefaultWait
	}
	if c.Scopes == nil {
		c.Scopes = []string{"email", "offline_access"}
	}
	if c.Tell == nil {
		c.Tell = func(string) {}
	}
	client := http.Client{Timeout: 30 * time.Second}
	if c.HTTP != nil {
		client = *c.HTTP
	}
	client.Transport = bounded{client.Transport}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.HTTP = &client
	return nil
}

func checkHost(host string) error {
	u, err := url.Parse(host)
	if err != nil || u.Hostname() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("%w: login: the host is http(s)://host[:port], without a path", cells.ErrInvalid)
	}
	if !hostname.Private(u) {
		return fmt.Errorf("%w: login: %s is not https, and no loopback address", cells.ErrInvalid, host)
	}
	return nil
}

// Run signs in. The error is a [*cells.Answer] of the router, wraps [cells.ErrInvalid] or
// [cells.ErrUnavailable], or says what the provider refused.
func Run(ctx context.Context, cfg Config) (Token, error) {
	t, err := run(ctx, cfg)
	if err != nil {
		return Token{}, printable{err}
	}
	return t, nil
}

func run(ctx context.Context, cfg Config) (Token, error) {
	if err := cfg.check(); err != nil {
		return Token{}, err
	}
	t := Token{Host: strings.TrimRight(cfg.Host, "/"), Tenant: cfg.Tenant}
	if cfg.Tenant != "" {
		if err := cfg.lookup(ctx, &t); err != nil {
			return Token{}, err
		}
	}
	at := t.Host
	if t.Cell != "" && cfg.At != nil {
		at = cfg.At(strings.SplitN(t.Host, "//", 2)[1])
	}
	var m signin.Metadata
	switch status, err := cfg.get(ctx, at+signin.PathMetadata, &m); {
	case err != nil:
		return Token{}, fmt.Errorf("%w: %s does not say where its people sign in: %w", cells.ErrUnavailable, t.Host, err)
	case status != http.StatusOK:
		return Token{}, fmt.Errorf("%w: %s does not say where its people sign in: it answers %d", cells.ErrUnavailable, t.Host, status)
	}
	if cfg.Client != "" {
		m.Client = cfg.Client
	}
	if len(m.Servers) != 1 || m.Client == "" {
		return Token{}, fmt.Errorf("%w: %s names %d providers and client %q", cells.ErrInvalid, t.Host, len(m.Servers), m.Client)
	}
	t.Issuer, t.Client = m.Servers[0], m.Client
	if err := checkIssuer(t.Issuer); err != nil {
		return Token{}, err
	}
	if err := cfg.flow(ctx, &t); err != nil {
		return Token{}, err
	}
	return t, nil
}

func checkIssuer(issuer string) error {
	u, err := url.Parse(issuer)
	if err != nil || u.Host == "" {
		return fmt.Errorf("%w: login: the provider %.100q is no address", cells.ErrInvalid, issuer)
	}
	return checkHost(u.Scheme + "://" + u.Host)
}

// lookup finds the tenant's cell.
func (c *Config) lookup(ctx context.Context, t *Token) error {
	refuse := func(status int, err error) error {
		return fmt.Errorf("%w: the router at %s does not say which cell holds %s (%d), and no sign-in is begun: %w", cells.ErrUnavailable, t.Host, c.Tenant, status, err)
	}
	for end := time.Now().Add(c.Wait); ; {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.Host+wire.PathLookup+"?"+url.Values{"tenant": {string(c.Tenant)}}.Encode(), nil)
		if err != nil {
			return err
		}
		resp, err := c.HTTP.Do(req)
		if err != nil {
			return refuse(0, err)
		}
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxDocument))
		_ = resp.Body.Close()
		if err != nil {
			return refuse(resp.StatusCode, err)
		}
		code := cells.Code(resp.Header.Get(cells.HeaderAnswer))
		switch {
		case resp.StatusCode == http.StatusOK:
			var l wire.Lookup
			if err := json.Unmarshal(body, &l); err != nil || l.Cell.Validate() != nil || l.Host == "" {
				return refuse(resp.StatusCode, errors.New("the answer is none of a router's"))
			}
			scheme, _, _ := strings.Cut(t.Host, "://")
			t.Cell, t.Host = l.Cell, scheme+"://"+l.Host
			if c.At == nil {
				return checkHost(t.Host)
			}
			return nil
		case code == cells.CodeNoCell, resp.StatusCode == http.StatusNotFound:
			return nil // the host that was given
		case resp.StatusCode == http.StatusTooManyRequests:
			pause := time.Second
			if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 && s < 3600 {
				pause = time.Duration(s) * time.Second
			}
			if time.Now().Add(pause).After(end) {
				return &cells.Answer{Code: cells.CodeRateLimited, Detail: "the router at " + t.Host + " refuses for its pace", RetryAfter: pause}
			}
			c.Tell(fmt.Sprintf("the router is busy; asking again in %s", pause))
			timer := time.NewTimer(pause)
			select {
			case <-ctx.Done():
				timer.Stop()
				return context.Cause(ctx)
			case <-timer.C:
			}
		default:
			return refuse(resp.StatusCode, fmt.Errorf("it answers %s", max(string(code), "without a code")))
		}
	}
}

func (c *Config) get(ctx context.Context, at string, out any) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxDocument))
	if err == nil && resp.StatusCode == http.StatusOK {
		err = json.Unmarshal(b, out)
	}
	return resp.StatusCode, err
}

// flow signs in at the provider.
func (c *Config) flow(ctx context.Context, t *Token) error {
	ctx = oidc.ClientContext(ctx, c.HTTP)
	provider, err := oidc.NewProvider(ctx, t.Issuer)
	if err != nil {
		return fmt.Errorf("%w: the provider %s: %w", cells.ErrUnavailable, t.Issuer, err)
	}
	var said struct {
		Keys string `json:"jwks_uri"`
	}
	if err := provider.Claims(&said); err != nil {
		return fmt.Errorf("%w: the provider %s: %w", cells.ErrInvalid, t.Issuer, err)
	}
	e := provider.Endpoint()
	addresses := map[string]string{"token_endpoint": e.TokenURL, "jwks_uri": said.Keys}
	if c.Device {
		addresses["device_authorization_endpoint"] = e.DeviceAuthURL
		if e.DeviceAuthURL == "" {
			return fmt.Errorf("%w: the provider has no device flow", cells.ErrInvalid)
		}
	} else {
		addresses["authorization_endpoint"] = e.AuthURL
	}
	for what, at := range addresses {
		if err := CheckAddress(at); err != nil {
			return fmt.Errorf("%w: the provider %s: %s: %w", cells.ErrInvalid, t.Issuer, what, err)
		}
	}
	o := &oauth2.Config{ClientID: t.Client, Endpoint: e, Scopes: append([]string{oidc.ScopeOpenID}, c.Scopes...)}
	o.Endpoint.AuthStyle = oauth2.AuthStyleInParams // the client has no secret
	nonce := ""
	var got *oauth2.Token
	if c.Device {
		got, err = c.device(ctx, o)
	} else {
		nonce = oauth2.GenerateVerifier()
		got, err = c.browser(ctx, o, nonce)
	}
	if err != nil {
		return err
	}
	raw, _ := got.Extra("id_token").(string)
	id, err := provider.VerifierContext(ctx, &oidc.Config{ClientID: t.Client}).Verify(ctx, raw)
	if err != nil {
		return fmt.Errorf("%w: the identity token of %s: %w", cells.ErrInvalid, t.Issuer, err)
	}
	if subtle.ConstantTimeCompare([]byte(id.Nonce), []byte(nonce)) != 1 {
		return fmt.Errorf("%w: the identity token of %s is of another sign-in", cells.ErrInvalid, t.Issuer)
	}
	var who struct {
		Email string `json:"email"`
	}
	if err := id.Claims(&who); err != nil {
		return fmt.Errorf("%w: the identity token of %s: %w", cells.ErrInvalid, t.Issuer, err)
	}
	t.Subject, t.Email, t.Access, t.Refresh, t.Expires = id.Subject, who.Email, got.AccessToken, got.RefreshToken, got.Expiry
	return nil
}

// browser is the authorization code with PKCE, to a listener on a loopback address.
func (c *Config) browser(ctx context.Context, o *oauth2.Config, nonce string) (*oauth2.Token, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("%w: a listener for the browser: %w", cells.ErrUnavailable, err)
	}
	o.RedirectURL = "http://" + ln.Addr().String() + "/callback"
	state, verifier := oauth2.GenerateVerifier(), oauth2.GenerateVerifier()
	type result struct {
		code string
		err  error
	}
	came := make(chan result, 1)
	srv := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if r.Method != http.MethodGet || r.URL.Path != "/callback" || subtle.ConstantTimeCompare([]byte(q.Get("state")), []byte(state)) != 1 {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		res := result{code: q.Get("code")}
		if res.code == "" {
			res.err = fmt.Errorf("%w: the provider refused: %.100q", cells.ErrInvalid, q.Get("error"))
			_, _ = io.WriteString(w, "The sign-in was refused. You can close this page.\n")
		} else {
			_, _ = io.WriteString(w, "You are signed in. You can close this page.\n")
		}
		select {
		case came <- res:
		default: // a reload
		}
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(ln) }()
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if srv.Shutdown(end) != nil {
			_ = srv.Close()
		}
		<-served
	}()
	c.Show(o.AuthCodeURL(state, oauth2.S256ChallengeOption(verifier), oidc.Nonce(nonce)), "")
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case r := <-came:
		if r.err != nil {
			return nil, r.err
		}
		got, err := o.Exchange(ctx, r.code, oauth2.VerifierOption(verifier))
		if err != nil {
			return nil, fmt.Errorf("the provider did not redeem the code: %w", err)
		}
		return got, nil
	}
}

func (c *Config) device(ctx context.Context, o *oauth2.Config) (*oauth2.Token, error) {
	d, err := o.DeviceAuth(ctx)
	if err != nil {
		return nil, fmt.Errorf("the provider began no device flow: %w", err)
	}
	address := d.VerificationURIComplete
	if address == "" {
		address = d.VerificationURI
	}
	if err := CheckAddress(address); err != nil {
		return nil, fmt.Errorf("%w: the provider's verification_uri: %w", cells.ErrInvalid, err)
	}
	c.Show(address, Printable(d.UserCode))
	got, err := o.DeviceAccessToken(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("the device was not approved: %w", err)
	}
	return got, nil
}
