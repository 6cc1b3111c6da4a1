// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
)

func (s *Server) handleProvisioning(handle func(pattern string, h endpoint)) {
	handle("GET "+api.PathVersions, s.getVersions)
	handle("PUT "+api.PathVersions+"/{version}", s.putVersion)
	handle("DELETE "+api.PathVersions+"/{version}", s.deleteVersion)
	handle("GET "+api.PathProvisioned, s.getProvisionedList)
	handle("GET "+api.PathProvisioned+"/{cell}", s.getProvisioned)
	handle("PUT "+api.PathProvisioned+"/{cell}", s.putProvisioned)
	handle("POST "+api.PathProvisioned+"/{cell}/upgrade", s.postUpgrade)
	handle("POST "+api.PathProvisioned+"/{cell}/drain", s.postDrain)
	handle("POST "+api.PathProvisioned+"/{cell}/retire", s.postRetire)
}

func (s *Server) getVersions(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	list, err := s.store.Versions(r.Context())
	if list == nil {
		list = []provision.Version{}
	}
	return http.StatusOK, api.VersionList{Versions: list}, err
}

func (s *Server) putVersion(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.VersionRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	v := provision.Version{Name: r.PathValue("version"), Image: req.Image, Command: req.Command, Actor: req.Actor, CreatedAt: time.Now().UTC()}
	if len(v.Command) == 0 {
		v.Command = nil
	}
	if err := v.Validate(); err != nil {
		return 0, nil, err
	}
	e := callerOf(r.Context()).as(req.Actor).audit("version.put")
	e.Detail = detail(v)
	out, err := s.store.PutVersion(r.Context(), v, req.Replace, e)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, out, nil
}

func (s *Server) deleteVersion(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "actor")
	if err != nil {
		return 0, nil, err
	}
	req, name := api.VersionRequest{Actor: q["actor"]}, r.PathValue("version")
	if err := errors.Join(req.Normalize(), provision.CheckVersionName(name)); err != nil {
		return 0, nil, err
	}
	e := callerOf(r.Context()).as(req.Actor).audit("version.remove")
	e.Detail = detail(map[string]string{"version": name})
	err = s.store.RemoveVersion(r.Context(), name, e)
	if errors.Is(err, cells.ErrNotFound) {
		return 0, nil, unknownVersion(name)
	}
	return http.StatusOK, struct{}{}, err
}

func unknownVersion(name string) error {
	return &cells.Answer{Code: cells.CodeNotFound, Detail: fmt.Sprintf("version %s is not in the catalogue; add it with: cell versions add %s", name, name)}
}

func notProvisioned(cell cells.CellID) error {
	return &cells.Answer{Code: cells.CodeNotFound, Cell: cell, Detail: "cell " + string(cell) + " is not provisioned by this directory"}
}

// version looks a version up in the catalogue.
func (s *Server) version(ctx context.Context, name string) (provision.Version, error) {
	if err := provision.CheckVersionName(name); err != nil {
		return provision.Version{}, err
	}
	list, err := s.store.Versions(ctx)
	if err != nil {
		return provision.Version{}, err
	}
	for _, v := range list {
		if v.Name == name {
			return v, nil
		}
	}
	return provision.Version{}, unknownVersion(name)
}

// provisioned returns the record of a cell.
func (s *Server) provisioned(ctx context.Context, cell cells.CellID) (provision.Record, error) {
	list, _, err := s.store.Provisioned(ctx)
	if err != nil {
		return provision.Record{}, err
	}
	for i := range list {
		if list[i].Spec.Cell == cell {
			return list[i], nil
		}
	}
	return provision.Record{}, notProvisioned(cell)
}

// changed tells everybody who waits for specs, and edges of the cells.
func (s *Server) provisionChanged(ctx context.Context) {
	s.specs.changed.wake()
	s.specs.kick()
	if err := s.fleet.refresh(ctx); err != nil {
		s.log.Warn("cells not read back", "err", err)
	}
}

func (s *Server) putProvisioned(w http.ResponseWriter, r *http.Request) (int, any, error) {
	cell, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.ProvisionRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	if req.Image == "" && len(req.Command) == 0 {
		v, err := s.version(ctx, req.Version)
		if err != nil {
			return 0, nil, err
		}
		req.Image, req.Command = v.Image, v.Command
	}
	spec, err := req.Spec(cell)
	if err != nil {
		return 0, nil, err
	}
	if err := s.mayServe(ctx, cell); err != nil {
		return 0, nil, err
	}
	e := callerOf(ctx).as(req.Actor).audit("cell.provision")
	e.Cell, e.Detail = cell, detail(spec)
	rec, err := s.store.UpdateProvisioned(ctx, cell, func(ch *ProvisionChange) error { return wish(ch, spec, &req, e.At) }, &e)
	if err != nil {
		return 0, nil, err
	}
	s.provisionChanged(ctx)
	return s.show(ctx, rec)
}

// wish makes a spec the wish for its cell, and registers the cell.
func wish(ch *ProvisionChange, spec provision.Spec, req *api.ProvisionRequest, now time.Time) error {
	rec := &ch.Record
	old := rec.Spec
	if ch.Exists && old.Desired == provision.DesiredRetired && rec.Status.Phase != provision.PhaseRetired {
		return conflict("cell %s is being retired; a new one of the name can be made once nothing of it is left", spec.Cell)
	}
	if ch.Exists && old.Desired != provision.DesiredRetired && old.Store != spec.Store {
		return conflict("cell %s keeps its tenants in %+v: another store would be an empty one; make another cell and move them", spec.Cell, old.Store)
	}
	if ch.Exists && old.Desired == provision.DesiredRetired {
		*rec = provision.Record{Spec: provision.Spec{Generation: old.Generation}}
	}
	spec.Generation = old.Generation
	if rec.CreatedAt.IsZero() {
		rec.CreatedAt = now
	}
	if !equal(rec.Spec, spec) {
		rec.Spec, rec.Actor, rec.Reason, rec.UpdatedAt = spec, req.Actor, req.Reason, now
		if old.Desired != provision.DesiredServing {
			rec.Campaign, rec.DrainOptions, rec.ForcedBy = "", nil, ""
		}
	}
	if ch.Cell == nil {
		ch.Cell = &api.Cell{ID: spec.Cell, CellSpec: api.CellSpec{State: api.CellAttaching}}
	}
	c := &ch.Cell.CellSpec
	c.Version, c.Jurisdiction, c.Geography, c.Host = spec.Version, spec.Jurisdiction, spec.Geography, spec.Host
	if ch.Exists && old.Desired == provision.DesiredDrained {
		c.Closed = false
	}
	return nil
}

func equal(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && string(x) == string(y)
}

// mayServe refuses to have a cell serve that a campaign still empties.
func (s *Server) mayServe(ctx context.Context, cell cells.CellID) error {
	rec, err := s.provisioned(ctx, cell)
	if cells.AnswerOf(err) != nil || err == nil && rec.Campaign == "" {
		return nil
	}
	if err != nil {
		return err
	}
	c, err := s.store.Campaign(ctx, api.CampaignID(rec.Campaign))
	if errors.Is(err, cells.ErrNotFound) || err == nil && c.State.Final() {
		return nil
	}
	if err != nil {
		return err
	}
	return conflict("campaign %s empties cell %s and is %s; abort it first", c.ID, cell, c.State)
}

func (s *Server) postUpgrade(w http.ResponseWriter, r *http.Request) (int, any, error) {
	cell, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.UpgradeRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	rec, err := s.upgradeCell(r.Context(), cell, req)
	if err != nil {
		return 0, nil, err
	}
	return s.show(r.Context(), rec)
}

// upgradeCell pins a serving cell to another version of the catalogue, or gives it
// another number of processes. Repeating it changes nothing.
func (s *Server) upgradeCell(ctx context.Context, cell cells.CellID, req api.UpgradeRequest) (provision.Record, error) {
	var v provision.Version
	err := req.Normalize()
	if err == nil && req.Version != "" {
		v, err = s.version(ctx, req.Version)
	}
	if err != nil {
		return provision.Record{}, err
	}
	e := callerOf(ctx).as(req.Actor).audit("cell.upgrade")
	e.Cell, e.Detail = cell, detail(req)
	rec, err := s.store.UpdateProvisioned(ctx, cell, func(ch *ProvisionChange) error {
		rec := &ch.Record
		switch {
		case !ch.Exists:
			return notProvisioned(cell)
		case rec.Spec.Desired != provision.DesiredServing:
			return conflict("cell %s is to be %s; only one that serves is upgraded", cell, rec.Spec.Desired)
		}
		next := rec.Spec.Clone()
		if v.Name != "" {
			next.Version, next.Image, next.Command = v.Name, v.Image, v.Command
		}
		if req.Replicas != 0 {
			next.Replicas = req.Replicas
		}
		if err := next.Validate(); err != nil {
			return err
		}
		if equal(next, rec.Spec) {
			return nil
		}
		rec.Spec, rec.Actor, rec.Reason, rec.UpdatedAt = next, req.Actor, req.Reason, e.At
		if ch.Cell != nil {
			ch.Cell.Version = next.Version
		}
		return nil
	}, &e)
	if err == nil {
		s.provisionChanged(ctx)
	}
	return rec, err
}

func (s *Server) postDrain(w http.ResponseWriter, r *http.Request) (int, any, error) {
	cell, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.DrainRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	if err := s.pinned(r.Context()); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	rec, err := s.provisioned(ctx, cell)
	if err != nil {
		return 0, nil, err
	}
	over := rec.Campaign == ""
	if !over {
		c, err := s.store.Campaign(ctx, api.CampaignID(rec.Campaign))
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			return 0, nil, err
		}
		over = err != nil || c.State.Final()
	}
	e := callerOf(ctx).as(req.Actor).audit("cell.drain")
	e.Cell, e.Detail = cell, detail(req)
	was := rec
	rec, err = s.store.UpdateProvisioned(ctx, cell, func(ch *ProvisionChange) error {
		rec := &ch.Record
		switch {
		case !ch.Exists:
			return notProvisioned(cell)
		case rec.Spec.Desired == provision.DesiredRetired:
			return conflict("cell %s is retired, or being retired", cell)
		case ch.Cell == nil:
			return unknownCell(cell)
		case ch.Cell.Default:
			return conflict("cell %s is the default cell: tenants without a route are served there", cell)
		}
		begin := rec.Spec.Desired == provision.DesiredServing
		again := !begin && over && rec.Campaign == was.Campaign && ch.Cell.Tenants > 0
		if begin || again {
			rec.Campaign, rec.DrainOptions = "", detail(req)
			rec.Drains++
			rec.Actor, rec.Reason, rec.UpdatedAt = req.Actor, req.Reason, e.At
		}
		rec.Spec.Desired = provision.DesiredDrained
		ch.Cell.Closed = true
		return nil
	}, &e)
	if err != nil {
		return 0, nil, err
	}
	s.provisionChanged(ctx)
	return s.show(ctx, rec)
}

func (s *Server) getProvisionedList(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	list, _, err := s.store.Provisioned(r.Context())
	if err != nil {
		return 0, nil, err
	}
	out := api.ProvisionedList{Cells: []api.Provisioned{}}
	for i := range list {
		p, err := s.presentCell(r.Context(), list[i])
		if err != nil {
			return 0, nil, err
		}
		out.Cells = append(out.Cells, p)
	}
	return http.StatusOK, out, nil
}

func (s *Server) getProvisioned(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	cell, err := cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	q, err := query(r, "left")
	if err != nil {
		return 0, nil, err
	}
	rec, err := s.provisioned(r.Context(), cell)
	if err != nil {
		return 0, nil, err
	}
	p, err := s.presentCell(r.Context(), rec)
	if err == nil && q["left"] != "" && p.Cell != nil {
		var left api.CellLeft
		left, err = s.left(r.Context(), cell)
		p.Left = &left
	}
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, p, nil
}

func (s *Server) show(ctx context.Context, rec provision.Record) (int, any, error) {
	p, err := s.presentCell(ctx, rec)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, p, nil
}
