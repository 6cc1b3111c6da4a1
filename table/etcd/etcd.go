// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

const (
	// DefaultPrefix is where the table lives unless [WithPrefix] says otherwise.
	DefaultPrefix = "/cloister/"

	maxPrefix = 256
	chunk     = 1000 // rows of one range request
)

// Table is a [cells.RoutingTable] in an etcd cluster. Safe for concurrent use.
type Table struct {
	client  *clientv3.Client
	owned   bool // Close closes client
	prefix  string
	routes  string // prefix of the rows' keys
	end     string // the first key behind them
	timeout time.Duration
	idle    time.Duration
	silence time.Duration
	queue   int
	streams atomic.Uint64 // numbers the watches' streams

	life context.Context // ends with Close
	stop context.CancelFunc
	once sync.Once

	mu     sync.Mutex     // guards closed against going.Add
	closed bool           // Close was called
	going  sync.WaitGroup // the goroutines that read streams
}

var _ cells.RoutingTable = (*Table)(nil)

// Option configures a Table.
type Option func(*Table)

// WithPrefix sets the prefix of the table's keys, [DefaultPrefix] otherwise: 1 to
// 256 printable ASCII bytes; a slash is added if it does not end in one. Tables
// below different prefixes know nothing of each other.
func WithPrefix(p string) Option { return func(t *Table) { t.prefix = p } }

// WithTimeout bounds each get, list and compare-and-set, and the begin of a watch;
// 5 s by default. A shorter deadline of the context counts as well.
func WithTimeout(d time.Duration) Option {
	return func(t *Table) { t.timeout = max(d, time.Millisecond) }
}

// WithWatchIdle sets how long a watch without changes waits before it asks for a
// sign of life; 1 s by default.
func WithWatchIdle(d time.Duration) Option {
	return func(t *Table) { t.idle = max(d, time.Millisecond) }
}

// WithSilence sets after how long without a sign of life, although one was asked
// for, a watch is broken; 5 s by default.
func WithSilence(d time.Duration) Option {
	return func(t *Table) { t.silence = max(d, time.Millisecond) }
}

// WithWatchQueue bounds the rows that a watch keeps for a caller that does not
// take them; 4096 by default, and one response of etcd more.
func WithWatchQueue(n int) Option { return func(t *Table) { t.queue = max(n, 1) } }

// Open connects to a cluster and opens the table there. cfg is the client's own
// configuration: endpoints, TLS, user and password are passed through; a dial
// timeout, a keepalive and a logger that says nothing are filled in where they are
// missing. The cluster must answer. The error wraps [cells.ErrInvalid] or
// [cells.ErrUnavailable].
func Open(ctx context.Context, cfg clientv3.Config, opts ...Option) (*Table, error) {
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = 5 * time.Second
	}
	if cfg.DialKeepAliveTime == 0 {
		cfg.DialKeepAliveTime, cfg.DialKeepAliveTimeout = 10*time.Second, 5*time.Second
	}
	if cfg.Logger == nil && cfg.LogConfig == nil {
		cfg.Logger = zap.NewNop()
	}
	// The caller's context bounds the opening, not the client's life.
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("%w: etcd client: %v", openKind(err), err)
	}
	t, err := New(ctx, client, opts...)
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	t.owned = true
	return t, nil
}

// openKind tells a configuration that cannot be used from a cluster that does not
// answer.
func openKind(err error) error {
	if errors.Is(err, clientv3.ErrNoAvailableEndpoints) || errors.Is(err, clientv3.ErrOldCluster) {
		return cells.ErrInvalid
	}
	return cells.ErrUnavailable
}

// New opens the table on a client that the caller still owns. The cluster must
// answer. The error wraps [cells.ErrInvalid] or [cells.ErrUnavailable].
func New(ctx context.Context, client *clientv3.Client, opts ...Option) (*Table, error) {
	t := &Table{client: client, prefix: DefaultPrefix, timeout: 5 * time.Second, idle: time.Second, silence: 5 * time.Second, queue: 4096}
	for _, o := range opts {
		o(t)
	}
	if err := checkPrefix(t.prefix); err != nil {
		return nil, err
	}
	t.routes = strings.TrimSuffix(t.prefix, "/") + "/routes/"
	t.end = clientv3.GetPrefixRangeEnd(t.routes)
	t.life, t.stop = context.WithCancel(context.Background())
	if _, err := t.revision(ctx); err != nil {
		t.stop()
		return nil, err
	}
	return t, nil
}

func checkPrefix(p string) error {
	if p == "" || len(p) > maxPrefix {
		return fmt.Errorf("%w: a key prefix of %d bytes, want 1 to %d", cells.ErrInvalid, len(p), maxPrefix)
	}
	for i := range len(p) {
		if p[i] <= ' ' || p[i] > '~' {
			return fmt.Errorf("%w: key prefix has byte %q at %d", cells.ErrInvalid, p[i], i)
		}
	}
	return nil
}

// Close ends every watch and every later call with [cells.ErrClosed], and closes
// the client if [Open] made it. It may be called again.
func (t *Table) Close() error {
	var err error
	t.once.Do(func() {
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		t.stop()
		t.going.Wait()
		if t.owned {
			err = t.client.Close()
		}
	})
	return err
}

var errTableClosed = fmt.Errorf("%w: table", cells.ErrClosed)

// begin refuses what need not reach the cluster.
func (t *Table) begin(ctx context.Context) error {
	if t.life.Err() != nil {
		return errTableClosed
	}
	return pull.EndOf(ctx)
}

// call returns the context of one request: bounded, ended by Close, and answered
// only by a member that has a leader.
func (t *Table) call(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), t.timeout)
	unlink := context.AfterFunc(t.life, cancel)
	return ctx, func() { unlink(); cancel() }
}

// failed translates an error of the client; ctx is the caller's.
func (t *Table) failed(ctx context.Context, doing string, err error) error {
	if t.life.Err() != nil {
		return errTableClosed
	}
	if end := pull.EndOf(ctx); end != nil {
		return fmt.Errorf("%s: %w", doing, end)
	}
	return fmt.Errorf("%w: %s: etcd: %v", cells.ErrUnavailable, doing, err)
}

// revision returns the store's revision, read from the majority.
func (t *Table) revision(ctx context.Context) (cells.Revision, error) {
	c, done := t.call(ctx)
	defer done()
	res, err := t.client.Get(c, t.routes, clientv3.WithRange(t.end), clientv3.WithCountOnly())
	if err != nil {
		return 0, t.failed(ctx, "reading the revision", err)
	}
	return cells.Revision(res.Header.Revision), nil
}

// Get implements [cells.RoutingTable].
func (t *Table) Get(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	if err := tenant.Validate(); err != nil {
		return cells.TenantRoute{}, err
	}
	r, err := t.read(ctx, tenant)
	if err == nil && r.Revision == 0 {
		err = fmt.Errorf("%w for %s", cells.ErrNotFound, tenant)
	}
	return r, err
}

// read returns the tenant's row, the zero row if there is none.
func (t *Table) read(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	c, done := t.call(ctx)
	defer done()
	res, err := t.client.Get(c, t.routes+string(tenant))
	if err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "reading a route", err)
	}
	if len(res.Kvs) == 0 {
		return cells.TenantRoute{}, nil
	}
	return t.decode(res.Kvs[0])
}

// listTries bounds how often a list is begun again because its revision was
// compacted between two requests.
const listTries = 3

// List implements [cells.RoutingTable]. A page is read at one revision, whatever
// number of requests it takes.
func (t *Table) List(ctx context.Context, opts cells.ListOptions) (cells.RoutePage, error) {
	if err := t.begin(ctx); err != nil {
		return cells.RoutePage{}, err
	}
	if err := opts.Validate(); err != nil {
		return cells.RoutePage{}, err
	}
	for try := 1; ; try++ {
		page, err := t.list(ctx, opts)
		if err == nil || errors.Is(err, cells.ErrInvalid) {
			return page, err
		}
		if !errors.Is(err, rpctypes.ErrCompacted) || try == listTries {
			return cells.RoutePage{}, t.failed(ctx, "listing routes", err)
		}
	}
}

// list returns the client's errors as they are.
func (t *Table) list(ctx context.Context, opts cells.ListOptions) (cells.RoutePage, error) {
	limit := opts.PageSize()
	from := t.routes
	if opts.After != "" {
		from += string(opts.After) + "\x00"
	}
	var page cells.RoutePage
	for {
		kvs, more, revision, err := t.span(ctx, from, int64(page.Revision), min(chunk, limit+1))
		if err != nil {
			return cells.RoutePage{}, err
		}
		page.Revision = cells.Revision(revision)
		for _, r := range kvs {
			if !opts.Matches(&r) {
				continue
			}
			if len(page.Routes) == limit {
				page.Next = page.Routes[limit-1].TenantID
				return page, nil
			}
			page.Routes = append(page.Routes, r)
		}
		if !more {
			return page, nil
		}
		from = t.routes + string(kvs[len(kvs)-1].TenantID) + "\x00"
	}
}

// span reads one range of rows at a revision, or at the present one if it is 0.
func (t *Table) span(ctx context.Context, from string, at int64, n int) (rows []cells.TenantRoute, more bool, revision int64, err error) {
	c, done := t.call(ctx)
	defer done()
	ops := []clientv3.OpOption{clientv3.WithRange(t.end), clientv3.WithLimit(int64(n)), clientv3.WithRev(at)}
	res, err := t.client.Get(c, from, ops...)
	if err != nil {
		return nil, false, 0, err
	}
	for _, kv := range res.Kvs {
		r, err := t.decode(kv)
		if err != nil {
			return nil, false, 0, err
		}
		rows = append(rows, r)
	}
	if at == 0 {
		at = res.Header.Revision
	}
	return rows, res.More, at, nil
}
