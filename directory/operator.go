// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/internal/credential"
)

// OperatorHandler serves the operator interface and the probes. It is what the
// operator listener runs; exported for tests and for mounting behind TLS.
func (s *Server) OperatorHandler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h endpoint) { mux.Handle(pattern, s.operator(h)) }
	handle("GET "+api.PathCells, s.getCells)
	handle("GET "+api.PathCells+"/{cell}", s.getCell)
	handle("PUT "+api.PathCells+"/{cell}", s.putCell)
	handle("GET "+api.PathTenants, s.getTenants)
	handle("GET "+api.PathTenants+"/{tenant}", s.getTenant)
	handle("DELETE "+api.PathTenants+"/{tenant}", s.deleteTenant)
	handle("POST "+api.PathTenants+"/{tenant}/window/close", s.postCloseWindow)
	handle("POST "+api.PathPlacements, s.postPlacement)
	handle("POST "+api.PathMoves, s.postMove)
	handle("GET "+api.PathMoves, s.getMoves)
	handle("GET "+api.PathMoves+"/{move}", s.getMove)
	handle("POST "+api.PathMoves+"/{move}/rollback", s.postRollback)
	handle("GET "+api.PathMoves+"/{move}/receipt", s.getReceipt)
	handle("GET "+api.PathBudgets, s.getBudgets)
	handle("PUT "+api.PathBudgets, s.putBudget)
	handle("DELETE "+api.PathBudgets, s.deleteBudget)
	handle("GET "+api.PathBudgets+"/{tenant}", s.getBudget)
	handle("PUT "+api.PathBudgets+"/{tenant}", s.putBudget)
	handle("DELETE "+api.PathBudgets+"/{tenant}", s.deleteBudget)
	s.handleCampaigns(handle)
	s.handleRollouts(handle)
	s.handleProvisioning(handle)
	handle("GET "+api.PathMembers, s.getMembers)
	handle("GET "+api.PathAudit, s.getAudit)
	handle("/", notServed)

	mux.HandleFunc("GET "+api.PathLive, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, s.live()) })
	mux.HandleFunc("GET "+api.PathReady, s.getReady)
	mux.Handle("GET "+api.PathMetrics, promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	return mux
}

func notServed(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	return 0, nil, &cells.Answer{Code: cells.CodeNotServed, Detail: r.Method + " " + r.URL.Path}
}

// operator admits the holder of the operator credential.
func (s *Server) operator(h endpoint) http.Handler {
	admitted := s.serve(func(*http.Request) string { return "operator" }, h)
	refused := func(a *cells.Answer) http.Handler {
		return s.serve(func(*http.Request) string { return "" }, func(http.ResponseWriter, *http.Request) (int, any, error) {
			return 0, nil, a
		})
	}
	none := refused(&cells.Answer{Code: cells.CodeNoOperatorCredential,
		Detail: "set the SHA-256 of an operator credential in the directory's configuration and restart it"})
	wrong := refused(&cells.Answer{Code: cells.CodeUnauthenticated, Detail: "want Authorization: Bearer " + CredentialPrefix + "..."})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(s.verify) == 0 {
			none.ServeHTTP(w, r)
			return
		}
		if !credential.Among(credential.Presented(r.Header), s.verify) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="directory"`)
			wrong.ServeHTTP(w, r)
			return
		}
		admitted.ServeHTTP(w, r)
	})
}

type health struct {
	Instance string `json:"instance"`
	OK       bool   `json:"ok"`
	Store    string `json:"store,omitempty"`
	Routes   string `json:"routes,omitempty"`
}

func (s *Server) live() health { return health{Instance: s.instance, OK: true} }

func (s *Server) getReady(w http.ResponseWriter, r *http.Request) {
	h := s.live()
	if err := s.store.Ping(r.Context()); err != nil {
		h.OK, h.Store = false, "cannot be read"
		s.log.Warn("not ready", "err", err)
	}
	if why := s.follow.behind(); why != "" {
		h.OK, h.Routes = false, why
	}
	status := http.StatusOK
	if !h.OK {
		status = http.StatusServiceUnavailable
	}
	writeJSON(w, status, h)
}

func cellOf(r *http.Request) (cells.CellID, error) {
	id := cells.CellID(r.PathValue("cell"))
	return id, id.Validate()
}

func (s *Server) getCells(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	list, _, err := s.store.Cells(r.Context())
	if err != nil {
		return 0, nil, err
	}
	if list == nil {
		list = []api.Cell{}
	}
	return http.StatusOK, api.CellList{Cells: list}, nil
}

func (s *Server) getCell(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	list, _, err := s.store.Cells(r.Context())
	if err != nil {
		return 0, nil, err
	}
	for _, c := range list {
		if c.ID == id {
			return http.StatusOK, c, nil
		}
	}
	return 0, nil, unknownCell(id)
}

func unknownCell(id cells.CellID) error {
	return &cells.Answer{Code: cells.CodeNotFound, Cell: id, Detail: "cell " + string(id) + " is not registered"}
}

func (s *Server) putCell(w http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	var spec api.CellSpec
	if err := readJSON(w, r, &spec); err != nil {
		return 0, nil, err
	}
	if err := spec.Normalize(); err != nil {
		return 0, nil, err
	}
	e := callerOf(r.Context()).audit("cell.put")
	e.Cell, e.Detail = id, detail(spec)
	c, err := s.store.PutCell(r.Context(), id, spec, e)
	if err != nil {
		return 0, nil, err
	}
	// Edges learn of it now; if this read fails, with the next synchronisation.
	if err := s.fleet.refresh(r.Context()); err != nil {
		s.log.Warn("cells not read back", "err", err)
	}
	return http.StatusOK, c, nil
}

func (s *Server) getMembers(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, api.MemberList{Members: s.members.list()}, nil
}

// pageOf returns a list that is never null, and where the next page begins: 0 when this
// one was not full.
func pageOf[T any](list []T, limit int, number func(*T) int64) (page []T, next int64) {
	if list == nil {
		list = []T{}
	}
	if len(list) == limit {
		next = number(&list[len(list)-1])
	}
	return list, next
}

// paging reads where a numbered page begins and how long it is.
func paging(q map[string]string) (after int64, limit int, err error) {
	if after, err = number(q["after"], "after", 1<<62); err != nil {
		return 0, 0, err
	}
	n, err := number(q["limit"], "limit", api.MaxPage)
	if err != nil {
		return 0, 0, err
	}
	if n == 0 {
		n = api.DefaultPage
	}
	return after, int(n), nil
}

func (s *Server) getAudit(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "after", "limit", "tenant")
	if err != nil {
		return 0, nil, err
	}
	f := AuditFilter{Tenant: cells.TenantID(q["tenant"])}
	if f.After, f.Limit, err = paging(q); err != nil {
		return 0, nil, err
	}
	list, err := s.store.Audit(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	var out api.AuditList
	out.Entries, out.Next = pageOf(list, f.Limit, func(e *api.AuditEntry) int64 { return e.Seq })
	return http.StatusOK, out, nil
}
