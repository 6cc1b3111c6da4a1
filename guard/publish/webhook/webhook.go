// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish"
)

// Headers of a request.
const (
	// HeaderID is the event's id, the same at every attempt.
	HeaderID = "webhook-id"
	// HeaderTimestamp is when the attempt was made, in Unix seconds.
	HeaderTimestamp = "webhook-timestamp"
	// HeaderSignature has one or more signatures parted by spaces, see [Sign].
	HeaderSignature = "webhook-signature"
	// HeaderSequence is the event_seq.
	HeaderSequence = "webhook-sequence"
	// HeaderTenant is the tenant. It is not called Cell-Tenant since edges strip
	// Cell headers.
	HeaderTenant = "webhook-tenant"
)

const (
	maxAnswerRead = 64 << 10
	// maxThrottle bounds what a Retry-After is believed.
	maxThrottle = time.Hour
	// goneDelay is how long the relay leaves a tenant alone whose endpoint is gone.
	goneDelay = time.Minute
)

// ErrGone says that the receiver has answered 410 Gone: it wants no more events
// from here. Nothing is sent until [Publisher.Reopen].
var ErrGone = errors.New("webhook: the receiver is gone (410)")

// Config describes the receiver.
type Config struct {
	// URL is where events are posted: https, or http to a loopback address.
	URL string
	// Insecure allows http to other hosts.
	Insecure bool
	// Keys sign the requests, secrets or private keys; at least one. More than one
	// while a key is being replaced.
	Keys []Key
	// Timeout bounds one request; 0 means 15 s.
	Timeout time.Duration
	// Settle bounds the wait for the answer to a request that is under way when the
	// tenant is paused; [publish.DefaultSettle].
	Settle time.Duration
	// PublicOnly refuses to connect to addresses that are not public.
	PublicOnly bool
	// Client sends the requests; nil means one of its own. Redirects are never
	// followed. Not together with PublicOnly.
	Client *http.Client
	// Now is the clock of timestamps and of Retry-After; nil means time.Now.
	Now func() time.Time
}

// Publisher posts events. It is a [guard.Publisher], safe for concurrent use.
type Publisher struct {
	url     string
	keys    []Key
	timeout time.Duration
	settle  time.Duration
	client  *http.Client
	now     func() time.Time

	gone  atomic.Bool
	until atomic.Int64 // throttled until then, in Unix nanoseconds
}

// New checks the configuration. The error wraps [cells.ErrInvalid] and has no
// secret in it.
func New(cfg Config) (*Publisher, error) {
	bad := func(what string) (*Publisher, error) { return nil, fmt.Errorf("%w: %s", cells.ErrInvalid, what) }
	u, err := url.Parse(cfg.URL)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return bad("the webhook address must be an absolute http or https URL")
	case u.User != nil:
		return bad("the webhook address has a user in it; requests are signed instead")
	case u.Scheme == "http" && !cfg.Insecure && !loopback(u.Hostname()):
		return bad("the webhook address must be https; plain http is for this machine only")
	case len(cfg.Keys) == 0 || !slices.ContainsFunc(cfg.Keys, Key.signs):
		return bad("a webhook needs a secret or a private key")
	case slices.ContainsFunc(cfg.Keys, func(k Key) bool { return !k.signs() }):
		return bad("a public key cannot sign webhooks")
	case len(cfg.Keys) > maxSignatures:
		return bad("too many webhook keys")
	case cfg.Timeout < 0 || cfg.Settle < 0:
		return bad("negative webhook timeout")
	case cfg.PublicOnly && cfg.Client != nil:
		return bad("addresses can be checked only in a client of the publisher's own")
	}
	p := &Publisher{url: cfg.URL, keys: slices.Clone(cfg.Keys), timeout: cfg.Timeout, settle: cfg.Settle, now: cfg.Now}
	if p.settle == 0 {
		p.settle = publish.DefaultSettle
	}
	if p.timeout == 0 {
		p.timeout = 15 * time.Second
	}
	if p.now == nil {
		p.now = time.Now
	}
	client := http.Client{Transport: transport(cfg.PublicOnly)}
	if cfg.Client != nil {
		client = *cfg.Client
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	p.client = &client
	return p, nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// Publish implements [guard.Publisher]: it posts the events one after the other
// and stops at the first that is not accepted, with a [guard.PartialError]. When
// the receiver has said when to come again, or is gone, the error wraps a
// [guard.DelayError].
func (p *Publisher) Publish(ctx context.Context, events []guard.Event) error {
	for i, e := range events {
		if err := p.post(ctx, e); err != nil {
			return &guard.PartialError{Accepted: i, Err: err}
		}
	}
	return nil
}

// Gone reports whether the receiver has answered 410.
func (p *Publisher) Gone() bool { return p.gone.Load() }

// Reopen sends events again to a receiver that was gone or throttled.
func (p *Publisher) Reopen() {
	p.gone.Store(false)
	p.until.Store(0)
}

// Close closes idle connections.
func (p *Publisher) Close() { p.client.CloseIdleConnections() }

// blocked returns why nothing may be sent now, or nil.
func (p *Publisher) blocked() error {
	if p.gone.Load() {
		return &guard.DelayError{After: goneDelay, Err: ErrGone}
	}
	if wait := time.Unix(0, p.until.Load()).Sub(p.now()); wait > 0 {
		return &guard.DelayError{After: wait, Err: errThrottled}
	}
	return nil
}

var errThrottled = errors.New("the webhook's receiver has asked for a pause")

func (p *Publisher) post(ctx context.Context, e guard.Event) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := p.blocked(); err != nil {
		return err
	}
	body, err := encode(e)
	if err != nil {
		return err
	}
	if e.ID == "" || strings.ContainsAny(e.ID, ". \r\n") {
		return fmt.Errorf("%w: the id of event %d cannot be signed", cells.ErrInvalid, e.Seq)
	}
	settling, settled := publish.Settle(ctx, p.settle)
	defer settled()
	ctx, cancel := context.WithTimeoutCause(settling, p.timeout, errTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	at := p.now()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "cloister-relay")
	req.Header.Set(HeaderID, e.ID)
	req.Header.Set(HeaderTimestamp, strconv.FormatInt(at.Unix(), 10))
	req.Header.Set(HeaderSignature, Sign(p.keys, e.ID, at, body))
	req.Header.Set(HeaderSequence, strconv.FormatUint(uint64(e.Seq), 10))
	req.Header.Set(HeaderTenant, string(e.Tenant))
	resp, err := p.client.Do(req)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswerRead)) // so that the connection is used again
	if resp.StatusCode/100 == 2 {
		return nil
	}
	err = fmt.Errorf("webhook answered %s to event %d", resp.Status, e.Seq)
	if resp.StatusCode == http.StatusGone {
		p.gone.Store(true)
		return &guard.DelayError{After: goneDelay, Err: fmt.Errorf("%w: %w", ErrGone, err)}
	}
	if wait := retryAfter(resp.Header.Get("Retry-After"), p.now()); wait > 0 {
		p.until.Store(p.now().Add(wait).UnixNano())
		return &guard.DelayError{After: wait, Err: err}
	}
	return err
}

var errTimeout = errors.New("webhook did not answer in time")

// retryAfter reads the header, in seconds or as a date; 0 if there is none to be
// understood.
func retryAfter(v string, now time.Time) time.Duration {
	if secs, err := strconv.ParseUint(v, 10, 32); err == nil {
		return min(time.Duration(secs)*time.Second, maxThrottle)
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(0, min(at.Sub(now), maxThrottle))
	}
	return 0
}
