// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// budget returns the meter, or why there is none.
func (s *Server) budget() (*cells.BudgetMeter, error) {
	if s.cfg.Budget == nil {
		return nil, &cells.Answer{Code: cells.CodeNotServed, Detail: "this directory keeps no budgets"}
	}
	return s.cfg.Budget, nil
}

func (s *Server) getBudgets(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	meter, err := s.budget()
	if err != nil {
		return 0, nil, err
	}
	list, err := s.store.Limits(r.Context())
	if err != nil {
		return 0, nil, err
	}
	out := api.BudgetList{Window: meter.Window(), Default: api.BudgetLimit{Pause: meter.DefaultLimit()}, Tenants: []api.BudgetLimit{}}
	for _, l := range list {
		if l.Tenant == "" {
			out.Default = l
		} else {
			out.Tenants = append(out.Tenants, l)
		}
	}
	return http.StatusOK, out, nil
}

// budgetTenant reads the path's tenant; "" when the path has none.
func budgetTenant(r *http.Request) (cells.TenantID, error) {
	t := cells.TenantID(r.PathValue("tenant"))
	if t == "" {
		return "", nil
	}
	if err := t.Validate(); err != nil {
		return "", badTenant(t, err)
	}
	return t, nil
}

func (s *Server) getBudget(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	meter, err := s.budget()
	if err != nil {
		return 0, nil, err
	}
	t, err := budgetTenant(r)
	if err != nil {
		return 0, nil, err
	}
	a, err := meter.Account(r.Context(), t)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, a, nil
}

func (s *Server) putBudget(w http.ResponseWriter, r *http.Request) (int, any, error) {
	meter, err := s.budget()
	if err != nil {
		return 0, nil, err
	}
	t, err := budgetTenant(r)
	if err != nil {
		return 0, nil, err
	}
	var spec api.BudgetSpec
	if err := readJSON(w, r, &spec); err != nil {
		return 0, nil, err
	}
	if err := spec.Normalize(meter.Window()); err != nil {
		return 0, nil, err
	}
	l := api.BudgetLimit{Tenant: t, Pause: spec.Pause, Actor: spec.Actor, At: time.Now().UTC().Truncate(time.Microsecond)}
	e := callerOf(r.Context()).as(spec.Actor).audit("budget.put")
	e.Tenant, e.Detail = t, detail(spec)
	if err := s.store.SetLimit(r.Context(), l, e); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, l, nil
}

func (s *Server) deleteBudget(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "actor")
	if err != nil {
		return 0, nil, err
	}
	if _, err := s.budget(); err != nil {
		return 0, nil, err
	}
	t, err := budgetTenant(r)
	if err != nil {
		return 0, nil, err
	}
	spec := api.BudgetSpec{Actor: q["actor"]}
	if err := spec.Normalize(0); err != nil {
		return 0, nil, err
	}
	e := callerOf(r.Context()).as(spec.Actor).audit("budget.delete")
	e.Tenant = t
	if err := s.store.RemoveLimit(r.Context(), t, e); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, struct{}{}, nil
}
