// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Op is what a request wants to do with the table.
type Op string

const (
	OpRead  Op = "read"  // get or list
	OpWatch Op = "watch" // watch
	OpWrite Op = "write" // compare-and-set
)

// Server is the handler of a table. Make it with [Handler].
type Server struct {
	table     cells.RoutingTable
	readOnly  bool
	authorize func(*http.Request, Op) error
	log       *slog.Logger
	patience  time.Duration
	watches   chan struct{} // a token for each watch

	life context.Context // ends with Close
	end  context.CancelFunc

	mu     sync.Mutex // guards closed against going.Add
	closed bool
	going  sync.WaitGroup // the watches that are served
}

// HandlerOption configures a Server.
type HandlerOption func(*Server)

// ReadOnly refuses every compare-and-set.
func ReadOnly() HandlerOption { return func(s *Server) { s.readOnly = true } }

// WithAuthorize asks f about each request before anything else is done. An error
// that wraps [cells.ErrUnavailable] is passed on as such; any other refuses with
// [ErrForbidden], and what it says is logged and not sent. Without this option
// every request is allowed.
func WithAuthorize(f func(r *http.Request, op Op) error) HandlerOption {
	return func(s *Server) { s.authorize = f }
}

// WithMaxWatches bounds the watches that are served at once; 1024 by default.
func WithMaxWatches(n int) HandlerOption {
	return func(s *Server) { s.watches = make(chan struct{}, max(n, 1)) }
}

// WithWritePatience bounds how long a watch waits for a peer that does not read;
// 10 s by default.
func WithWritePatience(d time.Duration) HandlerOption { return func(s *Server) { s.patience = d } }

// WithHandlerLogger sets the logger; [slog.Default] otherwise.
func WithHandlerLogger(l *slog.Logger) HandlerOption { return func(s *Server) { s.log = l } }

// Handler serves table below [Path], to be mounted at the root:
//
//	mux.Handle(remote.Path, h)
//	mux.Handle(remote.Path+"/", h)
//
// The table stays the caller's.
func Handler(table cells.RoutingTable, opts ...HandlerOption) *Server {
	s := &Server{table: table, log: slog.Default(), patience: 10 * time.Second, watches: make(chan struct{}, 1024)}
	s.life, s.end = context.WithCancel(context.Background())
	for _, o := range opts {
		o(s)
	}
	return s
}

// Close ends the watches and waits for them, so that an http.Server can shut
// down; it refuses new ones. Other requests go on.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end()
	s.going.Wait()
	return nil
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if err := s.serve(w, r); err != nil {
		s.fail(w, r, err)
	}
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) error {
	rest, ok := strings.CutPrefix(r.URL.Path, Path)
	if !ok || rest != "" && rest[0] != '/' || rest == "/" {
		return fmt.Errorf("%w: no such path", cells.ErrInvalid)
	}
	q, err := query(r.URL.RawQuery)
	if err != nil {
		return err
	}
	switch {
	case r.Method == http.MethodPost && rest == "" && len(q) == 0:
		return s.swap(w, r)
	case r.Method != http.MethodGet:
		return fmt.Errorf("%w: method %s", cells.ErrInvalid, r.Method)
	case rest != "":
		return s.get(w, r, rest[1:], q)
	case q["tenant"] != "":
		tenant := q["tenant"]
		return s.get(w, r, tenant, without(q, "tenant"))
	case q["watch"] != "":
		return s.watch(w, r, q)
	}
	return s.list(w, r, q)
}

// query parses a query of known, single, not empty parameters.
func query(raw string) (map[string]string, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, fmt.Errorf("%w: query: %w", cells.ErrInvalid, err)
	}
	q := make(map[string]string, len(values))
	known := []string{"after", "limit", "cell", "tenant", "watch", "from", "heartbeat_ms"}
	for k, v := range values {
		if !slices.Contains(known, k) || len(v) != 1 || v[0] == "" {
			return nil, fmt.Errorf("%w: parameter %q is unknown, empty or repeated", cells.ErrInvalid, k)
		}
		q[k] = v[0]
	}
	return q, nil
}

func without(q map[string]string, keys ...string) map[string]string {
	for _, k := range keys {
		delete(q, k)
	}
	return q
}

func unwanted(q map[string]string) error {
	for k := range q {
		return fmt.Errorf("%w: parameter %q does not belong here", cells.ErrInvalid, k)
	}
	return nil
}

func number(q map[string]string, key string, bits int) (uint64, error) {
	if q[key] == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(q[key], 10, bits)
	if err != nil {
		return 0, fmt.Errorf("%w: parameter %q is no number", cells.ErrInvalid, key)
	}
	return n, nil
}

func (s *Server) allow(r *http.Request, op Op) error {
	if s.authorize == nil {
		return nil
	}
	err := s.authorize(r, op)
	if err == nil {
		return nil
	}
	s.log.WarnContext(r.Context(), "routing table request refused", "op", string(op), "peer", r.RemoteAddr, "reason", err)
	if errors.Is(err, cells.ErrUnavailable) {
		return fmt.Errorf("%w: authorisation cannot be checked now", cells.ErrUnavailable)
	}
	return fmt.Errorf("%w: %s", ErrForbidden, op)
}

func (s *Server) get(w http.ResponseWriter, r *http.Request, tenant string, q map[string]string) error {
	if err := unwanted(q); err != nil {
		return err
	}
	if err := s.allow(r, OpRead); err != nil {
		return err
	}
	route, err := s.table.Get(r.Context(), cells.TenantID(tenant))
	if err != nil {
		return err
	}
	return answer(w, route)
}

func (s *Server) list(w http.ResponseWriter, r *http.Request, q map[string]string) error {
	limit, err := number(q, "limit", 31)
	if err != nil {
		return err
	}
	opts := cells.ListOptions{After: cells.TenantID(q["after"]), Limit: int(limit), Cell: cells.CellID(q["cell"])}
	if err := unwanted(without(q, "limit", "after", "cell")); err != nil {
		return err
	}
	if err := s.allow(r, OpRead); err != nil {
		return err
	}
	p, err := s.table.List(r.Context(), opts)
	if err != nil {
		return err
	}
	out := page{Routes: p.Routes, Revision: p.Revision, Next: p.Next}
	size := 0
	for i := range p.Routes {
		enc, err := cells.EncodeRoute(p.Routes[i])
		if err != nil {
			return err
		}
		if size += len(enc) + 1; size > trimPage && i > 0 {
			out.Routes, out.Next = p.Routes[:i], p.Routes[i-1].TenantID
			break
		}
	}
	return answer(w, out)
}

func (s *Server) swap(w http.ResponseWriter, r *http.Request) error {
	if err := s.allow(r, OpWrite); err != nil {
		return err
	}
	if s.readOnly {
		return ErrReadOnly
	}
	if v := r.Header.Values(HeaderWire); len(v) != 1 || v[0] != wireVersion {
		return fmt.Errorf("%w: %s is %q, this server takes %q", cells.ErrInvalid, HeaderWire, v, wireVersion)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return fmt.Errorf("%w: body: %w", cells.ErrInvalid, err)
	}
	var in swapBody
	if err := decodeStrict(body, &in); err != nil {
		return err
	}
	route, err := s.table.CompareAndSet(r.Context(), in.Old, in.Route)
	if err != nil {
		return err
	}
	return answer(w, route)
}

func answer(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	w.Header().Set("Content-Type", typeJSON)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b) // a peer that is gone finds out by itself
	return nil
}

func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	f := failureOf(err)
	if f.Code == "unavailable" && r.Context().Err() == nil {
		s.log.WarnContext(r.Context(), "routing table request failed", "method", r.Method, "path", r.URL.Path, "error", err)
	}
	b, merr := json.Marshal(f)
	if merr != nil {
		b = []byte(`{"code":"unavailable"}`)
	}
	w.Header().Set("Content-Type", typeProblem)
	w.WriteHeader(f.Status)
	_, _ = w.Write(b)
}
