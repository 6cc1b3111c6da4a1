// SPDX-License-Identifier: Apache-2.0

package bot

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// Proof is what a bot proves itself with, to one cell.
type Proof struct {
	Name string
	// Key is its private key, a JSON Web Key.
	Key []byte
	// Base is the cell's public base URL, which the proof is signed for.
	Base string
	// Address, if set, is where the cell is asked in place of Base: an address inside
	// the deployment's network. http is for a loopback address.
	Address string
	// HTTP makes the requests; a client of its own by default. Redirects are not followed.
	HTTP *http.Client
}

// busyTries is how often a cell that refuses for its pace is asked again, busyWait the
// longest that it is waited for at once.
const (
	busyTries = 3
	busyWait  = 10 * time.Second
)

// Token proves the bot and returns a token of the cell, for [TokenFor]. A cell that
// refuses for its pace is asked again a few times, when it says. The error is a
// [*cells.Answer] of the cell, or wraps [cells.ErrInvalid] or [cells.ErrUnavailable]; it
// holds neither key nor token.
func (p Proof) Token(ctx context.Context) (string, error) {
	if err := CheckName(p.Name); err != nil {
		return "", err
	}
	audience, err := audienceOf(p.Base)
	if err != nil {
		return "", err
	}
	key, err := parse(p.Key)
	if err != nil {
		return "", err
	}
	if key.IsPublic() {
		return "", fmt.Errorf("%w: the key of bot %s is the public one", cells.ErrInvalid, p.Name)
	}
	at := strings.TrimRight(p.Address, "/")
	if at == "" {
		at = strings.TrimRight(p.Base, "/")
	}
	if u, err := url.Parse(at); err != nil || !hostname.Private(u) {
		return "", fmt.Errorf("%w: a bot's token is asked for over https, or over http at a loopback address", cells.ErrInvalid)
	}
	client := http.Client{Timeout: 15 * time.Second}
	if p.HTTP != nil {
		client = *p.HTTP
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	var c challengeAnswer
	for left := busyTries; ; left-- {
		err := post(ctx, &client, at+PathChallenge, challengeRequest{p.Name}, &c)
		if err == nil {
			break
		}
		a := cells.AnswerOf(err)
		if a == nil || a.Code != cells.CodeRateLimited || a.RetryAfter <= 0 || a.RetryAfter > busyWait || left == 0 {
			return "", err
		}
		timer := time.NewTimer(a.RetryAfter)
		select {
		case <-ctx.Done():
			timer.Stop()
			return "", fmt.Errorf("%w: %w", err, context.Cause(ctx))
		case <-timer.C:
		}
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: algorithm(key), Key: key.Key}, (&jose.SignerOptions{}).WithType(assertionType))
	if err != nil {
		return "", fmt.Errorf("%w: the key of bot %s does not sign", cells.ErrInvalid, p.Name)
	}
	now := time.Now()
	assertion, err := jwt.Signed(signer).Claims(jwt.Claims{Issuer: p.Name, Subject: p.Name, Audience: jwt.Audience{audience}, ID: c.Challenge,
		IssuedAt: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(challengeFor))}).Serialize()
	if err != nil {
		return "", fmt.Errorf("%w: signing: %w", cells.ErrInvalid, err)
	}
	var t tokenAnswer
	if err := post(ctx, &client, at+PathToken, tokenRequest{assertion}, &t); err != nil {
		return "", err
	}
	if token.Check(t.Token) != nil {
		return "", fmt.Errorf("%w: the cell answers with no token", cells.ErrUnavailable)
	}
	return t.Token, nil
}

func post(ctx context.Context, client *http.Client, at string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, at, bytes.NewReader(b))
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	defer resp.Body.Close()
	if a, ok := cells.ReadProblem(resp); ok {
		return a
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: %s answers %d", cells.ErrUnavailable, at, resp.StatusCode)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxRequest)).Decode(out); err != nil {
		return fmt.Errorf("%w: %s answers what cannot be read", cells.ErrUnavailable, at)
	}
	return nil
}
