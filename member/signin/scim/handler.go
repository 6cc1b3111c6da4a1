// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"

	"github.com/elimity-com/scim"
	"github.com/elimity-com/scim/optional"
	"github.com/elimity-com/scim/schema"

	"github.com/cloister-dev/cloister/cells"
	guard "github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/tenancy"
)

// Prefix is where the routes are.
const Prefix = "/scim/v2/"

// maxBody bounds a request, maxFilter a filter, in bytes.
const (
	maxBody   = 1 << 20
	maxFilter = 2 << 10
)

// Routes are what a handler serves, with the headers that are read beside the
// credential, for a census of a service's routes: the groups' are checked for their
// tenant, the others name none.
func Routes() map[string][]string {
	return map[string][]string{Prefix: nil, Prefix + "Users": nil, Prefix + "Groups": {signin.HeaderTenant}}
}

// Config of a handler; Store and Tokens are required.
type Config struct {
	Store  signin.Store
	Tokens *Tokens
	// First reads the cell's first row; nil while it cannot be read, and for a deployment
	// that is no cell.
	First func(context.Context) *guard.First
	// Tenants are those that the cell is configured with; the only one is the groups' by
	// default.
	Tenants []cells.TenantID
	// BaseURL is the cell's public base URL; locations are below it. Relative without one.
	BaseURL string
	// Verify verifies a bearer token that is no SCIM token, which may read the groups of its
	// tenant; nil accepts none.
	Verify func(context.Context, string) (tenancy.Principal, error)
	// Held checks a tenant before its groups are read or written: with a principal as a
	// request of its own, with nil as the provider's. Nil checks nothing: a deployment that
	// is no cell.
	Held func(context.Context, cells.TenantID, *tenancy.Principal) error
	Log  *slog.Logger
}

// Handler serves [Prefix].
type Handler struct {
	cfg         Config
	user, group schema.Schema
	server      scim.Server
}

// New makes a handler. The error wraps [cells.ErrInvalid].
func New(cfg Config) (*Handler, error) {
	if cfg.Store == nil || cfg.Tokens == nil {
		return nil, fmt.Errorf("%w: scim: a store and tokens are needed", cells.ErrInvalid)
	}
	if cfg.First == nil {
		cfg.First = func(context.Context) *guard.First { return nil }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	h := &Handler{cfg: cfg, user: schema.CoreUserSchema(), group: schema.CoreGroupSchema()}
	var err error
	var opts []scim.ServerOption
	if cfg.BaseURL != "" {
		opts = append(opts, scim.WithBaseURL(strings.TrimRight(cfg.BaseURL, "/")+strings.TrimRight(Prefix, "/")))
	}
	h.server, err = scim.NewServer(&scim.ServerArgs{
		ServiceProviderConfig: &scim.ServiceProviderConfig{SupportFiltering: true, SupportPatch: true, MaxResults: 500},
		ResourceTypes: []scim.ResourceType{
			{ID: optional.NewString("User"), Name: "User", Endpoint: "/Users", Schema: h.user, Handler: users{h}},
			{ID: optional.NewString("Group"), Name: "Group", Endpoint: "/Groups", Schema: h.group, Handler: groups{h}},
		}}, opts...)
	if err != nil {
		return nil, fmt.Errorf("%w: scim: %w", cells.ErrInvalid, err)
	}
	return h, nil
}

// Some providers write flags as "True" and "False", which the library then reads; it has
// one switch for the process.
func init() { schema.SetAllowStringValues(true) }

// isGroups reports whether a path below the prefix is the groups'.
func isGroups(rest string) bool { return rest == "Groups" || strings.HasPrefix(rest, "Groups/") }

// ServeHTTP implements [http.Handler]. The gate on the process comes before it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rest, ok := strings.CutPrefix(r.URL.Path, Prefix)
	if !ok {
		http.NotFound(w, r)
		return
	}
	tenant, err := h.authorize(r, isGroups(rest))
	if err == nil && len(r.URL.RawQuery) > maxFilter {
		err = &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf("a query has at most %d bytes", maxFilter)}
	}
	var body []byte
	if err == nil {
		if body, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody)); err != nil {
			err = &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf("a request has at most %d bytes", maxBody), Err: err}
		}
	}
	if err == nil && r.Method == http.MethodPatch {
		err = bounded(body)
	}
	if err != nil {
		a := cells.AnswerOf(err)
		if a == nil {
			a = unavailable(err)
		}
		if a.Code == cells.CodeUnauthenticated {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		cells.WriteProblem(w, r, a)
		return
	}
	var failure error
	r = r.Clone(withTenant(withFailure(r.Context(), &failure), tenant))
	r.URL.Path, r.URL.RawPath = "/"+rest, ""
	r.Body = io.NopCloser(bytes.NewReader(body))
	out := &answer{header: http.Header{}, status: http.StatusOK}
	h.serve(out, r, &failure)
	if failure != nil {
		// The protocol has no way to say it, and a provider would take another status for a
		// verdict.
		h.cfg.Log.Error("scim: a request was not carried out", "method", r.Method, "err", failure)
		cells.WriteProblem(w, r, unavailable(failure))
		return
	}
	for k, v := range out.header {
		w.Header()[k] = v
	}
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(out.status)
	_, _ = w.Write(out.body.Bytes())
}

// serve keeps a fault of the protocol's library on some input to that request.
func (h *Handler) serve(w *answer, r *http.Request, failure *error) {
	defer func() {
		if p := recover(); p != nil {
			h.cfg.Log.Error("scim: a request cannot be read", "method", r.Method, "panic", fmt.Sprint(p))
			*failure = nil
			*w = answer{header: http.Header{"Content-Type": {"application/scim+json"}}, status: http.StatusBadRequest}
			w.body.WriteString(`{"schemas":["urn:ietf:params:scim:api:messages:2.0:Error"],"status":"400","scimType":"invalidSyntax"}`)
		}
	}()
	h.server.ServeHTTP(w, r)
}

// authorize checks the credential and, for groups, the tenant, which it returns.
func (h *Handler) authorize(r *http.Request, groups bool) (cells.TenantID, error) {
	ctx := r.Context()
	raw, err := signin.Bearer(r.Header)
	if err != nil {
		return "", err
	}
	ok, err := h.cfg.Tokens.Authorized(raw, h.cfg.First(ctx))
	if err != nil {
		return "", err
	}
	refused := &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "the token is none of this cell's"}
	named := r.Header.Values(signin.HeaderTenant)
	if len(named) > 1 {
		return "", &cells.Answer{Code: cells.CodeBadRequest, Detail: signin.HeaderTenant + " is there twice"}
	}
	if !ok {
		if !groups || h.cfg.Verify == nil || strings.Count(raw, ".") != 2 {
			return "", refused
		}
		who, err := h.cfg.Verify(ctx, raw)
		if err != nil {
			return "", err
		}
		if r.Method != http.MethodGet {
			return "", &cells.Answer{Code: cells.CodeForbidden, Detail: "groups are written with a SCIM token of the cell"}
		}
		tenant := who.Tenant
		if len(named) == 1 {
			tenant = cells.TenantID(named[0])
		}
		return tenant, h.held(ctx, tenant, &who)
	}
	if !groups {
		return "", nil
	}
	var tenant cells.TenantID
	switch {
	case len(named) == 1:
		tenant = cells.TenantID(named[0])
	case len(h.cfg.Tenants) == 1:
		tenant = h.cfg.Tenants[0]
	default:
		return "", &cells.Answer{Code: cells.CodeInvalidTenant, Detail: "groups are a tenant's; name it in " + signin.HeaderTenant}
	}
	return tenant, h.held(ctx, tenant, nil)
}

func (h *Handler) held(ctx context.Context, t cells.TenantID, who *tenancy.Principal) error {
	if err := t.Validate(); err != nil {
		return &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error()}
	}
	if who != nil && !who.MayActIn(t) {
		return &cells.Answer{Code: cells.CodeForbidden, Detail: "the credential is not for this tenant"}
	}
	if h.cfg.Held == nil {
		return nil
	}
	err := h.cfg.Held(ctx, t, who)
	if err != nil && cells.AnswerOf(err) == nil && !errors.Is(err, context.Canceled) {
		return unavailable(err)
	}
	return err
}

// answer is what the protocol's library answers, kept until it is known to stand.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(status int)      { a.status = status }
func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }
