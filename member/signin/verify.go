// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/cells"
)

// Config of a verifier. Issuers is required.
type Config struct {
	// Issuers are the only ones whose tokens are accepted.
	Issuers Issuers
	// HTTP fetches documents; its redirects are not followed. A client of its own by
	// default.
	HTTP *http.Client
	// KeysFor is how long keys are used before a request waits for new ones, which are
	// fetched from four fifths of it on; 5 min by default.
	KeysFor time.Duration
	// KeysStale is how long they are used while they cannot be fetched; 1 h by default.
	KeysStale time.Duration
	// RefreshEvery is the least time between two fetches of an issuer's keys; 2 s by
	// default.
	RefreshEvery time.Duration
	// FetchTimeout bounds a fetch; 5 s by default.
	FetchTimeout time.Duration
	// Leeway is what clocks may differ by; 30 s by default.
	Leeway time.Duration
	// Now is the clock; time.Now by default.
	Now func() time.Time
	// Log is silent by default.
	Log *slog.Logger
}

// Verifier verifies bearer tokens. Safe for concurrent use. Close it.
type Verifier struct {
	cfg  Config
	sets map[string]*keySet
	end  context.CancelFunc
}

// New makes a verifier; nothing is fetched yet. The error wraps [cells.ErrInvalid].
func New(cfg Config) (*Verifier, error) {
	cfg.Issuers = slices.Clone(cfg.Issuers)
	if err := cfg.Issuers.check(); err != nil {
		return nil, err
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&cfg.KeysFor, 5 * time.Minute}, {&cfg.KeysStale, time.Hour}, {&cfg.RefreshEvery, 2 * time.Second}, {&cfg.FetchTimeout, 5 * time.Second}, {&cfg.Leeway, 30 * time.Second}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 {
			return nil, fmt.Errorf("%w: signin: a duration is negative", cells.ErrInvalid)
		}
	}
	if cfg.KeysStale < cfg.KeysFor {
		return nil, fmt.Errorf("%w: signin: KeysStale %s is less than KeysFor %s", cells.ErrInvalid, cfg.KeysStale, cfg.KeysFor)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	client := http.Client{}
	if cfg.HTTP != nil {
		client = *cfg.HTTP
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	cfg.HTTP = &client
	v := &Verifier{cfg: cfg, sets: map[string]*keySet{}}
	life, end := context.WithCancel(context.Background())
	v.end = end
	for i := range v.cfg.Issuers {
		is := &v.cfg.Issuers[i]
		v.sets[is.Issuer] = &keySet{of: is, cfg: &v.cfg, life: life}
	}
	return v, nil
}

// Close ends the fetches that run. Tokens are AUTH_UNAVAILABLE from then on, once the
// keys are old.
func (v *Verifier) Close() {
	v.end()
	for _, k := range v.sets {
		k.mu.Lock() // a fetch that begins now has begun
		k.mu.Unlock()
		k.running.Wait()
	}
}

// Issuers are those of the configuration, with what was left out filled in.
func (v *Verifier) Issuers() Issuers { return slices.Clone(v.cfg.Issuers) }

// Token is what a verified token says.
type Token struct {
	Issuer string
	Kind   Kind
	// Subject is the sub claim, as it is spelled.
	Subject string
	// Tenant is the one that the token is scoped to; "" when it names none.
	Tenant cells.TenantID
	// Email is the subject's, when the issuer says that it verified it.
	Email string
	// Creator is the creator claim: who made the token for its subject.
	Creator string
	// Actors are the subjects that act, from the act claim, the one that presents the
	// token first.
	Actors []string
	// IssuedAt is zero when the token does not say.
	IssuedAt, Expires time.Time
}

// Claims of a token beside the registered ones.
type claims struct {
	jwt.Claims
	Email    string `json:"email"`
	Verified any    `json:"email_verified"`
	Creator  string `json:"creator"`
	Act      *actor `json:"act"`
}

type actor struct {
	Subject string `json:"sub"`
	Act     *actor `json:"act"`
}

// maxActors bounds a chain of actors.
const maxActors = 8

// Verify returns what a token says. The error is a [*cells.Answer]: UNAUTHENTICATED,
// UNKNOWN_ISSUER, FORBIDDEN for a tenant that the issuer may not name, or
// AUTH_UNAVAILABLE.
func (v *Verifier) Verify(ctx context.Context, raw string) (Token, error) {
	tok, is, err := v.parse(raw)
	if err != nil {
		return Token{}, err
	}
	head := tok.Headers[0]
	keys, err := v.sets[is.Issuer].fit(ctx, head.KeyID, head.Algorithm)
	switch {
	case errors.Is(err, errNoKey):
		return Token{}, unauthenticated(err)
	case err != nil:
		return Token{}, unavailable(err)
	}
	var c claims
	all := map[string]any{}
	err = errNoKey
	for _, k := range keys {
		if err = tok.Claims(k.Key, &c, &all); err == nil {
			break
		}
	}
	if err != nil {
		return Token{}, unauthenticated(err)
	}
	return v.claims(is, &c, all)
}

// parse reads a token without believing it, and finds its issuer.
func (v *Verifier) parse(raw string) (*jwt.JSONWebToken, *Issuer, error) {
	if len(raw) > MaxToken {
		return nil, nil, unauthenticated(fmt.Errorf("the token has %d bytes, at most %d", len(raw), MaxToken))
	}
	tok, err := jwt.ParseSigned(raw, algorithms)
	if err != nil {
		return nil, nil, unauthenticated(err)
	}
	if len(tok.Headers) != 1 {
		return nil, nil, unauthenticated(errors.New("want one signature"))
	}
	head := tok.Headers[0]
	if typ, ok := head.ExtraHeaders[jose.HeaderType]; ok {
		// What is signed for another purpose is no access token.
		switch t, _ := typ.(string); strings.ToLower(strings.TrimPrefix(strings.ToLower(t), "application/")) {
		case "jwt", "at+jwt":
		default:
			return nil, nil, unauthenticated(errors.New("the token is of another type"))
		}
	}
	var who struct {
		Issuer string `json:"iss"`
	}
	if err := tok.UnsafeClaimsWithoutVerification(&who); err != nil {
		return nil, nil, unauthenticated(err)
	}
	set, ok := v.sets[who.Issuer]
	if !ok {
		return nil, nil, &cells.Answer{Code: cells.CodeUnknownIssuer, Detail: "the cell does not accept the token's issuer"}
	}
	if !slices.Contains(set.of.Algorithms, head.Algorithm) {
		return nil, nil, unauthenticated(errors.New("the algorithm is not one of the issuer's"))
	}
	return tok, set.of, nil
}

// claims reads what was signed.
func (v *Verifier) claims(is *Issuer, c *claims, all map[string]any) (Token, error) {
	expect := jwt.Expected{Issuer: is.Issuer, Time: v.cfg.Now()}
	if is.Audience != "" {
		expect.AnyAudience = jwt.Audience{is.Audience}
	}
	switch err := c.ValidateWithLeeway(expect, v.cfg.Leeway); {
	case err != nil:
		return Token{}, unauthenticated(err)
	case c.Expiry == nil:
		return Token{}, unauthenticated(errors.New("the token has no exp"))
	}
	t := Token{Issuer: is.Issuer, Kind: is.Kind, Subject: c.Subject, Creator: c.Creator, Expires: c.Expiry.Time()}
	if c.IssuedAt != nil {
		t.IssuedAt = c.IssuedAt.Time()
	}
	if verified, _ := c.Verified.(bool); verified {
		t.Email = c.Email
	}
	for a := c.Act; a != nil; a = a.Act {
		if len(t.Actors) == maxActors {
			return Token{}, unauthenticated(errors.New("the chain of actors is too long"))
		}
		t.Actors = append(t.Actors, a.Subject)
	}
	for _, s := range append([]string{t.Subject}, t.Actors...) {
		if !validSubject(s) {
			return Token{}, unauthenticated(errors.New("a subject is missing or malformed"))
		}
	}
	if t.Creator != "" && !validSubject(t.Creator) {
		return Token{}, unauthenticated(errors.New("the creator is malformed"))
	}
	if named, ok := all[is.TenantClaim]; ok {
		s, isText := named.(string)
		if t.Tenant = cells.TenantID(s); !isText || t.Tenant.Validate() != nil {
			return Token{}, unauthenticated(errors.New("the tenant claim is malformed"))
		}
	}
	if t.Tenant != "" && !is.may(t.Tenant) || t.Tenant == "" && is.Kind == EndUsers {
		return Token{}, &cells.Answer{Code: cells.CodeForbidden, Detail: "the issuer may not name this tenant"}
	}
	return t, nil
}

// MaxSubject bounds a subject, in bytes.
const MaxSubject = 512

func validSubject(s string) bool {
	return s != "" && len(s) <= MaxSubject && utf8.ValidString(s) && strings.TrimSpace(s) == s && !strings.ContainsFunc(s, unicode.IsControl)
}

func unauthenticated(err error) error {
	return &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "the token was not accepted", Err: err}
}

func unavailable(err error) error {
	return &cells.Answer{Code: cells.CodeAuthUnavailable, Detail: "whether the credential is good cannot be checked now", RetryAfter: 5 * time.Second, Err: err}
}
