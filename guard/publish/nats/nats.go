// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/publish"
)

// Config describes the stream. Empty fields take the default.
type Config struct {
	// URL of one or more servers, parted by commas: nats:// or tls://. Required.
	URL string
	// Stream is the stream's name; CELL_EVENTS.
	Stream string
	// Prefix is what subjects begin with; cell.events. The stream must take
	// <prefix>.*.
	Prefix string
	// Create makes the stream if it is missing: files, the duplicate window, batches
	// that are stored as one. An existing stream is never changed.
	Create bool
	// Replicas of a stream that is made; 1.
	Replicas int
	// MaxAge of messages in a stream that is made; 0 keeps them.
	MaxAge time.Duration
	// Settle bounds the wait for acknowledgements after a pause or a timeout;
	// [publish.DefaultSettle].
	Settle time.Duration
	// Options are for the connection: credentials, certificates.
	Options []nats.Option
	// Logger takes losses of the connection; slog.Default().
	Logger *slog.Logger
}

// Publisher stores events in a stream. It is a [guard.Publisher], safe for
// concurrent use.
type Publisher struct {
	cfg Config
	nc  *nats.Conn
	js  jetstream.JetStream

	mu     sync.Mutex // guards below
	stream *stream    // nil until it was found
	last   map[cells.TenantID]position
	// conn ends when the connection breaks, and is replaced then.
	conn  context.Context
	broke context.CancelCauseFunc
}

// errDisconnected: what was in flight is stored or not.
var errDisconnected = errors.New("nats: the connection broke")

// disconnected ends the waits for answers, which will not come.
func (p *Publisher) disconnected(err error) {
	if err != nil {
		p.cfg.Logger.Warn("nats: disconnected", "err", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broke(errDisconnected)
	p.conn, p.broke = context.WithCancelCause(context.Background())
}

func (p *Publisher) connection() context.Context {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn
}

// stream is what is known of the stream.
type stream struct {
	jetstream.Stream
	atomic bool // batches are stored as one
}

// maxPositions bounds what is remembered; all of it is forgotten then.
const maxPositions = 100_000

var (
	streamName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)
	prefixName = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)
)

// New returns a publisher that connects in the background: a server that is away
// makes publications fail, not New. The error wraps [cells.ErrInvalid]. Close it.
func New(cfg Config) (*Publisher, error) {
	if cfg.Stream == "" {
		cfg.Stream = "CELL_EVENTS"
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "cell.events"
	}
	if cfg.Replicas == 0 {
		cfg.Replicas = 1
	}
	if cfg.Settle == 0 {
		cfg.Settle = publish.DefaultSettle
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	switch {
	case cfg.URL == "":
		return nil, fmt.Errorf("%w: a NATS publisher needs a server's URL", cells.ErrInvalid)
	case !streamName.MatchString(cfg.Stream):
		return nil, fmt.Errorf("%w: stream name %q; allowed are letters, digits, _ and -", cells.ErrInvalid, cfg.Stream)
	case !prefixName.MatchString(cfg.Prefix):
		return nil, fmt.Errorf("%w: subject prefix %q", cells.ErrInvalid, cfg.Prefix)
	case cfg.Replicas < 0 || cfg.MaxAge < 0 || cfg.Settle < 0:
		return nil, fmt.Errorf("%w: a number of the NATS publisher is negative", cells.ErrInvalid)
	}
	p := &Publisher{cfg: cfg, last: map[cells.TenantID]position{}}
	p.conn, p.broke = context.WithCancelCause(context.Background())
	opts := append([]nats.Option{
		nats.Name("cloister-relay"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(100 * time.Millisecond),
		nats.Timeout(5 * time.Second), nats.PingInterval(10 * time.Second), nats.MaxPingsOutstanding(2),
		// Nothing is kept to be sent later: it might be after a pause.
		nats.ReconnectBufSize(-1),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { p.disconnected(err) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { cfg.Logger.Warn("nats: error", "err", err) }),
	}, cfg.Options...)
	var err error
	if p.nc, err = nats.Connect(cfg.URL, opts...); err != nil {
		return nil, fmt.Errorf("%w: connecting to NATS: %w", cells.ErrInvalid, err)
	}
	if p.js, err = jetstream.New(p.nc); err != nil {
		p.nc.Close()
		return nil, fmt.Errorf("%w: JetStream: %w", cells.ErrInvalid, err)
	}
	return p, nil
}

// Close ends the connection.
func (p *Publisher) Close() { p.nc.Close() }

// Subject returns a tenant's subject below prefix. Full stops of the tenant's name
// are written =2E, so that it is one token.
func Subject(prefix string, tenant cells.TenantID) string {
	return prefix + "." + strings.ReplaceAll(string(tenant), ".", "=2E")
}

func (p *Publisher) subject(tenant cells.TenantID) string { return Subject(p.cfg.Prefix, tenant) }

// find returns the stream, which is looked up, or made, once.
func (p *Publisher) find(ctx context.Context) (*stream, error) {
	p.mu.Lock()
	s := p.stream
	p.mu.Unlock()
	if s != nil {
		return s, nil
	}
	found, err := p.js.Stream(ctx, p.cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) && p.cfg.Create {
		found, err = p.js.CreateStream(ctx, jetstream.StreamConfig{
			Name: p.cfg.Stream, Description: "events of tenants, by package guard/publish/nats", Subjects: []string{p.cfg.Prefix + ".*"},
			Storage: jetstream.FileStorage, Replicas: p.cfg.Replicas, MaxAge: p.cfg.MaxAge, Duplicates: duplicateWindow(p.cfg.MaxAge),
			// Without direct reads, which may be answered by a replica that is behind.
			Discard: jetstream.DiscardOld, AllowAtomicPublish: true,
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			found, err = p.js.Stream(ctx, p.cfg.Stream) // another process was first
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: NATS stream %s: %w", cells.ErrUnavailable, p.cfg.Stream, err)
	}
	s = &stream{Stream: found, atomic: found.CachedInfo().Config.AllowAtomicPublish}
	p.mu.Lock()
	p.stream = s
	p.mu.Unlock()
	return s, nil
}

// duplicateWindow may not be longer than messages are kept.
func duplicateWindow(maxAge time.Duration) time.Duration {
	const window = 10 * time.Minute
	if maxAge > 0 {
		return min(window, maxAge)
	}
	return window
}
