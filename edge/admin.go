// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/topology"
)

// PathExplain is the path of explanations on the admin listener.
const PathExplain = "/cells/v1/explain"

// AdminHandler is what the admin listener serves: /livez, /readyz, /metrics and
// [PathExplain].
func (s *Server) AdminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, r *http.Request) { s.health(w, r, true) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) { s.health(w, r, true) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{Registry: s.metrics.registry}))
	mux.HandleFunc("GET "+PathExplain, s.explain)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeNotServed})
	})
	return mux
}

// Readiness is the body of the admin listener's /readyz.
type Readiness struct {
	Router   string          `json:"router"`
	Ready    bool            `json:"ready"`
	Reason   string          `json:"reason,omitempty"`
	Routes   RoutesStatus    `json:"routes"`
	Topology topology.Status `json:"topology"`
	// Cells is the table of cells, when whole deployments are the cells.
	Cells  *celltable.Status `json:"cells,omitempty"`
	Held   int               `json:"held"`
	Active int64             `json:"active"`
}

// RoutesStatus says how good the view of the routes is.
type RoutesStatus struct {
	Revision  cells.Revision `json:"revision"`
	AgeMS     int64          `json:"age_ms"`
	Stale     bool           `json:"stale"`
	Source    string         `json:"source"`
	Routes    int            `json:"routes"`
	Watching  bool           `json:"watching"`
	Breaks    uint64         `json:"breaks"`
	LastError string         `json:"last_error,omitempty"`
}

func (s *Server) routesStatus() RoutesStatus {
	st := s.routes.Status()
	return RoutesStatus{
		Revision: st.Revision, AgeMS: st.Age.Milliseconds(), Stale: st.Stale, Source: st.Source, Routes: st.Routes,
		Watching: st.Watching, Breaks: st.Breaks, LastError: st.LastError,
	}
}

// readiness: an edge is ready as long as it knows routes and processes, of
// whatever age, and is not ending.
func (s *Server) readiness() Readiness {
	n, _ := s.room.Held()
	r := Readiness{Router: s.cfg.Name, Routes: s.routesStatus(), Topology: s.topo.Status(), Held: n, Active: s.active.Load()}
	if s.deploy != nil {
		st := s.deploy.Table.Status()
		r.Cells = &st
	}
	switch {
	case s.draining.Load():
		r.Reason = "draining"
	case r.Routes.Source == "":
		r.Reason = "the routes are not known"
	case !r.Topology.Known:
		r.Reason = "the topology is not known"
	default:
		r.Ready = true
	}
	return r
}

func (s *Server) health(w http.ResponseWriter, r *http.Request, details bool) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeNotServed})
		return
	}
	status, word := http.StatusOK, "ok\n"
	state := Readiness{Ready: true}
	if r.URL.Path == "/readyz" {
		if state = s.readiness(); !state.Ready {
			status, word = http.StatusServiceUnavailable, "not ready\n"
		}
	}
	w.Header().Set("Cache-Control", "no-store")
	if details && r.URL.Path == "/readyz" {
		writeJSON(w, status, state)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(word))
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
}

// Explanation says where a request would go, and why.
type Explanation struct {
	// Router is the name of the edge that says so.
	Router string         `json:"router"`
	Tenant cells.TenantID `json:"tenant,omitempty"`
	// Extractor is the one that found the tenant: its kind, or "given" when the
	// question named the tenant. ExtractorIndex counts from 1; Extractors lists all.
	Extractor      string   `json:"extractor,omitempty"`
	ExtractorRule  string   `json:"extractor_rule,omitempty"`
	ExtractorIndex int      `json:"extractor_index,omitempty"`
	Extractors     []string `json:"extractors"`
	Verified       bool     `json:"verified,omitempty"`
	// Cell is where the request would go; Rule says why: "route" or "default", or, when
	// whole deployments are the cells, a name of package rules.
	Cell  cells.CellID `json:"cell,omitempty"`
	Rule  string       `json:"rule,omitempty"`
	State string       `json:"state"`
	Epoch cells.Epoch  `json:"epoch"`
	// RouteRevision is that of the tenant's row, Revision and AgeMS those of the view.
	RouteRevision cells.Revision `json:"route_revision,omitempty"`
	Revision      cells.Revision `json:"revision"`
	AgeMS         int64          `json:"age_ms"`
	Source        string         `json:"source"`
	Move          *cells.MoveRef `json:"move,omitempty"`
	// Upstreams are the processes of the cell that take requests.
	Upstreams []string `json:"upstreams"`
	// Held is the number of the tenant's requests that wait here now.
	Held int `json:"held"`
	// ForwardPath is the path that the cell would get.
	ForwardPath string `json:"forward_path,omitempty"`
	// Answer is what the request would get from the edge instead; "" when it would
	// be forwarded. Held requests are forwarded later: MOVING.
	Answer cells.Code `json:"answer,omitempty"`
	Detail string     `json:"detail,omitempty"`
	At     time.Time  `json:"at"`
}

// Explain says where a request of the tenant would go.
func (s *Server) Explain(tenant cells.TenantID) Explanation {
	e := s.newExplanation()
	e.Tenant, e.Extractor = tenant, "given"
	s.explainTenant(&e)
	return e
}

// ExplainRequest says where the request would go. Its headers, host and URL are
// looked at only.
func (s *Server) ExplainRequest(r *http.Request) Explanation {
	e := s.newExplanation()
	raw := r.URL.EscapedPath()
	if forward.Reserved(raw) {
		e.Answer, e.Detail = cells.CodeNotServed, "paths under /cells/ are the platform's"
		return e
	}
	if s.deploy != nil {
		s.explainDeployment(&e, r)
		return e
	}
	found, err := s.list.Resolve(r)
	if found.Kind != "" {
		e.Tenant, e.Extractor, e.ExtractorRule, e.ExtractorIndex, e.Verified = found.Tenant, found.Kind, found.Rule, found.Index+1, found.Verified
	}
	if err != nil {
		a := cells.AnswerOf(err)
		e.Answer, e.Detail = a.Code, a.Detail
		return e
	}
	u := url.URL{}
	forward.SetPath(&u, r.URL, "", found.StripPath)
	e.ForwardPath = u.EscapedPath()
	if forward.Reserved(e.ForwardPath) {
		e.Answer, e.Detail = cells.CodeNotServed, "paths under /cells/ are the platform's"
		return e
	}
	s.explainTenant(&e)
	return e
}

func (s *Server) newExplanation() Explanation {
	st := s.routes.Status()
	extractors := []string{}
	if s.list != nil {
		extractors = s.list.Rules()
	}
	return Explanation{
		Router: s.cfg.Name, Extractors: extractors, Revision: st.Revision, AgeMS: st.Age.Milliseconds(), Source: st.Source,
		State: cells.RouteState(0).String(), Upstreams: []string{}, At: time.Now().UTC(),
	}
}

func (s *Server) explainTenant(e *Explanation) {
	d := s.routes.Lookup(e.Tenant)
	e.Cell, e.Rule, e.Epoch, e.State, e.RouteRevision = d.Cell, d.Rule, d.Epoch, d.Route.State.String(), d.Route.Revision
	e.Revision, e.AgeMS = d.Revision, d.Age.Milliseconds()
	if m, ok := d.Route.Move(); ok {
		e.Move = &m
	}
	e.Held = s.room.HeldBy(e.Tenant)
	if a := d.Refusal(); a != nil {
		e.Answer, e.Detail = a.Code, a.Detail
		if a.Detail == "" {
			e.Detail = a.Code.Title()
		}
	}
	if d.Cell != "" {
		e.Upstreams = append(e.Upstreams, s.topo.Upstreams(d.Cell)...)
		if e.Answer == "" && len(e.Upstreams) == 0 {
			e.Answer, e.Detail = cells.CodeCellUnreachable, "no process of the cell is ready"
		}
	}
}

// explain serves PathExplain. The query has either tenant, or what a request would
// have: host, path, method, and header=Name:value, as often as there are headers.
func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	bad := func(detail string) {
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeBadRequest, Detail: detail})
	}
	if err != nil {
		bad("the query is malformed")
		return
	}
	for k, v := range q {
		switch {
		case k != "tenant" && k != "host" && k != "path" && k != "header" && k != "method":
			bad(fmt.Sprintf("unknown parameter %q; known are tenant, host, path, method, header", k))
			return
		case k == "tenant" && s.deploy != nil:
			bad("this router does not know tenants; ask for a request by host, path and header")
			return
		case k != "header" && len(v) != 1:
			bad(k + " is there more than once")
			return
		}
	}
	if q.Has("tenant") {
		if len(q) > 1 {
			bad("tenant stands alone")
			return
		}
		tenant := cells.TenantID(q.Get("tenant"))
		if err := tenant.Validate(); err != nil {
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error()})
			return
		}
		writeJSON(w, http.StatusOK, s.Explain(tenant))
		return
	}
	path := q.Get("path")
	if path == "" {
		path = "/"
	}
	u, err := url.ParseRequestURI(path)
	if err != nil || !strings.HasPrefix(path, "/") {
		bad("path is not an absolute path")
		return
	}
	method := http.MethodGet
	if q.Has("method") {
		method = q.Get("method")
	}
	asked := &http.Request{Method: method, URL: u, Host: q.Get("host"), Header: http.Header{}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}
	for _, h := range q["header"] {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			bad("header is not Name:value")
			return
		}
		asked.Header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	writeJSON(w, http.StatusOK, s.ExplainRequest(asked))
}
