// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Headers of a request. The body is the event as JSON, as package guard encodes
// it.
const (
	// HeaderID is the event's id, the same at every attempt.
	HeaderID = "Webhook-Id"
	// HeaderTimestamp is when the attempt was made, in Unix seconds.
	HeaderTimestamp = "Webhook-Timestamp"
	// HeaderSignature has one or more "v1,<base64>" separated by spaces: the HMAC
	// with SHA-256 of id, timestamp and body joined by dots, by each secret.
	HeaderSignature = "Webhook-Signature"
	// HeaderSequence is the event_seq.
	HeaderSequence = "Webhook-Sequence"
	// HeaderTenant is the tenant. It is not called Cell-Tenant since edges strip
	// Cell headers.
	HeaderTenant = "Webhook-Tenant"
)

const (
	minSecret     = 16
	maxAnswerRead = 64 << 10
)

// Config describes the receiver.
type Config struct {
	// URL is where events are posted; http or https.
	URL string
	// Secrets sign the requests; at least one of at least 16 bytes. More than one
	// while a secret is being replaced.
	Secrets [][]byte
	// Timeout bounds one request; 0 means 5 s.
	Timeout time.Duration
	// Client sends them; nil means one of its own. Redirects are never followed.
	Client *http.Client
	// Now is the clock of the timestamp; nil means time.Now.
	Now func() time.Time
}

// Publisher posts events. It is a [guard.Publisher], safe for concurrent use.
type Publisher struct {
	url     string
	secrets [][]byte
	timeout time.Duration
	client  *http.Client
	now     func() time.Time
}

// New checks the configuration. The error wraps [cells.ErrInvalid] and has no
// secret in it.
func New(cfg Config) (*Publisher, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%w: webhook address must be an absolute http or https URL", cells.ErrInvalid)
	}
	if len(cfg.Secrets) == 0 {
		return nil, fmt.Errorf("%w: a webhook needs a secret", cells.ErrInvalid)
	}
	p := &Publisher{url: cfg.URL, timeout: cfg.Timeout, now: cfg.Now}
	for _, s := range cfg.Secrets {
		if len(s) < minSecret {
			return nil, fmt.Errorf("%w: a webhook secret has %d bytes, want at least %d", cells.ErrInvalid, len(s), minSecret)
		}
		p.secrets = append(p.secrets, bytes.Clone(s))
	}
	if p.timeout < 0 {
		return nil, fmt.Errorf("%w: negative webhook timeout", cells.ErrInvalid)
	}
	if p.timeout == 0 {
		p.timeout = 5 * time.Second
	}
	if p.now == nil {
		p.now = time.Now
	}
	client := http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	if cfg.Client != nil {
		client = *cfg.Client
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	p.client = &client
	return p, nil
}

// Publish implements [guard.Publisher]: it posts the events one after the other
// and stops at the first that is not accepted, with a [guard.PartialError].
func (p *Publisher) Publish(ctx context.Context, events []guard.Event) error {
	for i, e := range events {
		if err := p.post(ctx, e); err != nil {
			return &guard.PartialError{Accepted: i, Err: err}
		}
	}
	return nil
}

// Close closes idle connections.
func (p *Publisher) Close() { p.client.CloseIdleConnections() }

func (p *Publisher) post(ctx context.Context, e guard.Event) error {
	body, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("%w: event %d: %w", cells.ErrInvalid, e.Seq, err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, p.timeout, errTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	stamp := strconv.FormatInt(p.now().Unix(), 10)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "cloister-relay")
	req.Header.Set(HeaderID, e.ID)
	req.Header.Set(HeaderTimestamp, stamp)
	req.Header.Set(HeaderSequence, strconv.FormatUint(uint64(e.Seq), 10))
	req.Header.Set(HeaderTenant, string(e.Tenant))
	sigs := make([]string, len(p.secrets))
	for i, s := range p.secrets {
		sigs[i] = sign(s, e.ID, stamp, body)
	}
	req.Header.Set(HeaderSignature, strings.Join(sigs, " "))
	resp, err := p.client.Do(req)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswerRead)) // so that the connection is used again
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("webhook answered %s to event %d", resp.Status, e.Seq)
	}
	return nil
}

var errTimeout = errors.New("webhook did not answer in time")

func sign(secret []byte, id, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(id + "." + stamp + "."))
	mac.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// Verify is for receivers: it reports whether the request's headers sign the
// body by the secret, not longer than tolerance ago (or ahead). The error wraps
// [cells.ErrInvalid] and says what is wrong.
func Verify(secret []byte, h http.Header, body []byte, now time.Time, tolerance time.Duration) error {
	stamp := h.Get(HeaderTimestamp)
	secs, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil {
		return fmt.Errorf("%w: %s is missing or no number", cells.ErrInvalid, HeaderTimestamp)
	}
	if d := now.Sub(time.Unix(secs, 0)); d > tolerance || d < -tolerance {
		return fmt.Errorf("%w: the request was signed %s away from now", cells.ErrInvalid, d.Round(time.Second))
	}
	want := []byte(sign(secret, h.Get(HeaderID), stamp, body))
	for got := range strings.FieldsSeq(h.Get(HeaderSignature)) {
		if hmac.Equal([]byte(got), want) {
			return nil
		}
	}
	return fmt.Errorf("%w: no signature of this secret", cells.ErrInvalid)
}
