// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/hostname"
	"github.com/cloister-dev/cloister/member/stores"
)

// DefaultWait is how long commands wait for a probe that is busy or unreachable.
const DefaultWait = 10 * time.Minute

// maxRetryAfter bounds what a listener's Retry-After is believed.
const maxRetryAfter = time.Minute

// ParseAddress reads where a listener or a service's own port is reached and returns
// the normal form: http:// or https://, a host in lower case, and a port unless it is
// the scheme's. [cells.ErrInvalid] for other schemes, a user, a path, a query, a
// fragment, a zone, and a host that is not plain ASCII.
func ParseAddress(s string) (string, error) {
	bad := func(what string) (string, error) { // the address may have a password in it
		return "", fmt.Errorf("%w: a probe's address %s; want http://host:port or https://host:port", cells.ErrInvalid, what)
	}
	for _, c := range []byte(s) {
		if c <= ' ' || c > '~' || c == '\\' {
			return bad("has a character that is not plain ASCII")
		}
	}
	u, err := url.Parse(s)
	if err != nil {
		return bad("cannot be read")
	}
	port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
	switch {
	case port == "":
		return bad("is neither http nor https")
	case u.User != nil || strings.Contains(u.Host, "@"):
		return bad("has a user in it")
	case u.Opaque != "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || strings.Contains(s, "#"):
		return bad("has more than a host and a port")
	}
	host := u.Hostname()
	if strings.HasPrefix(u.Host, "[") {
		host = "[" + host + "]"
	}
	host, err = hostname.Normalize(host)
	if err != nil {
		return bad("has a host that is none")
	}
	if p := u.Port(); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return bad("has a port that is none")
		}
		if p = strconv.FormatUint(n, 10); p != port {
			host += ":" + p
		}
	} else if strings.HasSuffix(u.Host, ":") {
		return bad("has a port that is none")
	}
	return u.Scheme + "://" + host, nil
}

// ClientConfig is what a client needs; the zero value will do.
type ClientConfig struct {
	// RootCAs sign the certificates of https addresses. Nil is the system's, and those
	// of SSL_CERT_FILE and SSL_CERT_DIR when they are set.
	RootCAs *x509.CertPool
	// Timeout bounds one answer, its body included; 0 is 10 s, which is longer than a
	// listener takes to give up on its stores.
	Timeout time.Duration
}

// Client reads probes. It follows no redirect, uses no proxy, sends no credential,
// and opens a connection for each request. It is safe for concurrent use and needs
// no closing.
type Client struct {
	http *http.Client
}

// NewClient returns a client.
func NewClient(cfg ClientConfig) *Client {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 10 * time.Second
	}
	return &Client{http: &http.Client{Timeout: cfg.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext, TLSHandshakeTimeout: 5 * time.Second,
			TLSClientConfig:   &tls.Config{RootCAs: cfg.RootCAs, MinVersion: tls.VersionTLS12},
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 16 << 10}}}
}

// Read asks a probe listener. Errors: *[cells.Answer] with PROBE_BUSY or
// PROBE_UNREACHABLE for what may pass; [ErrRefused] for an answer that no listener
// gives; [cells.ErrInvalid] for an address that [ParseAddress] refuses.
func (c *Client) Read(ctx context.Context, address string) (Answer, error) {
	var a Answer
	if err := c.get(ctx, address, &a); err != nil {
		return Answer{}, err
	}
	if err := a.Validate(); err != nil {
		return Answer{}, fmt.Errorf("%w: %s is no probe listener: %w", ErrRefused, address, err)
	}
	return a, nil
}

// Check asks a probe listener and judges its answer; see [Client.Read] and
// [Want.Check].
func (c *Client) Check(ctx context.Context, address string, want Want) error {
	a, err := c.Read(ctx, address)
	if err != nil {
		return err
	}
	if err := want.Check(a); err != nil {
		return fmt.Errorf("%s: %w", address, err)
	}
	return nil
}

// DeploymentID asks a service's own port, or a listener, which deployment it is. The
// errors are those of Read.
func (c *Client) DeploymentID(ctx context.Context, address string) (stores.DeploymentID, error) {
	var a id
	if err := c.get(ctx, address, &a); err != nil {
		return "", err
	}
	if err := a.Deployment.Validate(); err != nil {
		return "", fmt.Errorf("%w: %s says no deployment id: %w", ErrRefused, address, err)
	}
	return a.Deployment, nil
}

func (c *Client) get(ctx context.Context, address string, into any) error {
	address, err := ParseAddress(address)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address+Path, nil)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req.Header.Set("Accept", "application/json")
	res, err := c.http.Do(req)
	if err != nil {
		return unreachable(ctx, address, err)
	}
	defer res.Body.Close()
	switch {
	case res.StatusCode == http.StatusOK:
		err := decode(res.Body, into)
		if errors.Is(err, errBroken) {
			return unreachable(ctx, address, err)
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrRefused, address, err)
		}
		return nil
	case res.StatusCode == http.StatusTooManyRequests:
		return &cells.Answer{Code: cells.CodeProbeBusy, Detail: address, RetryAfter: retryAfter(res.Header)}
	case res.StatusCode >= 500:
		return &cells.Answer{Code: cells.CodeProbeUnreachable, Detail: fmt.Sprintf("%s answers %d", address, res.StatusCode), RetryAfter: retryAfter(res.Header)}
	}
	return fmt.Errorf("%w: %s answers %d at %s, so it is no probe", ErrRefused, address, res.StatusCode, Path)
}

// unreachable is PROBE_UNREACHABLE, unless the caller gave up.
func unreachable(ctx context.Context, address string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &cells.Answer{Code: cells.CodeProbeUnreachable, Detail: address, Err: err}
}

func retryAfter(h http.Header) time.Duration {
	n, err := strconv.ParseUint(h.Get("Retry-After"), 10, 31)
	if err != nil {
		return 0
	}
	return min(time.Duration(n)*time.Second, maxRetryAfter)
}

// Wait runs do until it succeeds or fails with something else than PROBE_BUSY or
// PROBE_UNREACHABLE, for at most wait; then its last error comes back, with how long
// it was waited for. It waits as long as the answer's RetryAfter says, or with
// growing pauses of up to two seconds.
func Wait(ctx context.Context, wait time.Duration, do func(context.Context) error) error {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = 200*time.Millisecond, 2*time.Second
	begin := time.Now()
	for {
		err := do(ctx)
		if err == nil || !Passing(err) {
			return err
		}
		next := pause.NextBackOff()
		if a := cells.AnswerOf(err); a.RetryAfter > 0 {
			next = a.RetryAfter
		}
		if time.Since(begin)+next > wait {
			return fmt.Errorf("waited %v: %w", time.Since(begin).Round(time.Millisecond), err)
		}
		t := time.NewTimer(next)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w, while waiting for: %w", context.Cause(ctx), err)
		case <-t.C:
		}
	}
}

// Passing reports whether an error of a probe may pass by itself.
func Passing(err error) bool {
	a := cells.AnswerOf(err)
	return a != nil && (a.Code == cells.CodeProbeBusy || a.Code == cells.CodeProbeUnreachable)
}
