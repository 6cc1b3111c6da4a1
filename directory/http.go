// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/internal/web"
)

const (
	// requestTimeout bounds what a call waits for stores and cells.
	requestTimeout = 30 * time.Second
	// writeTimeout bounds the whole of an answer; streams renew it with each line.
	writeTimeout = 2 * requestTimeout
	// lineTimeout bounds the writing of one line of a stream to a slow reader.
	lineTimeout = 10 * time.Second
)

// caller is who made a request, for the audit.
type caller struct {
	peer, actor, request string
}

func (c caller) audit(action string) api.AuditEntry {
	return api.AuditEntry{At: time.Now().UTC(), Peer: c.peer, Actor: c.actor, RequestID: c.request, Action: action}
}

func detail(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil { // maps of strings and our own structs always marshal
		return nil
	}
	return b
}

type callerKey struct{}

func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c
}

// as returns the caller acting for the actor that the request names.
func (c caller) as(actor string) caller {
	c.actor = actor
	return c
}

// endpoint is a handler that returns what to answer: a value with its status, or
// an error. A nil value without an error means that it has answered itself.
type endpoint func(w http.ResponseWriter, r *http.Request) (status int, body any, err error)

// serve runs an endpoint for a peer, under a time limit unless it streams.
func (s *Server) serve(peer func(*http.Request) string, h endpoint) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := web.RequestID(w, r)
		ctx := context.WithValue(r.Context(), callerKey{}, caller{peer: peer(r), actor: peer(r), request: id})
		if r.URL.Query().Get("watch") == "" {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, requestTimeout)
			defer cancel()
		}
		status, body, err := h(w, r.WithContext(ctx))
		switch {
		case err != nil:
			s.refuse(w, r, id, err)
		case body != nil:
			writeJSON(w, status, body)
		}
	})
}

func (s *Server) refuse(w http.ResponseWriter, r *http.Request, id string, err error) {
	a := answerOf(err)
	s.metrics.refused(a.Code)
	if a.Code == cells.CodeBackendUnavailable || a.Code.HTTPStatus() == http.StatusInternalServerError {
		s.log.Warn("request failed", "method", r.Method, "path", r.URL.Path, "request", id, "err", err)
	}
	cells.WriteProblem(w, r, a)
}

// answerOf turns an error into an answer of the closed list.
func answerOf(err error) *cells.Answer {
	if a := cells.AnswerOf(err); a != nil {
		return a
	}
	give := func(c cells.Code) *cells.Answer { return &cells.Answer{Code: c, Detail: err.Error(), Err: err} }
	var found *cells.PreflightError
	switch {
	case errors.As(err, &found):
		return give(cells.CodeConflict)
	case errors.Is(err, ErrCellClosed):
		a := give(cells.CodeCellClosed)
		a.RetryAfter = time.Minute
		return a
	case errors.Is(err, ErrNoCell):
		return give(cells.CodeNoCell)
	case errors.Is(err, ErrOperationReused), errors.Is(err, ErrMoveActive), errors.Is(err, ErrRolloutActive), errors.Is(err, cells.ErrConflict),
		errors.Is(err, cells.ErrJurisdiction), errors.Is(err, cells.ErrOtherMove), errors.Is(err, cells.ErrNotApplicable), errors.Is(err, cells.ErrElsewhere):
		return give(cells.CodeConflict)
	case errors.Is(err, cells.ErrBudget):
		return give(cells.CodeBudgetExceeded)
	case errors.Is(err, cells.ErrNotFound):
		return give(cells.CodeNotFound)
	case errors.Is(err, cells.ErrInvalid):
		return give(cells.CodeBadRequest)
	}
	// The store, the table or a cell could not be reached, or something that nobody
	// expected: the detail stays in the log.
	return &cells.Answer{Code: cells.CodeBackendUnavailable, Err: err, RetryAfter: time.Second,
		Detail: "the change, if one was asked for, may have been made"}
}

// readJSON reads exactly one JSON document of at most [api.MaxBody] bytes into v and
// refuses unknown fields.
func readJSON(w http.ResponseWriter, r *http.Request, v any) error {
	return web.Decode(w, r, v, api.MaxBody, true)
}

// decodeLimited does as readJSON for a document of at most limit bytes.
func decodeLimited(w http.ResponseWriter, r *http.Request, v any, limit int64) error {
	return web.Decode(w, r, v, limit, true)
}

func decodeJSON(w http.ResponseWriter, r *http.Request, v any, strict bool) error {
	return web.Decode(w, r, v, api.MaxBody, strict)
}

func bad(format string, args ...any) error { return web.Bad(format, args...) }

func writeJSON(w http.ResponseWriter, status int, v any) { web.WriteJSON(w, status, v) }

func query(r *http.Request, names ...string) (map[string]string, error) {
	return web.Query(r, names...)
}

func number(v, name string, limit int64) (int64, error) { return web.Number(v, name, limit) }

func tenantOf(r *http.Request) (cells.TenantID, error) {
	t := cells.TenantID(r.PathValue("tenant"))
	if err := t.Validate(); err != nil {
		return "", &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error(), Err: err}
	}
	return t, nil
}

// lines writes a stream of JSON documents, one a line.
type lines struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
	enc *json.Encoder
}

func newLines(w http.ResponseWriter) *lines {
	h := w.Header()
	h.Set("Content-Type", api.ContentNDJSON)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusOK)
	return &lines{w: w, ctl: http.NewResponseController(w), enc: json.NewEncoder(w)}
}

func (l *lines) send(v any) error {
	if err := l.ctl.SetWriteDeadline(time.Now().Add(lineTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if err := l.enc.Encode(v); err != nil {
		return err
	}
	return l.ctl.Flush()
}
