// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/tenancy"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// Service answers the memory API from a store. Make it with [New].
type Service struct {
	store  *Store
	events guard.Outbox
	log    *slog.Logger
	tenant func(*http.Request) (cells.TenantID, error)
}

// Options of a service.
type Options struct {
	Log *slog.Logger
	// Tenant names the tenant of a request that no cell admitted; used only when
	// the service runs alone. Nil means that every request needs an admission.
	Tenant func(*http.Request) (cells.TenantID, error)
}

// New returns the service on a store. The store stays the caller's to close.
func New(store *Store, o Options) *Service {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Service{store: store, events: store.Outbox(), log: o.Log, tenant: o.Tenant}
}

// Route is one call of the API, for whoever has to know all of them.
type Route struct {
	// Pattern is the mux's.
	Pattern string
	// Request is what the body is decoded into; nil when there is none.
	Request reflect.Type
	// Parameters are what else is read of a request: headers, and query parameters
	// with a question mark.
	Parameters []string

	handler http.HandlerFunc
}

// op is a call with a JSON body.
func op[In any](s *Service, name string, h func(context.Context, cells.TenantID, In) (any, error)) Route {
	return Route{Pattern: "POST /v1/memory." + name, Request: reflect.TypeFor[In](), Parameters: []string{"X-Tenant"},
		handler: func(w http.ResponseWriter, r *http.Request) {
			s.call(w, r, func(ctx context.Context, t cells.TenantID, body []byte) (any, error) {
				in, err := decode[In](body)
				if err != nil {
					return nil, err
				}
				return h(ctx, t, in)
			})
		}}
}

// Routes lists the calls that Handler serves; there are no others.
func (s *Service) Routes() []Route {
	return []Route{
		op(s, "set", s.set), op(s, "get", s.get), op(s, "delete", s.delete), op(s, "list", s.list), op(s, "history", s.history),
		op(s, "bulk_set", s.bulkSet), op(s, "bulk_get", s.bulkGet),
		{Pattern: "GET /v1/events", Parameters: []string{"X-Tenant", "Last-Event-ID", "?after"}, handler: s.stream},
	}
}

// Handler returns the API. In a cell it is wrapped by the member's gate, which
// puts the admission into each request's context.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	for _, r := range s.Routes() {
		mux.HandleFunc(r.Pattern, r.handler)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h, pattern := mux.Handler(r); pattern == "" {
			s.notServed(w, r, h)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// notServed answers an unknown path or method, which h would answer in plain text.
func (s *Service) notServed(w http.ResponseWriter, r *http.Request, h http.Handler) {
	rec := &statusOnly{header: http.Header{}}
	h.ServeHTTP(rec, r)
	p := problem{Type: "about:blank", Status: http.StatusNotFound, Title: "there is no such call", Code: "NO_SUCH_CALL"}
	if rec.status == http.StatusMethodNotAllowed {
		p.Status, p.Title, p.Code = rec.status, "the call has another method", "METHOD_NOT_ALLOWED"
		p.Detail = "want " + rec.header.Get("Allow")
		w.Header().Set("Allow", rec.header.Get("Allow"))
	}
	writeProblem(w, p)
}

// statusOnly keeps the status and the headers of an answer.
type statusOnly struct {
	header http.Header
	status int
}

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) WriteHeader(status int)      { s.status = status }
func (s *statusOnly) Write(p []byte) (int, error) { return len(p), nil }

func (s *Service) tenantOf(r *http.Request) (cells.TenantID, error) {
	if a, ok := cells.AdmissionFromContext(r.Context()); ok {
		if c, ok := checks.FromContext(r.Context()); ok && c.Tenant != a.Tenant {
			return "", &cells.Answer{Code: cells.CodeForbidden, Detail: "the credential is not for the tenant that the request was routed by"}
		}
		return a.Tenant, nil
	}
	if s.tenant == nil {
		return "", &cells.Answer{Code: cells.CodeTenancyRefused, Detail: "the request carries no admission of this cell"}
	}
	return s.tenant(r)
}

func (s *Service) call(w http.ResponseWriter, r *http.Request, h func(context.Context, cells.TenantID, []byte) (any, error)) {
	tenant, err := s.tenantOf(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	if r.ContentLength > maxBody {
		// Said before any of it is asked for.
		s.fail(w, r, tooLarge("a request body may have %d bytes", maxBody))
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		var most *http.MaxBytesError
		if errors.As(err, &most) {
			err = tooLarge("a request body may have %d bytes", maxBody)
		} else {
			err = fmt.Errorf("%w: the body could not be read", ErrBadRequest)
		}
		s.fail(w, r, err)
		return
	}
	out, err := h(r.Context(), tenant, body)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, out)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		http.Error(w, "encoding the answer failed", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(buf.Bytes())
}

// decode is strict: one JSON object, no unknown fields, nothing behind it.
func decode[T any](body []byte) (T, error) {
	var v T
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		return v, fmt.Errorf("%w: %s", ErrBadRequest, malformed(err))
	}
	if _, err := dec.Token(); err != io.EOF {
		return v, fmt.Errorf("%w: there is something behind the JSON object", ErrBadRequest)
	}
	return v, nil
}

// problem is the service's own error document (RFC 9457).
// malformed says in a client's words what is wrong with a body.
func malformed(err error) string {
	var typ *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.Is(err, io.EOF):
		return "the body is empty; want a JSON object"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the body ends in the middle of its JSON"
	case errors.As(err, &typ) && typ.Field == "":
		return "the body is a JSON " + typ.Value + "; want an object"
	case errors.As(err, &typ):
		return fmt.Sprintf("%s is a JSON %s of the wrong kind or size", typ.Field, typ.Value)
	case errors.As(err, &syntax):
		return fmt.Sprintf("the body is no JSON at byte %d", syntax.Offset)
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

func tooLarge(format string, args ...any) error {
	return &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf(format, args...)}
}

type problem struct {
	Type    string `json:"type"`
	Title   string `json:"title"`
	Status  int    `json:"status"`
	Code    string `json:"code"`
	Detail  string `json:"detail,omitempty"`
	Retry   bool   `json:"retry"`
	Version *int64 `json:"version,omitempty"`
}

func (s *Service) fail(w http.ResponseWriter, r *http.Request, err error) {
	var conflict *VersionConflict
	p := problem{Type: "about:blank", Status: http.StatusInternalServerError, Title: "the request failed", Code: "INTERNAL"}
	switch {
	case errors.As(err, &conflict):
		p.Status, p.Title, p.Code, p.Detail, p.Version = http.StatusConflict, "the memory is at another version", "VERSION_CONFLICT", strings.TrimPrefix(err.Error(), "memory: "), &conflict.Have
	case errors.Is(err, ErrBadRequest):
		p.Status, p.Title, p.Code, p.Detail = http.StatusBadRequest, "the request is malformed", "BAD_REQUEST", strings.TrimPrefix(err.Error(), ErrBadRequest.Error()+": ")
	case errors.Is(err, ErrNoItem):
		p.Status, p.Title, p.Code = http.StatusNotFound, "there is no such memory", "NO_SUCH_MEMORY"
	case cells.AnswerOf(err) != nil:
		cells.WriteProblem(w, r, cells.AnswerOf(err))
		return
	case errors.Is(err, tenancy.ErrRefused):
		// The stores themselves refused; this process's own check did not.
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeTenancyRefused, Detail: "the cell's stores do not hold the tenant", RetryAfter: 5 * time.Second, Err: err})
		return
	case errors.Is(err, cells.ErrFenced):
		// Refused as a whole, nothing was written: whoever serves the tenant now may
		// be asked again.
		answer := &cells.Answer{Code: cells.CodeStaleRoute, Detail: "the tenant's fence refused the request", Err: err}
		if adm, ok := cells.AdmissionFromContext(r.Context()); ok {
			answer = adm.Refusal(err)
		}
		cells.WriteProblem(w, r, answer)
		return
	case errors.Is(err, guard.ErrCommitUnknown):
		p.Title, p.Code = "the write may have been made or not; read before you repeat it", "OUTCOME_UNKNOWN"
	case guard.NothingWritten(err) && errors.Is(err, cells.ErrUnavailable):
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "the cell's database did not answer", Err: err})
		return
	case r.Context().Err() != nil:
		p.Status, p.Title, p.Code = http.StatusServiceUnavailable, "the request was given up", "CANCELLED"
	default:
		s.log.Error("request failed", "path", r.URL.Path, "err", err)
	}
	writeProblem(w, p)
}

func writeProblem(w http.ResponseWriter, p problem) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p)
}

func (s *Service) set(ctx context.Context, t cells.TenantID, wr Write) (any, error) {
	items, err := s.store.Write(ctx, t, "memory.set", []Write{wr})
	if err != nil {
		return nil, err
	}
	return items[0], nil
}

type deleteRequest struct {
	Ref
	IfVersion *int64 `json:"if_version"`
}

func (s *Service) delete(ctx context.Context, t cells.TenantID, in deleteRequest) (any, error) {
	items, err := s.store.Write(ctx, t, "memory.delete", []Write{{Ref: in.Ref, IfVersion: in.IfVersion, Delete: true}})
	if err != nil {
		return nil, err
	}
	return items[0], nil
}

type bulkSetRequest struct {
	Items []Write `json:"items"`
}

func (s *Service) bulkSet(ctx context.Context, t cells.TenantID, in bulkSetRequest) (any, error) {
	if len(in.Items) == 0 || len(in.Items) > MaxBulk {
		return nil, fmt.Errorf("%w: items has %d entries; 1 to %d are allowed", ErrBadRequest, len(in.Items), MaxBulk)
	}
	items, err := s.store.Write(ctx, t, "memory.bulk_set", in.Items)
	if err != nil {
		return nil, err
	}
	return map[string]any{"items": items}, nil
}

func (s *Service) get(ctx context.Context, t cells.TenantID, ref Ref) (any, error) {
	items, err := s.store.Read(ctx, t, []Ref{ref})
	if err != nil {
		return nil, err
	}
	if len(items) == 0 {
		return nil, ErrNoItem
	}
	return items[0], nil
}

type bulkGetRequest struct {
	Items []Ref `json:"items"`
}

func (s *Service) bulkGet(ctx context.Context, t cells.TenantID, in bulkGetRequest) (any, error) {
	if len(in.Items) == 0 || len(in.Items) > MaxBulk {
		return nil, fmt.Errorf("%w: items has %d entries; 1 to %d are allowed", ErrBadRequest, len(in.Items), MaxBulk)
	}
	items, err := s.store.Read(ctx, t, in.Items)
	if err != nil {
		return nil, err
	}
	return map[string]any{"items": items}, nil
}

type page struct {
	Items []Item `json:"items"`
	// Cursor continues a list after the last item; "" on the last page.
	Cursor string `json:"cursor,omitempty"`
	// Before continues a history below the last item; 0 on the last page.
	Before int64 `json:"before,omitempty"`
}

func pageSize(limit int) (int, error) {
	if limit < 0 || limit > MaxPage {
		return 0, fmt.Errorf("%w: limit is %d; 0 to %d are allowed", ErrBadRequest, limit, MaxPage)
	}
	if limit == 0 {
		limit = 100
	}
	return limit, nil
}

type listRequest struct {
	Namespace string `json:"namespace"`
	Prefix    string `json:"prefix"`
	Cursor    string `json:"cursor"`
	Limit     int    `json:"limit"`
}

func (s *Service) list(ctx context.Context, t cells.TenantID, in listRequest) (any, error) {
	if err := validName("namespace", in.Namespace, MaxNamespace); err != nil {
		return nil, err
	}
	limit, err := pageSize(in.Limit)
	if err != nil {
		return nil, err
	}
	after, err := base64.RawURLEncoding.DecodeString(in.Cursor)
	if err != nil {
		return nil, fmt.Errorf("%w: cursor is not one that this service gave", ErrBadRequest)
	}
	items, more, err := s.store.List(ctx, t, in.Namespace, in.Prefix, string(after), limit)
	if err != nil {
		return nil, err
	}
	p := page{Items: items}
	if more {
		p.Cursor = base64.RawURLEncoding.EncodeToString([]byte(items[len(items)-1].Key))
	}
	return p, nil
}

type historyRequest struct {
	Ref
	Before int64 `json:"before"`
	Limit  int   `json:"limit"`
}

func (s *Service) history(ctx context.Context, t cells.TenantID, in historyRequest) (any, error) {
	if err := in.Ref.Validate(); err != nil {
		return nil, err
	}
	limit, err := pageSize(in.Limit)
	if err != nil {
		return nil, err
	}
	items, more, err := s.store.History(ctx, t, in.Ref, in.Before, limit)
	if err != nil {
		return nil, err
	}
	p := page{Items: items}
	if more {
		p.Before = items[len(items)-1].Version
	}
	return p, nil
}

// HeaderTenant names the tenant by a request header, or "default" without it: for
// a service that runs alone.
func HeaderTenant(name string) func(*http.Request) (cells.TenantID, error) {
	return func(r *http.Request) (cells.TenantID, error) {
		t := cells.TenantID(r.Header.Get(name))
		if t == "" {
			t = "default"
		}
		if err := t.Validate(); err != nil {
			return "", &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error()}
		}
		return t, nil
	}
}
