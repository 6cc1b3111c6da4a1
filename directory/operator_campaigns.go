// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

func (s *Server) handleCampaigns(handle func(pattern string, h endpoint)) {
	handle("POST "+api.PathCampaigns, s.postCampaign)
	handle("GET "+api.PathCampaigns, s.getCampaigns)
	handle("GET "+api.PathCampaigns+"/{campaign}", s.getCampaign)
	handle("GET "+api.PathCampaigns+"/{campaign}/items", s.getCampaignItems)
	handle("GET "+api.PathCampaigns+"/{campaign}/plan", s.getCampaignPlan)
	handle("PUT "+api.PathCampaigns+"/{campaign}/plan", s.putCampaignPlan)
	for verb, order := range map[string]func(*api.Campaign, *api.CampaignOrder) error{
		"run": runCampaign, "pause": pauseCampaign, "resume": resumeCampaign, "abort": abortCampaign,
	} {
		handle("POST "+api.PathCampaigns+"/{campaign}/"+verb, func(w http.ResponseWriter, r *http.Request) (int, any, error) {
			return s.orderCampaign(w, r, verb, order)
		})
	}
	handle("PUT "+api.PathTenants+"/{tenant}/attributes", s.putAttributes)
	handle("POST "+api.PathMeasures, s.postMeasures)
}

// longer gives a request the time that a plan of a large fleet takes.
func longer(w http.ResponseWriter, r *http.Request) (context.Context, context.CancelFunc) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(planTime + requestTimeout))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), planTime)
	return ctx, cancel
}

func campaignOf(r *http.Request) (api.CampaignID, error) {
	id := api.CampaignID(r.PathValue("campaign"))
	return id, id.Validate()
}

func unknownCampaign(id api.CampaignID, err error) error {
	if errors.Is(err, cells.ErrNotFound) {
		return &cells.Answer{Code: cells.CodeNotFound, Detail: "there is no campaign " + string(id), Err: err}
	}
	return err
}

func (s *Server) postCampaign(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.CampaignRequest
	if err := decodeLimited(w, r, &req, api.MaxPlanBody); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	if err := s.pinned(r.Context()); err != nil {
		return 0, nil, err
	}
	ctx, cancel := longer(w, r)
	defer cancel()
	c, items, err := s.plan(ctx, &req)
	if err != nil {
		return 0, nil, err
	}
	c.ID = api.CampaignID("cp-" + rand.Text()[:13])
	if req.DryRun {
		c.ID = ""
		for _, it := range items {
			c.Rows += it.Rows
			c.Bytes += it.Bytes
		}
		c.Counts.Total, c.Counts.Pending = int64(len(items)), int64(len(items))
		out := api.CampaignPlan{Campaign: s.present(ctx, c)}
		for _, it := range items[:min(len(items), api.MaxPage)] {
			out.Moves = append(out.Moves, it.PlannedMove)
		}
		return http.StatusOK, out, nil
	}
	who := callerOf(ctx).as(req.Actor)
	c.RequestID, c.CreatedAt = who.request, time.Now().UTC()
	c.UpdatedAt = c.CreatedAt
	e := who.audit("campaign.plan")
	e.Detail = detail(map[string]any{"campaign": c.ID, "name": c.Name, "moves": len(items), "policy": c.Policy, "settings": c.Settings})
	rec, created, err := s.store.CreateCampaign(ctx, c, items, e)
	if err != nil {
		return 0, nil, err
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
		w.Header().Set("Location", api.PathCampaigns+"/"+string(rec.ID))
	}
	return status, api.CampaignPlan{Campaign: s.present(ctx, rec)}, nil
}

func (s *Server) getCampaigns(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "state", "after", "limit")
	if err != nil {
		return 0, nil, err
	}
	f := CampaignFilter{State: api.CampaignState(q["state"])}
	if f.State != "" && !f.State.Valid() {
		return 0, nil, bad("unknown state %q", f.State)
	}
	if f.After, f.Limit, err = paging(q); err != nil {
		return 0, nil, err
	}
	list, err := s.store.Campaigns(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	var out api.CampaignList
	out.Campaigns, out.Next = pageOf(list, f.Limit, func(c *api.Campaign) int64 { return c.Seq })
	return http.StatusOK, out, nil
}

func (s *Server) getCampaign(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := campaignOf(r)
	if err != nil {
		return 0, nil, err
	}
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	c, err := s.store.Campaign(r.Context(), id)
	if err != nil {
		return 0, nil, unknownCampaign(id, err)
	}
	return http.StatusOK, s.present(r.Context(), c), nil
}

func (s *Server) getCampaignItems(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := campaignOf(r)
	if err != nil {
		return 0, nil, err
	}
	q, err := query(r, "state", "after", "limit")
	if err != nil {
		return 0, nil, err
	}
	f := ItemFilter{Campaign: id, State: api.ItemState(q["state"])}
	if f.State != "" && !f.State.Valid() {
		return 0, nil, bad("unknown state %q", f.State)
	}
	if f.After, f.Limit, err = paging(q); err != nil {
		return 0, nil, err
	}
	if _, err := s.store.Campaign(r.Context(), id); err != nil {
		return 0, nil, unknownCampaign(id, err)
	}
	list, err := s.store.CampaignItems(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	var out api.CampaignItems
	out.Items, out.Next = pageOf(list, f.Limit, func(i *api.CampaignItem) int64 { return i.Pos })
	return http.StatusOK, out, nil
}

func (s *Server) getCampaignPlan(w http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := campaignOf(r)
	if err != nil {
		return 0, nil, err
	}
	ctx, cancel := longer(w, r)
	defer cancel()
	c, err := s.store.Campaign(ctx, id)
	if err != nil {
		return 0, nil, unknownCampaign(id, err)
	}
	out := api.CampaignFile{Campaign: id, Version: c.Version, Settings: c.Settings, Moves: []api.PlannedMove{}}
	f := ItemFilter{Campaign: id, State: api.ItemPending, Limit: api.MaxPage}
	for {
		list, err := s.store.CampaignItems(ctx, f)
		if err != nil {
			return 0, nil, err
		}
		for i := range list {
			out.Moves = append(out.Moves, api.PlannedMove{Tenant: list[i].Tenant, From: list[i].From, To: list[i].To})
		}
		if len(list) < api.MaxPage {
			return http.StatusOK, out, nil
		}
		f.After = list[len(list)-1].Pos
	}
}

func (s *Server) putCampaignPlan(w http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := campaignOf(r)
	if err != nil {
		return 0, nil, err
	}
	var file api.CampaignFile
	if err := decodeLimited(w, r, &file, api.MaxPlanBody); err != nil {
		return 0, nil, err
	}
	if file.Campaign != id {
		return 0, nil, bad("the plan is of campaign %q, not of %s", file.Campaign, id)
	}
	order := api.CampaignOrder{Actor: file.Actor}
	if err := errors.Join(file.Settings.Normalize(), order.Normalize()); err != nil {
		return 0, nil, err
	}
	ctx, cancel := longer(w, r)
	defer cancel()
	c, err := s.store.Campaign(ctx, id)
	if err != nil {
		return 0, nil, unknownCampaign(id, err)
	}
	fits := func(c *api.Campaign) error {
		switch {
		case !c.Editable():
			return conflict("campaign %s is %s with %d moves under way: only a planned one, or a paused one at rest, is edited", id, c.State, c.Counts.Running)
		case c.Version != file.Version:
			return conflict("campaign %s has changed since version %d; it is at version %d", id, file.Version, c.Version)
		}
		c.Settings, c.UpdatedAt = file.Settings, time.Now().UTC()
		return nil
	}
	if err := fits(&c); err != nil {
		return 0, nil, err
	}
	v, err := s.view(ctx)
	if err != nil {
		return 0, nil, err
	}
	items, err := v.check(ctx, file.Moves)
	if err != nil {
		return 0, nil, err
	}
	e := callerOf(ctx).as(order.Actor).audit("campaign.edit")
	e.Detail = detail(map[string]any{"campaign": id, "moves": len(items), "settings": file.Settings})
	c, err = s.store.ReplaceItems(ctx, id, fits, items, e)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, s.present(ctx, c), nil
}

func conflict(format string, args ...any) error {
	return &cells.Answer{Code: cells.CodeConflict, Detail: fmt.Sprintf(format, args...)}
}

// orderCampaign takes a run, pause, resume or abort. An order that has taken
// effect before changes nothing.
func (s *Server) orderCampaign(w http.ResponseWriter, r *http.Request, verb string, order func(*api.Campaign, *api.CampaignOrder) error) (int, any, error) {
	id, err := campaignOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.CampaignOrder
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	if err := s.pinned(r.Context()); err != nil && verb != "pause" && verb != "abort" {
		return 0, nil, err
	}
	ctx := r.Context()
	e := callerOf(ctx).as(req.Actor).audit("campaign." + verb)
	e.Detail = detail(map[string]any{"campaign": id, "order": req})
	if verb == "resume" && req.Retry {
		c, err := s.store.Campaign(ctx, id)
		if err != nil {
			return 0, nil, unknownCampaign(id, err)
		}
		if err := resumeCampaign(&c, &req); err != nil && !errors.Is(err, errNoChange) {
			return 0, nil, err
		}
		if _, err := s.store.MoveItems(ctx, id, []api.ItemState{api.ItemFailed, api.ItemDeferred}, api.ItemPending, "to be tried again"); err != nil {
			return 0, nil, err
		}
	}
	c, err := s.store.UpdateCampaign(ctx, id, func(c *api.Campaign) error {
		if err := order(c, &req); err != nil {
			return err
		}
		c.UpdatedAt = time.Now().UTC()
		return nil
	}, &e)
	if errors.Is(err, errNoChange) {
		c, err = s.store.Campaign(ctx, id)
	}
	if err != nil {
		return 0, nil, unknownCampaign(id, err)
	}
	s.camps.kick()
	return http.StatusOK, s.present(ctx, c), nil
}

func runCampaign(c *api.Campaign, o *api.CampaignOrder) error {
	switch c.State {
	case api.CampaignRunning:
		return errNoChange
	case api.CampaignPlanned:
		c.State, c.RunBy, c.Reason, c.StartedAt = api.CampaignRunning, o.Actor, "", time.Now().UTC()
		return nil
	case api.CampaignPaused:
		return conflict("campaign %s is paused: resume it", c.ID)
	}
	return conflict("campaign %s is %s", c.ID, c.State)
}

func pauseCampaign(c *api.Campaign, o *api.CampaignOrder) error {
	switch c.State {
	case api.CampaignPaused:
		return errNoChange
	case api.CampaignRunning:
		c.State, c.Reason = api.CampaignPaused, orDefault(o.Reason, "asked for by "+o.Actor)
		return nil
	}
	return conflict("campaign %s is %s and is not paused", c.ID, c.State)
}

func resumeCampaign(c *api.Campaign, o *api.CampaignOrder) error {
	again := o.Retry && (c.State == api.CampaignDone || c.State == api.CampaignRunning)
	switch {
	case c.State == api.CampaignRunning && !again:
		return errNoChange
	case c.State == api.CampaignPaused, again:
		c.State, c.RunBy, c.Reason, c.FinishedAt = api.CampaignRunning, o.Actor, "", time.Time{}
		c.Forgiven = c.Counts.Failed
		return nil
	case c.State == api.CampaignPlanned:
		return conflict("campaign %s was not started: run it", c.ID)
	}
	return conflict("campaign %s is %s and does not go on", c.ID, c.State)
}

func abortCampaign(c *api.Campaign, o *api.CampaignOrder) error {
	switch c.State {
	case api.CampaignAborted:
		return errNoChange
	case api.CampaignAborting:
		if c.Rollback || !o.Rollback {
			return errNoChange
		}
		c.Rollback = true
		return nil
	case api.CampaignDone:
		return conflict("campaign %s is done", c.ID)
	}
	c.State, c.Rollback, c.Reason = api.CampaignAborting, o.Rollback, orDefault(o.Reason, "asked for by "+o.Actor)
	if c.RunBy == "" {
		c.RunBy = o.Actor
	}
	return nil
}

func (s *Server) putAttributes(w http.ResponseWriter, r *http.Request) (int, any, error) {
	tenant, err := tenantOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.AttributesRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	e := callerOf(r.Context()).as(req.Actor).audit("tenant.attributes")
	e.Tenant, e.Detail = tenant, detail(map[string]string{"group": req.Group, "jurisdiction": req.Jurisdiction})
	f, err := s.store.SetAttributes(r.Context(), tenant, req.Group, req.Jurisdiction, e)
	if err != nil {
		return 0, nil, err
	}
	f.Load = s.members.loads()[tenant]
	return http.StatusOK, f, nil
}

// measurer is what agents may offer beside [Agents]: how large a tenant is.
type measurer interface {
	Measure(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (rows, bytes int64, err error)
}

func (s *Server) postMeasures(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.MeasureRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if len(req.Tenants) == 0 || len(req.Tenants) > api.MaxMeasure {
		return 0, nil, bad("%d tenants; 1 to %d are measured at once", len(req.Tenants), api.MaxMeasure)
	}
	for _, t := range req.Tenants {
		if err := t.Validate(); err != nil {
			return 0, nil, badTenant(t, err)
		}
	}
	ctx := r.Context()
	var mu sync.Mutex
	var done []Measurement
	out := api.Measured{Tenants: []api.TenantFacts{}, Failed: map[cells.TenantID]string{}}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, t := range req.Tenants {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			m, err := s.exec.measure(ctx, t)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Failed[t] = err.Error()
				return
			}
			done = append(done, m)
		})
	}
	wg.Wait()
	if err := s.store.SaveMeasures(ctx, done); err != nil {
		return 0, nil, err
	}
	for _, m := range done {
		f, err := s.store.TenantFacts(ctx, m.Tenant)
		if err != nil {
			return 0, nil, err
		}
		out.Tenants = append(out.Tenants, f)
	}
	return http.StatusOK, out, nil
}

// measure asks the tenant's cell how large it is.
func (e *executor) measure(ctx context.Context, t cells.TenantID) (Measurement, error) {
	row, err := e.s.table.Get(ctx, t)
	if err != nil {
		return Measurement{}, err
	}
	if !row.Exists() {
		return Measurement{}, fmt.Errorf("%w: the tenant is %s", cells.ErrNotFound, row.State)
	}
	m := Measurement{Tenant: t, At: time.Now().UTC()}
	switch a := e.agents.(type) {
	case nil:
		return m, fmt.Errorf("%w: the cells keep no rows of their own", cells.ErrNotApplicable)
	case measurer:
		m.Rows, m.Bytes, err = a.Measure(ctx, row.CellID, t)
	default:
		var p cells.Preflight
		p, err = a.Preflight(ctx, cells.MoveRef{ID: "measure", Tenant: t, Source: row.CellID, Target: row.CellID})
		m.Rows, m.Bytes = p.Rows, p.Bytes
	}
	return m, err
}
