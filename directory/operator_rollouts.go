// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/rollout"
)

func (s *Server) handleRollouts(handle func(pattern string, h endpoint)) {
	handle("POST "+api.PathRollouts, s.postRollout)
	handle("GET "+api.PathRollouts, s.getRollouts)
	handle("GET "+api.PathRollouts+"/{rollout}", s.getRollout)
	handle("GET "+api.PathRollouts+"/{rollout}/units", s.getRolloutUnits)
	for verb, kind := range map[string]rollout.Kind{"pause": rollout.Pause, "resume": rollout.Resume, "abort": rollout.Abort} {
		handle("POST "+api.PathRollouts+"/{rollout}/"+verb, func(w http.ResponseWriter, r *http.Request) (int, any, error) {
			return s.orderRollout(w, r, kind)
		})
	}
}

func rolloutOf(r *http.Request) (api.RolloutID, error) {
	id := api.RolloutID(r.PathValue("rollout"))
	return id, id.Validate()
}

func unknownRollout(id api.RolloutID, err error) error {
	if errors.Is(err, cells.ErrNotFound) {
		return &cells.Answer{Code: cells.CodeNotFound, Detail: "there is no rollout " + string(id), Err: err}
	}
	return err
}

func (s *Server) postRollout(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.RolloutRequest
	if err := decodeLimited(w, r, &req, 1<<20); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	if err := s.pinned(r.Context()); err != nil && req.Settings.By == api.ByMove {
		return 0, nil, err
	}
	ctx, cancel := longer(w, r)
	defer cancel()
	if req.OperationID != "" {
		// Before it is planned: a retry finds the tenants where its first call has put them.
		first, err := s.store.Rollouts(ctx, RolloutFilter{OperationID: req.OperationID, Limit: 1})
		if err != nil {
			return 0, nil, err
		}
		if len(first) > 0 {
			return s.firstRollout(ctx, &first[0], &req)
		}
	}
	rec, units, err := s.planRollout(ctx, &req)
	if err != nil {
		return 0, nil, err
	}
	if req.DryRun {
		if err := s.store.RolloutHeld(ctx, &rec); err != nil {
			return 0, nil, err
		}
		rec.ID = ""
		return http.StatusOK, api.RolloutPlan{Rollout: rec, Units: units[:min(len(units), api.MaxPage)]}, nil
	}
	who := callerOf(ctx).as(req.Actor)
	rec.RequestID = who.request
	e := who.audit("rollout.start")
	e.Detail = detail(map[string]any{"rollout": rec.ID, "name": rec.Name, "settings": rec.Settings, "old": rec.Old, "new": rec.New, "units": len(units)})
	out, created, err := s.store.CreateRollout(ctx, rec, units, e)
	if err != nil {
		return 0, nil, err
	}
	if !created {
		return s.firstRollout(ctx, &out, &req)
	}
	s.rolls.kick()
	w.Header().Set("Location", api.PathRollouts+"/"+string(out.ID))
	return http.StatusCreated, api.RolloutPlan{Rollout: s.presentRollout(ctx, out)}, nil
}

// firstRollout answers a repeated operation id with what it has started.
func (s *Server) firstRollout(ctx context.Context, first *api.Rollout, req *api.RolloutRequest) (int, any, error) {
	if have := &first.Settings; have.Version != req.Settings.Version || have.By != req.Settings.By || first.Name != req.Name {
		return 0, nil, fmt.Errorf("%w: it has started rollout %s", ErrOperationReused, first.ID)
	}
	s.rolls.kick()
	return http.StatusOK, api.RolloutPlan{Rollout: s.presentRollout(ctx, *first)}, nil
}

// planRollout makes the record of a rollout that is to be started, and its units.
func (s *Server) planRollout(ctx context.Context, req *api.RolloutRequest) (api.Rollout, []api.RolloutUnit, error) {
	rec := api.Rollout{ID: api.RolloutID("ro-" + rand.Text()[:13]), Name: req.Name, Settings: req.Settings, Actor: req.Actor, OperationID: req.OperationID, CreatedAt: s.cfg.Now().UTC()}
	units, err := s.unitsOf(ctx, &rec)
	if err != nil {
		return rec, nil, err
	}
	if len(units) == 0 {
		return rec, nil, conflict("there is nothing to do: no %s has version %s", map[string]string{api.ByMove: "tenant's cell", api.ByUpgrade: "cell"}[rec.Settings.By], rec.Settings.From)
	}
	if err := bounded(len(units)); err != nil {
		return rec, nil, err
	}
	for _, c := range rec.Settings.Canary {
		if !slices.ContainsFunc(units, func(u api.RolloutUnit) bool { return u.Unit == c }) {
			return rec, nil, bad("canary %s is not among what has version %s", c, rec.Settings.From)
		}
	}
	units, rec.Waves = rollout.Waves(&rec.Settings, units)
	t, err := s.totals(ctx)
	if err != nil {
		return rec, nil, err
	}
	rec, err = rollout.Next(rec, rollout.Event{Kind: rollout.Start, At: rec.CreatedAt, Actor: req.Actor, Totals: t})
	return rec, units, err
}

// unitsOf finds the cells of a rollout and its units, and fills in the old version.
func (s *Server) unitsOf(ctx context.Context, rec *api.Rollout) ([]api.RolloutUnit, error) {
	list, _, err := s.store.Cells(ctx)
	if err != nil {
		return nil, err
	}
	set := &rec.Settings
	others := map[string]bool{}
	for i := range list {
		if v := list[i].Version; v != set.Version && list[i].State == api.CellServing {
			others[v] = true
		}
	}
	if set.From == "" {
		if len(others) != 1 {
			if len(others) == 0 {
				return nil, bad("no cell that serves has another version than %s: there is nothing to go from", set.Version)
			}
			names := []string{}
			for v := range others {
				names = append(names, strconv.Quote(v))
			}
			slices.Sort(names)
			return nil, bad("cells have %d other versions (%s): say from which to go", len(others), strings.Join(names, ", "))
		}
		for v := range others {
			set.From = v
		}
	}
	open := false
	for i := range list {
		c := &list[i]
		switch {
		case c.State != api.CellServing:
		case c.Version == set.From:
			rec.Old = append(rec.Old, c.ID)
		case c.Version == set.Version && set.By == api.ByMove:
			rec.New = append(rec.New, c.ID)
			open = open || c.Open()
		}
	}
	if set.By == api.ByMove {
		if !open {
			return nil, conflict("no cell with version %s takes tenants: provision one first", set.Version)
		}
		return s.tenantsOf(ctx, rec.Old)
	}
	return s.cellUnits(ctx, rec)
}

// cellUnits are the units of a rollout by upgrade: all of them must be provisioned.
func (s *Server) cellUnits(ctx context.Context, rec *api.Rollout) ([]api.RolloutUnit, error) {
	if _, err := s.version(ctx, rec.Settings.Version); err != nil {
		return nil, err
	}
	if _, err := s.version(ctx, rec.Settings.From); err != nil {
		return nil, fmt.Errorf("the version to return to: %w", err)
	}
	have, _, err := s.store.Provisioned(ctx)
	if err != nil {
		return nil, err
	}
	var units []api.RolloutUnit
	for _, id := range rec.Old {
		i := slices.IndexFunc(have, func(p provision.Record) bool { return p.Spec.Cell == id })
		if i < 0 || have[i].Spec.Desired != provision.DesiredServing {
			return nil, conflict("cell %s has version %s and is not provisioned to serve: it cannot be upgraded", id, rec.Settings.From)
		}
		units = append(units, api.RolloutUnit{Unit: string(id), Home: have[i].Spec.Version})
	}
	return units, nil
}

func (s *Server) getRollouts(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "state", "after", "limit")
	if err != nil {
		return 0, nil, err
	}
	f := RolloutFilter{State: api.RolloutState(q["state"])}
	if f.State != "" && !f.State.Valid() {
		return 0, nil, bad("unknown state %q", f.State)
	}
	if f.After, f.Limit, err = paging(q); err != nil {
		return 0, nil, err
	}
	list, err := s.store.Rollouts(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	var out api.RolloutList
	out.Rollouts, out.Next = pageOf(list, f.Limit, func(c *api.Rollout) int64 { return c.Seq })
	return http.StatusOK, out, nil
}

func (s *Server) getRollout(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := rolloutOf(r)
	if err != nil {
		return 0, nil, err
	}
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	rec, err := s.store.Rollout(r.Context(), id)
	if err != nil {
		return 0, nil, unknownRollout(id, err)
	}
	return http.StatusOK, s.presentRollout(r.Context(), rec), nil
}

func (s *Server) getRolloutUnits(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := rolloutOf(r)
	if err != nil {
		return 0, nil, err
	}
	q, err := query(r, "state", "wave", "after", "limit")
	if err != nil {
		return 0, nil, err
	}
	f := rollout.UnitFilter{Rollout: id}
	if v := api.UnitState(q["state"]); v != "" {
		if !v.Valid() {
			return 0, nil, bad("unknown state %q", v)
		}
		f.States = []api.UnitState{v}
	}
	wave, err := number(q["wave"], "wave", api.MaxWaves)
	if err != nil {
		return 0, nil, err
	}
	f.Wave = int(wave)
	if f.After, f.Limit, err = paging(q); err != nil {
		return 0, nil, err
	}
	if _, err := s.store.Rollout(r.Context(), id); err != nil {
		return 0, nil, unknownRollout(id, err)
	}
	list, err := s.store.RolloutUnits(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	var out api.RolloutUnits
	out.Units, out.Next = pageOf(list, f.Limit, func(u *api.RolloutUnit) int64 { return u.Pos })
	return http.StatusOK, out, nil
}

// orderRollout takes a pause, resume or abort. One that has taken effect before
// changes nothing.
func (s *Server) orderRollout(w http.ResponseWriter, r *http.Request, kind rollout.Kind) (int, any, error) {
	id, err := rolloutOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.RolloutOrder
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	e := callerOf(ctx).as(req.Actor).audit("rollout." + string(kind))
	e.Detail = detail(map[string]any{"rollout": id, "order": req})
	ev := rollout.Event{Kind: kind, At: s.cfg.Now().UTC(), Actor: req.Actor, Reason: req.Reason, Keep: req.Keep}
	rec, err := rollout.Order(ctx, s.store, id, ev, req.Skip, &e)
	switch {
	case errors.Is(err, rollout.ErrNoChange):
	case errors.Is(err, rollout.ErrRefused):
		return 0, nil, conflict("%s", strings.TrimPrefix(err.Error(), rollout.ErrRefused.Error()+": "))
	case err != nil:
		return 0, nil, unknownRollout(id, err)
	}
	s.rolls.kick()
	return http.StatusOK, s.presentRollout(ctx, rec), nil
}

// presentRollout adds to a record what is made when it is read.
func (s *Server) presentRollout(ctx context.Context, r api.Rollout) api.Rollout {
	if r.Campaign != "" {
		if c, err := s.store.Campaign(ctx, r.Campaign); err == nil {
			r.Moves = &c.Counts
		}
	}
	if r.Window == nil {
		return r
	}
	now := s.cfg.Now().UTC()
	if r.State == api.RolloutBaking {
		r.BakeLeft = max(r.Window.Since.Add(r.Settings.Bake).Sub(now), 0).Round(time.Millisecond)
	}
	t, err := s.totals(ctx)
	if err != nil {
		s.log.Warn("no comparison", "rollout", r.ID, "err", err)
		return r
	}
	r.Now = rollout.Look(&r, t, now)
	return r
}
