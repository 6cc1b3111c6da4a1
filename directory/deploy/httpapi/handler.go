// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/directory/internal/web"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/hostname"
	"github.com/cloister-dev/cloister/internal/pace"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// Prober reads cells; a [*probe.Client] does.
type Prober interface {
	// Check asks a probe listener. Errors: answers with the codes PROBE_BUSY and
	// PROBE_UNREACHABLE, and [probe.ErrRefused].
	Check(ctx context.Context, address string, want probe.Want) error
	// DeploymentID asks a cell's main port which deployment it is; errors as of Check.
	DeploymentID(ctx context.Context, address string) (stores.DeploymentID, error)
}

// Auditor lists the audit; a directory's store is one.
type Auditor interface {
	Audit(ctx context.Context, f directory.AuditFilter) ([]api.AuditEntry, error)
}

// Config is what a [Handler] is made of. Store is required.
type Config struct {
	Store deploy.Store
	Audit Auditor // nil serves no audit
	// OperatorSHA256 are the hashes of the accepted operator credentials, 64 lowercase
	// hexadecimal digits each; with none every operator call is answered
	// NO_OPERATOR_CREDENTIAL.
	OperatorSHA256 []string
	// SharedHost is the router's, and its Aliases: whoever registers with it is the first
	// cell. Upstream and UpstreamProbe are the addresses of the deployment behind it.
	SharedHost              string
	Aliases                 []string
	Upstream, UpstreamProbe string
	// Prober reads cells; without one no cell can be registered.
	Prober Prober
	// Cache is for how long cells are remembered; default 5 s. Timeout bounds a call;
	// default 5 s. An operator's may take six times that, since it probes.
	Cache, Timeout time.Duration
	// PlacementsPerMinute bounds each cell's calls, LookupsPerMinute each client
	// address's, at this replica; defaults 600 and 600.
	PlacementsPerMinute, LookupsPerMinute int
	// CachedTenants bounds the lookups that are remembered; default 100,000.
	CachedTenants int
	// Logger; default discards.
	Logger *slog.Logger
}

// Handler serves the paths of package wire. Make it with [New].
type Handler struct {
	cfg      Config
	log      *slog.Logger
	operator []credential.Hash
	cells    *cellCache
	tenants  *tenantCache
	places   *pace.Limit
	lookups  *pace.Limit
	mux      *http.ServeMux
}

// New makes a handler. The error wraps [cells.ErrInvalid].
func New(cfg Config) (*Handler, error) {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&cfg.PlacementsPerMinute, 600)
	def(&cfg.LookupsPerMinute, 600)
	def(&cfg.CachedTenants, 100_000)
	for _, d := range []*time.Duration{&cfg.Cache, &cfg.Timeout} {
		if *d <= 0 {
			*d = 5 * time.Second
		}
	}
	if cfg.Store == nil {
		return nil, fmt.Errorf("%w: a router's paths need the directory's store", cells.ErrInvalid)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	h := &Handler{cfg: cfg, log: cfg.Logger, mux: http.NewServeMux(),
		cells:   &cellCache{read: cfg.Store.Read, keep: cfg.Cache, timeout: cfg.Timeout},
		tenants: newTenantCache(cfg.CachedTenants, cfg.Cache),
		places:  pace.New(cfg.PlacementsPerMinute, 10_000), lookups: pace.New(cfg.LookupsPerMinute, 100_000)}
	for _, s := range cfg.OperatorSHA256 {
		sum, err := credential.ParseHash(s)
		if err != nil {
			return nil, fmt.Errorf("%w: operator %w", cells.ErrInvalid, err)
		}
		h.operator = append(h.operator, sum)
	}
	var err error
	if cfg.SharedHost != "" {
		if h.cfg.SharedHost, err = hostname.Normalize(cfg.SharedHost); err != nil {
			return nil, fmt.Errorf("%w: shared host: %w", cells.ErrInvalid, err)
		}
	}
	if h.cfg.UpstreamProbe != "" {
		if h.cfg.UpstreamProbe, err = deploy.NormalProbeURL(cfg.UpstreamProbe); err != nil {
			return nil, err
		}
	}
	h.routes()
	return h, nil
}

// ServeHTTP implements [http.Handler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.mux.ServeHTTP(w, r) }

// Ready reports whether the directory can be read.
func (h *Handler) Ready(ctx context.Context) error {
	_, err := h.cfg.Store.Read(ctx)
	return err
}

// request is one call and who makes it.
type request struct {
	*http.Request
	w    http.ResponseWriter
	id   string
	peer string
	now  time.Time
}

// audit is the entry of a change that the request makes.
func (r *request) audit(action, actor string, detail any) api.AuditEntry {
	b, err := json.Marshal(detail)
	if err != nil { // our own types always marshal
		b = nil
	}
	if actor == "" {
		actor = r.peer
	}
	return api.AuditEntry{At: r.now, Peer: r.peer, Actor: actor, RequestID: r.id, Action: action, Detail: b}
}

type endpoint func(r *request) (status int, body any, err error)

// handle serves an endpoint within a time.
func (h *Handler) handle(pattern string, timeout time.Duration, e endpoint) {
	h.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), timeout)
		defer cancel()
		req := &request{Request: r.WithContext(ctx), w: w, id: web.RequestID(w, r), now: time.Now().UTC()}
		status, body, err := e(req)
		if err == nil {
			web.WriteJSON(w, status, body)
			return
		}
		a := answerOf(err)
		if a.Code == cells.CodeBackendUnavailable {
			h.log.Warn("request failed", "method", r.Method, "path", r.URL.Path, "request", req.id, "err", err)
		}
		if a.Code == cells.CodeUnauthenticated {
			w.Header().Set("WWW-Authenticate", `Bearer realm="router"`)
		}
		cells.WriteProblem(w, r, a)
	})
}

func (h *Handler) routes() {
	h.handle("GET "+wire.PathLookup, h.cfg.Timeout, h.lookup)
	h.handle("POST "+wire.PathPlacements, h.cfg.Timeout, h.place)
	h.handle("GET "+wire.PathCells+"/{cell}", h.cfg.Timeout, h.state)
	h.operatorRoutes()
	h.handle("/", h.cfg.Timeout, func(*request) (int, any, error) {
		return 0, nil, &cells.Answer{Code: cells.CodeNotServed, Detail: "the router serves no such path, and takes none below /cells/ to a cell"}
	})
}

// answerOf turns an error into an answer of the closed list.
func answerOf(err error) *cells.Answer {
	if a := cells.AnswerOf(err); a != nil {
		return a
	}
	give := func(c cells.Code) *cells.Answer { return &cells.Answer{Code: c, Detail: err.Error(), Err: err} }
	switch {
	case errors.Is(err, deploy.ErrClosed):
		a := give(cells.CodeCellClosed)
		a.RetryAfter = time.Minute
		return a
	case errors.Is(err, deploy.ErrCredential):
		return unauthenticated()
	case errors.Is(err, deploy.ErrNoCell):
		return give(cells.CodeNoCell)
	case errors.Is(err, cells.ErrConflict), errors.Is(err, probe.ErrRefused):
		return give(cells.CodeConflict)
	case errors.Is(err, cells.ErrNotFound):
		return give(cells.CodeNotFound)
	case errors.Is(err, cells.ErrInvalid):
		return give(cells.CodeBadRequest)
	}
	return &cells.Answer{Code: cells.CodeBackendUnavailable, Err: err, RetryAfter: time.Second,
		Detail: "the directory could not be reached; a change that was asked for may have been made, and the same request again is safe"}
}

func unauthenticated() *cells.Answer {
	return &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "the credential is missing, or is not accepted here"}
}
