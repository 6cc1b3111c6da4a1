// SPDX-License-Identifier: Apache-2.0

package bot

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/tenancy"
)

// Paths of a cell, and the type of an assertion's header.
const (
	PathChallenge = "/signin/v1/bot/challenge"
	PathToken     = "/signin/v1/bot/token"
	assertionType = "cell-bot+jwt"
)

// token is the kind of a bot's tokens.
const token credential.Kind = "lcb_"

// Times of the exchange.
const (
	challengeFor = time.Minute
	// TokenFor is how long a token is good.
	TokenFor = 5 * time.Minute
	leeway   = 30 * time.Second
)

// maxRequest bounds a request and an answer, in bytes.
const maxRequest = 8 << 10

var botName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// CheckName reports whether a bot may have a name: [a-z0-9-], at most 63 bytes. The
// error wraps [cells.ErrInvalid].
func CheckName(name string) error {
	if !botName.MatchString(name) {
		return fmt.Errorf("%w: a bot's name is of a-z, 0-9 and -, at most 63 bytes", cells.ErrInvalid)
	}
	return nil
}

// Config of a server; Store and Base are required.
type Config struct {
	Store signin.Store
	// Base is the cell's public base URL, which assertions are signed for.
	Base string
	// PerSecond bounds the challenges of one bot for one client address in a process; 5 by
	// default, in bursts of 20.
	PerSecond float64
	// Now is the clock; time.Now by default.
	Now func() time.Time
}

// Server gives tokens to bots that prove themselves, and verifies them.
type Server struct {
	cfg      Config
	audience string
	paces    *paces
}

// New makes a server. The error wraps [cells.ErrInvalid].
func New(cfg Config) (*Server, error) {
	audience, err := audienceOf(cfg.Base)
	if err != nil || cfg.Store == nil {
		return nil, errors.Join(fmt.Errorf("%w: bot: a store and the cell's base URL are needed", cells.ErrInvalid), err)
	}
	if cfg.PerSecond <= 0 {
		cfg.PerSecond = 5
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Server{cfg, audience, newPaces(cfg.PerSecond)}, nil
}

// audienceOf is what a proof for a cell is signed for.
func audienceOf(base string) (string, error) {
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("%w: %.100q is no base URL", cells.ErrInvalid, base)
	}
	return strings.TrimRight(base, "/") + PathToken, nil
}

type challengeRequest struct {
	Bot string `json:"bot"`
}

type challengeAnswer struct {
	Challenge string `json:"challenge"`
}

type tokenRequest struct {
	Assertion string `json:"assertion"`
}

type tokenAnswer struct {
	Token   string `json:"access_token"`
	Seconds int64  `json:"expires_in"`
}

// ServeHTTP implements [http.Handler] for the two paths.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	var out any
	var err error
	switch r.URL.Path {
	case PathChallenge:
		var q challengeRequest
		if err = decode(w, r, &q); err == nil {
			out, err = s.challenge(r.Context(), q.Bot, r.RemoteAddr)
		}
	case PathToken:
		var q tokenRequest
		if err = decode(w, r, &q); err == nil {
			out, err = s.token(r.Context(), q.Assertion)
		}
	default:
		http.NotFound(w, r)
		return
	}
	if err != nil {
		a := cells.AnswerOf(err)
		if a == nil {
			a = unavailable(err)
		}
		cells.WriteProblem(w, r, a)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(out)
}

func decode(w http.ResponseWriter, r *http.Request, v any) error {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil {
		if _, more := dec.Token(); more != io.EOF {
			err = errors.New("there is something behind it")
		}
	}
	if err != nil {
		return &cells.Answer{Code: cells.CodeBadRequest, Detail: "want one JSON object", Err: err}
	}
	return nil
}

func (s *Server) challenge(ctx context.Context, name, remote string) (challengeAnswer, error) {
	out := challengeAnswer{rand.Text()}
	known := false
	if CheckName(name) == nil {
		b, err := s.cfg.Store.Bot(ctx, name)
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			return out, unavailable(err)
		}
		known = err == nil && !b.Disabled
	}
	switch {
	case !s.paces.allow(known, name, remote):
		return challengeAnswer{}, &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: time.Second}
	case !known:
		return out, nil // nobody's, and it is not said
	}
	if err := s.cfg.Store.Challenge(ctx, sha256.Sum256([]byte(out.Challenge)), name, s.cfg.Now().Add(challengeFor)); err != nil {
		return out, unavailable(err)
	}
	return out, nil
}

func (s *Server) token(ctx context.Context, assertion string) (tokenAnswer, error) {
	tok, err := jwt.ParseSigned(assertion, []jose.SignatureAlgorithm{jose.EdDSA, jose.ES256})
	if err != nil {
		return tokenAnswer{}, refused(err)
	}
	var who jwt.Claims
	if len(tok.Headers) != 1 || tok.Headers[0].ExtraHeaders[jose.HeaderType] != assertionType {
		return tokenAnswer{}, refused(errors.New("it is of another type"))
	}
	if err := tok.UnsafeClaimsWithoutVerification(&who); err != nil || CheckName(who.Subject) != nil {
		return tokenAnswer{}, refused(errors.Join(err, errors.New("it names no bot")))
	}
	b, err := s.cfg.Store.Bot(ctx, who.Subject)
	switch {
	case errors.Is(err, cells.ErrNotFound):
		return tokenAnswer{}, refused(err)
	case err != nil:
		return tokenAnswer{}, unavailable(err)
	case b.Disabled:
		return tokenAnswer{}, refused(errors.New("the bot is disabled"))
	}
	key, err := parse(b.Key)
	if err != nil || string(algorithm(key)) != tok.Headers[0].Algorithm {
		return tokenAnswer{}, refused(errors.Join(err, errors.New("it is signed otherwise")))
	}
	var c jwt.Claims
	if err := tok.Claims(key.Key, &c); err != nil {
		return tokenAnswer{}, refused(err)
	}
	now := s.cfg.Now()
	switch err := c.ValidateWithLeeway(jwt.Expected{Issuer: b.Name, Subject: b.Name, Time: now}, leeway); {
	case err != nil:
		return tokenAnswer{}, refused(err)
	case len(c.Audience) != 1 || c.Audience[0] != s.audience:
		return tokenAnswer{}, refused(errors.New("it is signed for somebody else"))
	case c.Expiry == nil || c.IssuedAt == nil || c.Expiry.Time().Sub(c.IssuedAt.Time()) > challengeFor:
		return tokenAnswer{}, refused(errors.New("it is good for too long"))
	}
	given, hash := token.New()
	err = s.cfg.Store.Answered(ctx, sha256.Sum256([]byte(c.ID)), b.Name, now, hash, now.Add(TokenFor),
		signin.Entry{Actor: "sa:" + b.Name, Action: "bot.token", Detail: "a token for " + TokenFor.String() + ", by key " + b.Thumbprint})
	switch {
	case errors.Is(err, cells.ErrNotFound):
		return tokenAnswer{}, refused(errors.New("the challenge is not this bot's, used or old"))
	case err != nil:
		return tokenAnswer{}, unavailable(err)
	}
	return tokenAnswer{given, int64(TokenFor / time.Second)}, nil
}

// Is reports whether a bearer token is of a bot's form.
func Is(raw string) bool { return strings.HasPrefix(raw, string(token)) }

// Principal is whom a bot's token stands for. The use is in the audit, with the detail,
// before it returns. The error is UNAUTHENTICATED or AUTH_UNAVAILABLE.
func (s *Server) Principal(ctx context.Context, raw, detail string) (tenancy.Principal, error) {
	hash, err := token.Hash(raw)
	if err != nil {
		return tenancy.Principal{}, refused(err)
	}
	b, err := s.cfg.Store.BotToken(ctx, hash, s.cfg.Now(), signin.Entry{Action: "bot.use", Detail: detail})
	switch {
	case errors.Is(err, cells.ErrNotFound):
		return tenancy.Principal{}, refused(errors.New("the token is nobody's, or old"))
	case err != nil:
		return tenancy.Principal{}, unavailable(err)
	}
	return tenancy.Principal{Wide: b.Admin, Subject: "sa:" + b.Name}, nil
}

func refused(err error) error {
	return &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "the bot was not accepted", Err: err}
}

func unavailable(err error) *cells.Answer {
	return &cells.Answer{Code: cells.CodeAuthUnavailable, Detail: "whether the bot is good cannot be checked or recorded now", RetryAfter: 5 * time.Second, Err: err}
}
