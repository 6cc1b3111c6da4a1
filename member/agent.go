// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

const (
	// maxOrder bounds the body of an order.
	maxOrder = 256 << 10
	// pingEvery finds callers that are gone without a word, so that their steps end.
	pingEvery = 5 * time.Second
)

// listen starts the agent.
func (m *Member) listen(ctx context.Context) error {
	l := m.opts.listener
	if l == nil {
		var err error
		if l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", m.cfg.AgentAddr); err != nil {
			return err
		}
	}
	m.listener = l
	m.agentURL = m.cfg.AgentURL
	if m.agentURL == "" {
		m.agentURL = "https://" + l.Addr().String()
	}
	m.server = &http.Server{
		Handler:           m.agentHandler(),
		TLSConfig:         m.channel.Server(),
		BaseContext:       func(net.Listener) context.Context { return m.life },
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    32 << 10,
		HTTP2:             &http.HTTP2Config{SendPingTimeout: pingEvery, PingTimeout: pingEvery},
		ErrorLog:          log.New(logWriter{m.log}, "", 0),
	}
	m.wg.Go(func() {
		if err := m.server.ServeTLS(l, "", ""); !errors.Is(err, http.ErrServerClosed) {
			m.log.Error("member: the agent has stopped listening", "err", err)
		}
	})
	return nil
}

// logWriter gives what net/http has to say to the log.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(b []byte) (int, error) {
	w.log.Debug("member: agent", "msg", string(bytes.TrimSpace(b)))
	return len(b), nil
}

// agentHandler serves the directory's orders and the other cells' agents.
func (m *Member) agentHandler() http.Handler {
	orders := http.NewServeMux()
	orders.Handle(PathDrain, order(m, "drain", m.drain))
	orders.Handle(PathFenceOpen, order(m, "fence_open", func(ctx context.Context, o cells.FenceOrder) (struct{}, error) {
		return struct{}{}, m.fence(ctx, "open", o)
	}))
	orders.Handle(PathFenceClose, order(m, "fence_close", func(ctx context.Context, o cells.FenceOrder) (struct{}, error) {
		return struct{}{}, m.fence(ctx, "close", o)
	}))
	orders.Handle(PathEventsPause, order(m, "events_pause", m.pauseEvents))
	orders.Handle(PathEventsStart, order(m, "events_start", m.startEvents))
	orders.Handle(PathSurvey, order(m, "survey", m.survey))
	orders.Handle(PathHoldings, order(m, "holdings", m.holdings))
	orders.Handle(PathPrepare, stream(m, "prepare", m.prepare))
	orders.Handle(PathFinish, stream(m, "finish", m.finish))
	orders.Handle(PathReturn, order(m, "return", m.bringBack))
	orders.Handle(PathFree, order(m, "free", m.free))
	orders.Handle(PathTenancy, order(m, "tenancy", m.tenancy))
	orders.Handle(PathDiscard, stream(m, "discard", m.discard))

	mux := http.NewServeMux()
	mux.Handle("/", m.channel.Require(orders, channel.RoleDirectory))
	if m.opts.store != nil && m.opts.store.Agent != nil {
		h := transfer.Handler(m.opts.store.Agent.Source(), m.authorize)
		m.views, _ = h.(io.Closer)
		mux.Handle(PathTransfer, m.channel.Require(h, channel.RoleCell))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !m.enter() {
			e, status := stepError(r.Context(), errLeaving)
			refuse(w, e, status)
			return
		}
		defer m.wg.Done()
		mux.ServeHTTP(w, r)
	})
}

// enter has Close wait for the caller, who calls m.wg.Done; false after Close.
func (m *Member) enter() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return false
	}
	m.wg.Add(1)
	return true
}

// authorize lets a cell read a tenant's rows only while the routes say that the
// tenant is moving from here to that cell, in that very move, or that the changes
// made here since that very move flow back to that cell. A survey names no
// move; any move to that cell will do.
func (m *Member) authorize(r *http.Request, ref cells.MoveRef) error {
	peer, ok := channel.PeerFrom(r)
	if !ok || peer.Role != channel.RoleCell {
		return fmt.Errorf("%w: not a cell", ErrForbidden)
	}
	to := cells.CellID(peer.Name)
	survey := ref.ID == ""
	good := func(route *cells.TenantRoute) bool {
		if e, held := route.Held(); held && e.Cell == to {
			back, ok := e.Return(route.TenantID)
			return ok && back.Source == m.cfg.Cell && back == ref
		}
		cur, moving := route.Move()
		return moving && cur.Source == m.cfg.Cell && cur.Target == to && (survey || cur == ref)
	}
	d := m.router.Lookup(ref.Tenant)
	if good(&d.Route) {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
	defer cancel()
	route, err := m.router.Refresh(ctx, ref.Tenant)
	switch {
	case err == nil && good(&route):
		return nil
	case err != nil && !errors.Is(err, cells.ErrNotFound):
		return fmt.Errorf("%w: the route of tenant %s cannot be read: %w", cells.ErrUnavailable, ref.Tenant, err)
	}
	m.log.Warn("member: rows were refused to a cell", "peer", peer.String(), "tenant", ref.Tenant, "move", ref.ID)
	return fmt.Errorf("%w: no route says that tenant %s moves from %s to %s in move %q", ErrForbidden, ref.Tenant, m.cfg.Cell, to, ref.ID)
}

// decodeOrder reads one JSON document and nothing else, of bounded size and
// without unknown fields: an order that is not understood in full is not obeyed.
func decodeOrder(r io.Reader, limit int64, out any) error {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return fmt.Errorf("%w: body: %w", cells.ErrInvalid, err)
	}
	if int64(len(b)) > limit {
		return fmt.Errorf("%w: body above %d bytes", cells.ErrInvalid, limit)
	}
	return decodeStrict(b, out)
}

func decodeStrict(b []byte, out any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(out); err != nil {
		return fmt.Errorf("%w: JSON: %w", cells.ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: JSON: more than one document", cells.ErrInvalid)
	}
	return nil
}

// begin checks the method and reads the order.
func begin[In any](w http.ResponseWriter, r *http.Request) (in In, ok bool) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		refuse(w, &StepError{Kind: "invalid", Message: "POST only"}, http.StatusMethodNotAllowed)
		return in, false
	}
	if err := decodeOrder(r.Body, maxOrder, &in); err != nil {
		refuse(w, &StepError{Kind: "invalid", Message: err.Error()}, http.StatusBadRequest)
		return in, false
	}
	return in, true
}

func refuse(w http.ResponseWriter, e *StepError, status int) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(StepLine{Error: e})
}

// order makes a handler of a step that answers once.
func order[In, Out any](m *Member, name string, do func(context.Context, In) (Out, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, ok := begin[In](w, r)
		if !ok {
			return
		}
		ctx, cancel := withCallersTimeout(r)
		defer cancel()
		begun := time.Now()
		out, err := do(ctx, in)
		m.metrics.step(name, begun, err)
		if err != nil {
			e, status := stepError(r.Context(), err)
			m.log.Log(r.Context(), level(err), "member: order failed", "step", name, "err", err)
			refuse(w, e, status)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(out)
	})
}

// level is how loudly an error is told: those that an overtaken or repeated order
// gets are part of the protocol.
func level(err error) slog.Level {
	if errors.Is(err, cells.ErrStaleOrder) || errors.Is(err, cells.ErrNotApplicable) || errors.Is(err, context.Canceled) {
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

// withCallersTimeout ends a step shortly before its caller stops waiting, so that
// what held it up is still heard.
func withCallersTimeout(r *http.Request) (context.Context, context.CancelFunc) {
	ms, err := strconv.ParseInt(r.Header.Get(HeaderTimeout), 10, 64)
	if err != nil || ms <= 0 || ms > int64(24*time.Hour/time.Millisecond) {
		return context.WithCancel(r.Context())
	}
	d := time.Duration(ms) * time.Millisecond
	return context.WithTimeout(r.Context(), d-min(d/5, time.Second))
}

// mine refuses orders for another cell.
func (m *Member) mine(cell cells.CellID, tenant cells.TenantID) error {
	if cell != m.cfg.Cell {
		return fmt.Errorf("%w: an order for cell %s reached cell %s", cells.ErrInvalid, cell, m.cfg.Cell)
	}
	return tenant.Validate()
}

func (m *Member) store() (*Store, error) {
	if m.opts.store == nil {
		return nil, fmt.Errorf("%w: cell %s keeps no state: there is no fence to change", cells.ErrInvalid, m.cfg.Cell)
	}
	return m.opts.store, nil
}

func (m *Member) drain(ctx context.Context, route cells.TenantRoute) (struct{}, error) {
	if err := m.mine(route.CellID, route.TenantID); err != nil {
		return struct{}{}, err
	}
	m.router.Observe(route)
	err := m.gates.Drain(ctx, route)
	var d *cells.DrainError
	if errors.As(err, &d) {
		err = fmt.Errorf("process %s: %w", m.cfg.Instance, err)
	}
	return struct{}{}, err
}

func (m *Member) fence(ctx context.Context, op string, o cells.FenceOrder) error {
	s, err := m.store()
	if err == nil {
		err = m.mine(o.Cell, o.Tenant)
	}
	if err != nil {
		return err
	}
	if op == "open" {
		err = s.Keeper.OpenFence(ctx, o)
	} else {
		err = s.Keeper.CloseFence(ctx, o)
	}
	m.metrics.fenced("directory", op, err)
	if err == nil && op == "open" && o.Move != "" {
		m.sweep(s, o.Tenant)
	}
	return err
}

// sweeper is an agent that frees what moves that are over have left.
type sweeper interface {
	SweepTenant(ctx context.Context, tenant cells.TenantID) error
}

// sweep frees, beside the order that has opened a tenant's fence, what its moves held
// here: a source whose move was rolled back is told in no other way, and a capture must
// not hold its log longer than it has to. It is called by an order. What other tenants'
// moves have left is found by the agent's own rounds.
func (m *Member) sweep(s *Store, tenant cells.TenantID) {
	a, ok := s.Agent.(sweeper)
	if !ok {
		return
	}
	m.wg.Go(func() {
		ctx, cancel := context.WithTimeout(m.life, 30*time.Second)
		defer cancel()
		if err := a.SweepTenant(ctx, tenant); err != nil && m.life.Err() == nil {
			m.log.Info("member: what a move has left is not freed yet; it is tried again", "err", err)
		}
	})
}

func (m *Member) pauseEvents(ctx context.Context, o cells.BarrierOrder) (EventsReply, error) {
	s, err := m.store()
	if err == nil {
		err = m.mine(o.Cell, o.Tenant)
	}
	if err != nil {
		return EventsReply{}, err
	}
	mark, err := s.Keeper.PauseEvents(ctx, o)
	return EventsReply{Mark: mark}, err
}

func (m *Member) startEvents(ctx context.Context, o EventsStart) (struct{}, error) {
	s, err := m.store()
	if err == nil {
		err = m.mine(o.Cell, o.Tenant)
	}
	if err == nil {
		err = s.Keeper.StartEvents(ctx, o.BarrierOrder, o.Mark)
	}
	return struct{}{}, err
}

// agent returns what moves rows.
func (m *Member) agent() (transfer.Agent, error) {
	if m.opts.store == nil || m.opts.store.Agent == nil {
		return nil, fmt.Errorf("%w: cell %s moves no rows: its service gave the member no transfer agent", cells.ErrInvalid, m.cfg.Cell)
	}
	return m.opts.store.Agent, nil
}

func (m *Member) survey(ctx context.Context, q SurveyRequest) (transfer.Survey, error) {
	a, err := m.agent()
	if err == nil {
		err = q.Tenant.Validate()
	}
	if err == nil && q.Group != "" {
		err = q.Group.Validate()
	}
	if err != nil {
		return transfer.Survey{}, err
	}
	ctx = transfer.ContextForMove(transfer.ContextWithGroup(ctx, q.Group), cells.MoveRef{Tenant: q.Tenant, Source: q.Source, Target: q.Target})
	return a.Survey(ctx, q.Tenant)
}

// remoteSource returns the source cell of a move, seen over the channel.
func (m *Member) remoteSource(o MoveOrder) (_ transfer.Source, err error) {
	if len(o.Sources) == 0 {
		return nil, fmt.Errorf("%w: no live process of the source cell %s is known", cells.ErrUnavailable, o.Move.Source)
	}
	for i, u := range o.Sources {
		if o.Sources[i], err = baseURL(u, "https"); err != nil {
			return nil, fmt.Errorf("%w: agent of the source: %w", cells.ErrInvalid, err)
		}
	}
	return transfer.NewRemoteSource(m.sources.get(o.Move.Source), o.Sources), nil
}

func (m *Member) prepare(ctx context.Context, o MoveOrder, progress func(cells.Progress)) (any, error) {
	a, src, err := m.moveStep(o)
	if err != nil {
		return nil, err
	}
	ctx = transfer.ContextWithGroup(transfer.ContextWithRate(ctx, o.RowsPerSecond), o.Group)
	return a.Prepare(transfer.ContextWithLimits(ctx, o.Limits), o.Move, src, progress)
}

func (m *Member) finish(ctx context.Context, o MoveOrder, progress func(cells.Progress)) (any, error) {
	a, src, err := m.moveStep(o)
	if err != nil {
		return nil, err
	}
	if p, ok := a.(transfer.Prover); ok {
		mark, compared, err := p.FinishProved(ctx, o.Move, src, progress)
		return FinishReply{Mark: mark, Compared: compared}, err
	}
	mark, err := a.Finish(ctx, o.Move, src, progress)
	return FinishReply{Mark: mark}, err
}

func (m *Member) moveStep(o MoveOrder) (a transfer.Agent, src transfer.Source, err error) {
	if a, err = m.agent(); err != nil {
		return nil, nil, err
	}
	if err = m.mine(o.Move.Target, o.Move.Tenant); err != nil {
		return nil, nil, err
	}
	if o.RowsPerSecond < 0 {
		return nil, nil, fmt.Errorf("%w: rows_per_second is negative", cells.ErrInvalid)
	}
	if err = o.Limits.Validate(); err != nil {
		return nil, nil, err
	}
	if o.Group != "" {
		if err = o.Group.Validate(); err != nil {
			return nil, nil, err
		}
	}
	src, err = m.remoteSource(o)
	return a, src, err
}

// bringBack applies here what the owner has committed since the move that can be undone.
func (m *Member) bringBack(ctx context.Context, o MoveOrder) (cells.Returned, error) {
	a, src, err := m.moveStep(o)
	if err != nil {
		return cells.Returned{}, err
	}
	return a.Return(transfer.ContextWithRate(ctx, o.RowsPerSecond), o.Move, src)
}

func (m *Member) free(ctx context.Context, o FreeOrder) (struct{}, error) {
	a, err := m.agent()
	if err == nil {
		err = m.mine(o.Cell, o.Tenant)
	}
	if err == nil {
		err = a.Free(ctx, o.Tenant, o.Move)
	}
	return struct{}{}, err
}

// tenancy does what the directory of deployments asks for the cell's row of a tenant.
func (m *Member) tenancy(ctx context.Context, o TenancyOrder) (struct{}, error) {
	s, err := m.store()
	if err == nil {
		err = m.mine(o.Cell, o.Tenant)
	}
	if err == nil && s.Tenancy == nil {
		err = fmt.Errorf("%w: cell %s keeps no tenancy rows: its process %s does not run as a deployment that is a cell", cells.ErrInvalid, m.cfg.Cell, m.cfg.Instance)
	}
	if err != nil {
		return struct{}{}, err
	}
	switch o.Do {
	case TenancyCheck:
	case TenancyHold:
		var f guard.Fence
		if f, err = s.Keeper.Fence(ctx, o.Tenant); err == nil && f.Epoch > o.Epoch {
			err = fmt.Errorf("%w: the fence of tenant %s is at epoch %d", cells.ErrStaleOrder, o.Tenant, f.Epoch)
		}
		if err == nil {
			err = s.Tenancy.Hold(ctx, o.Tenant)
		}
	case TenancyUnhold:
		err = s.Tenancy.Unhold(ctx, o.Tenant, o.Epoch)
	default:
		err = fmt.Errorf("%w: tenancy: %q is none of check, hold and unhold", cells.ErrInvalid, o.Do)
	}
	return struct{}{}, err
}

func (m *Member) discard(ctx context.Context, o DiscardOrder, progress func(cells.Progress)) (any, error) {
	a, err := m.agent()
	if err == nil {
		err = m.mine(o.Residue.Cell, o.Tenant)
	}
	if err == nil && o.RowsPerSecond < 0 {
		err = fmt.Errorf("%w: rows_per_second is negative", cells.ErrInvalid)
	}
	if err == nil {
		err = a.Discard(transfer.ContextWithRate(ctx, o.RowsPerSecond), o.Tenant, o.Residue, progress)
	}
	return struct{}{}, err
}
