// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/transfer"
)

// Locate returns the live processes of a cell: those whose heartbeats have not
// lapsed and that have not left, ready or not.
type Locate func(ctx context.Context, cell cells.CellID) ([]Heartbeat, error)

// AgentClient gives a fleet's agents their orders, over the channel. It implements
// [cells.Fencer], [cells.EventBarrier], [cells.Drainer], [cells.DataMover] and
// [cells.Returner]. Its
// channel needs the role directory.
//
// Orders to a cell's database go to one of its live processes, and to the next
// one when that cannot be reached or is leaving: all of them are idempotent. A move's
// steps go to the same process while that lives; rows of all moves between two cells are
// read from the same process of the source, which reads the log once for those of a
// group. For a cell whose processes all
// report no engine (stateless) there is nothing to fence or to move, and those
// orders do nothing.
//
// Errors keep the sentinels of package cells across the wire. A cell without a live
// process is [cells.ErrUnavailable], except for Drain, which has nothing to wait
// for then.
type AgentClient struct {
	clients cellClients
	locate  Locate
	rate    int
	limits  transfer.Limits
	log     *slog.Logger
}

var (
	_ cells.Fencer       = (*AgentClient)(nil)
	_ cells.EventBarrier = (*AgentClient)(nil)
	_ cells.Drainer      = (*AgentClient)(nil)
	_ cells.DataMover    = (*AgentClient)(nil)
	_ cells.Returner     = (*AgentClient)(nil)
)

// ClientOption adjusts [NewAgentClient].
type ClientOption func(*AgentClient)

// WithRowsPerSecond throttles copies and removals; 0, the default, is unlimited.
func WithRowsPerSecond(n int) ClientOption { return func(c *AgentClient) { c.rate = max(0, n) } }

// WithLimits bounds what each move may cost its cells; the default is that of
// [transfer.Limits].
func WithLimits(l transfer.Limits) ClientOption { return func(c *AgentClient) { c.limits = l } }

// WithClientLogger sets the logger; the default discards.
func WithClientLogger(l *slog.Logger) ClientOption { return func(c *AgentClient) { c.log = l } }

// NewAgentClient returns a client that finds agents by locate.
// CloseIdleConnections frees what it keeps.
func NewAgentClient(ch *channel.Channel, locate Locate, opts ...ClientOption) *AgentClient {
	c := &AgentClient{clients: cellClients{channel: ch}, locate: locate, log: slog.New(slog.DiscardHandler)}
	for _, o := range opts {
		o(c)
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	return c
}

// CloseIdleConnections frees connections that are not in use.
func (c *AgentClient) CloseIdleConnections() { c.clients.closeIdle() }

// live returns the cell's live processes: the ready ones first, and among equals
// always in the same order for the same key.
func (c *AgentClient) live(ctx context.Context, cell cells.CellID, key string) ([]Heartbeat, error) {
	if err := cell.Validate(); err != nil {
		return nil, err
	}
	found, err := c.locate(ctx, cell)
	if err != nil {
		return nil, fmt.Errorf("locating the processes of cell %s: %w", cell, err)
	}
	var out []Heartbeat
	for _, h := range found {
		if h.Cell == cell && h.AgentURL != "" {
			out = append(out, h)
		}
	}
	// The same for every client: drivers of moves between the same cells agree.
	rank := func(h Heartbeat) uint64 {
		f := fnv.New64a()
		_, _ = io.WriteString(f, h.Instance+"\x00"+key)
		return f.Sum64()
	}
	slices.SortFunc(out, func(a, b Heartbeat) int {
		if a.Ready != b.Ready {
			if a.Ready {
				return -1
			}
			return 1
		}
		return cmp.Compare(rank(a), rank(b))
	})
	return out, nil
}

// stateless reports whether no process of the cell keeps state.
func stateless(hbs []Heartbeat) bool {
	return len(hbs) > 0 && !slices.ContainsFunc(hbs, func(h Heartbeat) bool { return h.Engine != "" })
}

func noProcess(cell cells.CellID) error {
	return fmt.Errorf("%w: cell %s has no live process; start one, or find out why its heartbeats do not reach the directory", cells.ErrUnavailable, cell)
}

// moveOn reports whether another process of the cell may do better.
func moveOn(ctx context.Context, err error) bool {
	return ctx.Err() == nil && errors.Is(err, cells.ErrUnavailable)
}

// any gives an order to one of the cell's processes. did is false when the cell
// is stateless: there was nothing to do.
func (c *AgentClient) any(ctx context.Context, cell cells.CellID, key string, do func(ctx context.Context, h Heartbeat) error) (did bool, err error) {
	hbs, err := c.live(ctx, cell, key)
	if err != nil {
		return false, err
	}
	if len(hbs) == 0 {
		return false, noProcess(cell)
	}
	if stateless(hbs) {
		return false, nil
	}
	var errs []error
	for _, h := range hbs {
		if h.Engine == "" {
			continue // a process of an older or newer kind, next to those with a store
		}
		err := c.whileLive(ctx, h, false, do)
		if err == nil {
			return true, nil
		}
		err = fmt.Errorf("cell %s, process %s: %w", cell, h.Instance, err)
		if !moveOn(ctx, err) {
			return true, err
		}
		c.log.Info("an agent cannot be reached; trying another", "cell", cell, "instance", h.Instance, "err", err)
		errs = append(errs, err)
	}
	return true, errors.Join(errs...)
}

// errGone ends an order to a process that has lapsed or left.
var errGone = fmt.Errorf("%w: the process has lapsed or left", cells.ErrUnavailable)

// lapsePoll is how often an order that waits looks whether its process lives.
const lapsePoll = 100 * time.Millisecond

// whileLive gives an order, and gives it up with errGone when the process is no
// longer among the live ones: one that is frozen takes connections and never
// answers. Unless alone is set, it is not given up while there is no other process
// that could do better; a process that is only slow may still answer.
func (c *AgentClient) whileLive(ctx context.Context, h Heartbeat, alone bool, do func(ctx context.Context, h Heartbeat) error) error {
	ctx, gone := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer gone(nil)
	wg.Go(func() {
		t := time.NewTicker(lapsePoll)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-ctx.Done():
				return
			}
			now, err := c.live(ctx, h.Cell, "")
			if err == nil && (alone || len(now) > 0) && !slices.ContainsFunc(now, func(o Heartbeat) bool { return o.Instance == h.Instance }) {
				gone(errGone)
				return
			}
		}
	})
	return do(ctx, h)
}

// post sends an order to one process. The caller closes the body; anything but a
// 200 is an error that matches the sentinel that came with it.
func (c *AgentClient) post(ctx context.Context, h Heartbeat, path string, body any) (*http.Response, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	url, err := baseURL(h.AgentURL, "https")
	if err != nil {
		return nil, fmt.Errorf("%w: agent: %w", cells.ErrUnavailable, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if d, ok := ctx.Deadline(); ok {
		req.Header.Set(HeaderTimeout, strconv.FormatInt(max(1, time.Until(d).Milliseconds()), 10))
	}
	resp, err := c.clients.get(h.Cell).Do(req)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, fmt.Errorf("%w: %w", cause, err)
		}
		return nil, fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxLine))
	var line StepLine
	if err == nil && decodeStrict(text, &line) == nil && line.Error != nil {
		return nil, line.Error
	}
	err = fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(text[:min(len(text), 512)])))
	switch resp.StatusCode {
	case http.StatusForbidden:
		return nil, fmt.Errorf("%w: %w", ErrForbidden, err)
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return nil, fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return nil, err
}

// call gives an order that is answered once, strictly decoded into out.
func (c *AgentClient) call(ctx context.Context, h Heartbeat, path string, body, out any) error {
	resp, err := c.post(ctx, h, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	case err != nil:
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	case len(b) > maxAnswer:
		return fmt.Errorf("%w: answer above %d bytes", cells.ErrInvalid, maxAnswer)
	}
	return decodeStrict(b, out)
}

// maxAnswer bounds an answer; a survey of many tables is the largest.
const maxAnswer = 4 << 20

// step gives an order that is answered with progress.
func (c *AgentClient) step(ctx context.Context, h Heartbeat, path string, body, out any, progress func(cells.Progress)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := c.post(ctx, h, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	err = readLines(resp.Body, out, progress, cancel)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// Open implements [cells.Fencer].
func (c *AgentClient) Open(ctx context.Context, o cells.FenceOrder) error {
	return c.fence(ctx, PathFenceOpen, o)
}

// Close closes a fence: it implements [cells.Fencer]. The client's connections are
// freed by CloseIdleConnections.
func (c *AgentClient) Close(ctx context.Context, o cells.FenceOrder) error {
	return c.fence(ctx, PathFenceClose, o)
}

func (c *AgentClient) fence(ctx context.Context, path string, o cells.FenceOrder) error {
	_, err := c.any(ctx, o.Cell, string(o.Tenant), func(ctx context.Context, h Heartbeat) error {
		return c.call(ctx, h, path, o, &struct{}{})
	})
	return err
}

// Pause implements [cells.EventBarrier].
func (c *AgentClient) Pause(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	var out EventsReply
	_, err := c.any(ctx, o.Cell, string(o.Tenant), func(ctx context.Context, h Heartbeat) error {
		out = EventsReply{}
		return c.call(ctx, h, PathEventsPause, o, &out)
	})
	if err != nil {
		return 0, err
	}
	return out.Mark, nil
}

// Start implements [cells.EventBarrier].
func (c *AgentClient) Start(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	_, err := c.any(ctx, o.Cell, string(o.Tenant), func(ctx context.Context, h Heartbeat) error {
		return c.call(ctx, h, PathEventsStart, EventsStart{BarrierOrder: o, Mark: mark}, &struct{}{})
	})
	return err
}

// Tenancy has a cell that is a whole deployment do something with its tenancy row of a
// tenant. An error that wraps [cells.ErrInvalid] when it keeps no such rows.
func (c *AgentClient) Tenancy(ctx context.Context, o TenancyOrder) error {
	did, err := c.any(ctx, o.Cell, string(o.Tenant), func(ctx context.Context, h Heartbeat) error {
		return c.call(ctx, h, PathTenancy, o, &struct{}{})
	})
	if err == nil && !did {
		err = fmt.Errorf("%w: cell %s keeps no state, and so no tenancy rows", cells.ErrInvalid, o.Cell)
	}
	return err
}
