// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Config says what a process is and what it reads.
type Config struct {
	// Cell is CELL; "" when it is not set: the process then runs no check, and is gated
	// where one would be needed.
	Cell cells.CellID
	// Store keeps the cell's own rows. Required; the caller closes it after Close.
	Store tenancy.Store
	// Fingerprint is the process's configuration; it counts with a cell.
	Fingerprint tenancy.Fingerprint
	// Router is how the directory is asked. Required with a cell.
	Router Router
	// CacheFor is how long rows are used without another read; 5 s by default. The
	// directory's "attaching" and a tenant's row are used as long.
	CacheFor time.Duration
	// MaxStale is how long they are kept while they cannot be read; 60 s by default.
	MaxStale time.Duration
	// ReadTimeout bounds one read; 2 s by default.
	ReadTimeout time.Duration
	// RouterTimeout bounds one question to the directory; 5 s by default.
	RouterTimeout time.Duration
	// BeatEvery is how often the process reports; 1 s by default, and at once when its
	// mode or its gate changes.
	BeatEvery time.Duration
	// AllowUnread lets Start succeed when the first read fails; the process is gated
	// until one lands.
	AllowUnread bool
	// Instance names this start of the process; random by default. Build is its
	// version, for people and for attach.
	Instance, Build string
	// Settings are reported as the process's run-time settings, with its own times added:
	// cache-for, max-stale, router-timeout. See [tenancy.Settings] for what may be in them.
	Settings tenancy.Settings
	// Log takes what changes; slog.Default() by default.
	Log *slog.Logger
}

func (c *Config) normalize() error {
	if c.Store == nil {
		return fmt.Errorf("%w: tenancy: no store", cells.ErrInvalid)
	}
	if c.Cell != "" {
		if err := c.Cell.Validate(); err != nil {
			return fmt.Errorf("CELL: %w", err)
		}
		if c.Router == nil || c.Fingerprint.Schema < 1 {
			return fmt.Errorf("%w: tenancy: a process of a cell needs a router and a fingerprint", cells.ErrInvalid)
		}
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&c.CacheFor, 5 * time.Second}, {&c.MaxStale, time.Minute}, {&c.ReadTimeout, 2 * time.Second}, {&c.RouterTimeout, 5 * time.Second}, {&c.BeatEvery, time.Second}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 {
			return fmt.Errorf("%w: tenancy: a duration is negative", cells.ErrInvalid)
		}
	}
	if c.MaxStale < c.CacheFor {
		return fmt.Errorf("%w: tenancy: rows are kept for %s and used for %s", cells.ErrInvalid, c.MaxStale, c.CacheFor)
	}
	if c.Instance == "" {
		c.Instance = fmt.Sprintf("p-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:12]))
	}
	if err := cells.MoveID(c.Instance).Validate(); err != nil {
		return fmt.Errorf("%w: tenancy: instance %q", cells.ErrInvalid, c.Instance)
	}
	own := maps.Clone(c.Settings)
	if own == nil {
		own = tenancy.Settings{}
	}
	own["cache-for"], own["max-stale"], own["router-timeout"] = c.CacheFor.String(), c.MaxStale.String(), c.RouterTimeout.String()
	if err := own.Validate(); err != nil {
		return err
	}
	c.Settings = own
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return nil
}

// Process is one process's view of its cell. Safe for concurrent use.
type Process struct {
	cfg   Config
	log   *slog.Logger
	calls singleflight.Group // placements and questions to the directory

	life context.Context // ends at Close
	end  context.CancelFunc
	wg   sync.WaitGroup

	mu        sync.Mutex // guards what follows
	rows      tenancy.Rows
	good      time.Time     // when the read that gave rows began; zero before one
	tried     time.Time     // when the last read began
	failed    error         // of the last read; nil when it landed
	reading   chan struct{} // closed when the read under way ends; nil without one
	held      map[cells.TenantID]heldAt
	attaching attachingAt
	reason    tenancy.Reason // as it was last told to waiters
	changed   chan struct{}  // closed and replaced when reason or mode changes
	workers   bool
	lease     string
	beatErr   bool
	started   bool

	closed atomic.Bool
}

// New returns a process that has read nothing yet. Errors wrap [cells.ErrInvalid].
func New(cfg Config) (*Process, error) {
	if err := cfg.normalize(); err != nil {
		return nil, err
	}
	p := &Process{cfg: cfg, log: cfg.Log.With("cell", cfg.Cell, "instance", cfg.Instance), changed: make(chan struct{}), held: map[cells.TenantID]heldAt{}}
	p.life, p.end = context.WithCancel(context.Background())
	p.reason = tenancy.Unread("not yet")
	return p, nil
}

// Start does the first read and begins to refresh and to report. Call it when the
// store is open and migrated, before the first heartbeat of anything and before a
// lease is taken. It fails when the read does, unless AllowUnread is set; a gated
// process has started, too.
func (p *Process) Start(ctx context.Context) error {
	err := p.refresh(ctx)
	if err != nil && !p.cfg.AllowUnread {
		return fmt.Errorf("tenancy: the first read of the cell's own rows: %w", err)
	}
	if reason := p.tell(); reason.Gated() {
		p.log.Warn("tenancy: this process is gated", "reason", reason.Code, "detail", reason.Text)
	}
	p.mu.Lock()
	p.started = true
	p.mu.Unlock()
	p.wg.Go(p.loop)
	return nil
}

// Close ends the loops, tells the cell that the process is gone (bounded by ctx) and
// returns. It may be called again.
func (p *Process) Close(ctx context.Context) error {
	if p.closed.Swap(true) {
		return nil
	}
	p.end()
	p.wg.Wait()
	p.mu.Lock()
	started := p.started
	p.mu.Unlock()
	if !started {
		return nil
	}
	if err := p.cfg.Store.Leave(ctx, p.cfg.Instance); err != nil {
		return fmt.Errorf("tenancy: leaving: %w", err)
	}
	return nil
}

// loop keeps the rows fresh without requests, so that the gate, the workers and the
// heartbeats follow them.
func (p *Process) loop() {
	every := min(p.cfg.CacheFor/2, p.cfg.BeatEvery)
	t := time.NewTicker(every)
	defer t.Stop()
	var beaten time.Time
	var said tenancy.Mode
	var gated string
	for {
		p.mu.Lock()
		stale := time.Since(p.tried) >= p.cfg.CacheFor/2
		p.mu.Unlock()
		if stale {
			_ = p.refresh(p.life) // logged there
		}
		reason := p.tell()
		if mode := p.Mode(); time.Since(beaten) >= p.cfg.BeatEvery || mode != said || reason.Code != gated {
			beaten, said, gated = time.Now(), mode, reason.Code
			p.beat(reason)
		}
		select {
		case <-p.life.Done():
			return
		case <-t.C:
		}
	}
}

func (p *Process) beat(reason tenancy.Reason) {
	ctx, cancel := context.WithTimeout(p.life, p.cfg.ReadTimeout)
	defer cancel()
	p.mu.Lock()
	h := tenancy.Heartbeat{Instance: p.cfg.Instance, Cell: p.cfg.Cell, Build: p.cfg.Build, CacheFor: p.cfg.CacheFor, Gated: reason.Code, Settings: p.cfg.Settings}
	if !p.good.IsZero() {
		h.Mode = p.rows.EffectiveMode()
	}
	if !reason.Gated() {
		h.Workers, h.Lease = p.workers, p.lease
	}
	p.mu.Unlock()
	if p.cfg.Cell != "" {
		h.Fingerprint = &p.cfg.Fingerprint
	}
	err := p.cfg.Store.Beat(ctx, h)
	p.mu.Lock()
	before := p.beatErr
	p.beatErr = err != nil
	p.mu.Unlock()
	if err != nil && !before && p.life.Err() == nil {
		p.log.Error("tenancy: the heartbeat cannot be written", "err", err)
	}
}

// refresh reads the rows, or joins a read that is under way.
func (p *Process) refresh(ctx context.Context) error {
	p.mu.Lock()
	done := p.reading
	if done == nil {
		done = make(chan struct{})
		p.reading, p.tried = done, time.Now()
		begun := p.tried
		p.wg.Go(func() { p.read(begun, done) })
	}
	p.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

func (p *Process) read(begun time.Time, done chan struct{}) {
	ctx, cancel := context.WithTimeout(p.life, p.cfg.ReadTimeout)
	defer cancel()
	rows, err := p.cfg.Store.Read(ctx)
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: tenancy: the rows came too late", cells.ErrUnavailable)
	}
	p.mu.Lock()
	first := p.failed == nil
	p.failed, p.reading = err, nil
	if err == nil {
		p.rows, p.good = rows, begun
	}
	p.mu.Unlock()
	close(done)
	p.tell()
	if err != nil && first && p.life.Err() == nil {
		p.log.Error("tenancy: the cell's own rows cannot be read", "err", err)
	}
	if odd := rows.Odd(); err == nil && odd != "" {
		p.log.Warn("tenancy: " + odd)
	}
}

// view returns rows to decide by: those of the cache while they are fresh, else of
// a read, else the last ones while they may be kept.
func (p *Process) view(ctx context.Context) (tenancy.Rows, tenancy.Reason) {
	p.mu.Lock()
	fresh := !p.good.IsZero() && time.Since(p.good) <= p.cfg.CacheFor
	// When the last read failed, only the loop reads: requests wait for nothing.
	wait := !fresh && (p.failed == nil || p.good.IsZero()) && p.life.Err() == nil
	p.mu.Unlock()
	if wait {
		_ = p.refresh(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rows, p.judge()
}

// judge is the gate by what is known now. The caller holds mu.
func (p *Process) judge() tenancy.Reason {
	switch {
	case p.good.IsZero() && p.failed != nil:
		return tenancy.Unread("no read has landed yet")
	case p.good.IsZero():
		return tenancy.Unread("not yet")
	case p.cfg.Cell != "" && time.Since(p.good) > p.cfg.MaxStale:
		return tenancy.Unread(fmt.Sprintf("not for %s", p.cfg.MaxStale))
	}
	return tenancy.Gate(p.rows, p.cfg.Cell, p.cfg.Fingerprint)
}

// tell wakes who waits for a change of the gate, and returns it.
func (p *Process) tell() tenancy.Reason {
	p.mu.Lock()
	defer p.mu.Unlock()
	reason := p.judge()
	if reason.Code != p.reason.Code {
		p.log.Info("tenancy: the gate changed", "reason", reason.Code, "detail", reason.Text, "before", p.reason.Code)
		close(p.changed)
		p.changed = make(chan struct{})
	}
	p.reason = reason
	return reason
}

// Reason is why the process is gated, by what it knows now, without a read.
func (p *Process) Reason() tenancy.Reason {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.judge()
}

// Ready reports whether the process may be sent requests, and why not.
func (p *Process) Ready() (bool, string) {
	r := p.Reason()
	return !r.Gated(), r.Text
}

// Check is Ready for a member's own check: nil when ready.
func (p *Process) Check(context.Context) error {
	if ok, why := p.Ready(); !ok {
		return errors.New(why)
	}
	return nil
}

// Mode is the effective mode as it was last read; "" before a read and in an open
// deployment.
func (p *Process) Mode() tenancy.Mode {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.good.IsZero() {
		return ""
	}
	return p.rows.EffectiveMode()
}

// Rows returns the cell's own rows as they were last read, and whether the process is
// gated by them. It reads them when they are not fresh.
func (p *Process) Rows(ctx context.Context) (tenancy.Rows, tenancy.Reason) { return p.view(ctx) }

// Cell is the process's cell; "" without one.
func (p *Process) Cell() cells.CellID { return p.cfg.Cell }

// Gate is nil when the process serves, and otherwise the answer to every request but
// health and the probe. It reads the rows when they are not fresh.
func (p *Process) Gate(ctx context.Context) *cells.Answer {
	_, reason := p.view(ctx)
	return gated(reason)
}

func gated(r tenancy.Reason) *cells.Answer {
	if !r.Gated() {
		return nil
	}
	// What is wrong is for the operator, at /readyz and in the log.
	return &cells.Answer{Code: cells.CodeAuthUnavailable, Detail: "this process serves nothing now (" + r.Code + ")", RetryAfter: 5 * time.Second}
}
