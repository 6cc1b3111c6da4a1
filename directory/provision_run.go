// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
)

// Steps of a drain at which Config.CampaignHook is called, each after it was persisted.
const (
	DrainStepPlanned = "drain.planned" // the campaign is stored, the record does not name it
	DrainStepRunning = "drain.running" // the campaign runs, the record does not name it
)

// specs looks after cells that are provisioned: it has drained ones emptied, and
// tells provisioners of changes.
type specs struct {
	s       *Server
	now     chan struct{}
	changed broadcast
}

func newSpecs(s *Server) *specs { return &specs{s: s, now: make(chan struct{}, 1)} }

func (p *specs) kick() {
	select {
	case p.now <- struct{}{}:
	default:
	}
}

// loop has drained cells emptied. All of it follows from the records, and each step
// may be repeated, also by two directories at once: the campaign of a drain has an
// operation id that follows from the record.
func (p *specs) loop(ctx context.Context) {
	every := time.NewTicker(p.s.cfg.SweepEvery)
	defer every.Stop()
	for {
		list, _, err := p.s.store.Provisioned(ctx)
		for i := range list {
			if err == nil {
				err = errors.Join(p.settle(ctx, &list[i]), p.drain(ctx, &list[i]))
			}
		}
		var stopped *hookError
		if errors.As(err, &stopped) {
			<-ctx.Done()
			return
		}
		if err != nil && ctx.Err() == nil {
			p.s.log.Warn("provisioned cells not looked after", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.now:
		case <-every.C:
		}
	}
}

// drain plans and runs the campaign of a drained cell that has tenants and no
// campaign yet.
func (p *specs) drain(ctx context.Context, rec *provision.Record) error {
	cell := rec.Spec.Cell
	if rec.Spec.Desired != provision.DesiredDrained || rec.Campaign != "" {
		return nil
	}
	if c, ok := p.s.fleet.cell(cell); !ok || c.Tenants == 0 {
		return nil
	}
	var o api.DrainRequest
	if len(rec.DrainOptions) > 0 {
		if err := json.Unmarshal(rec.DrainOptions, &o); err != nil {
			return fmt.Errorf("%w: options of the drain of %s: %w", cells.ErrInvalid, cell, err)
		}
	}
	if err := o.Normalize(); err != nil {
		return err
	}
	req := api.CampaignRequest{Name: "drain of " + string(cell), Settings: o.Settings, Actor: o.Actor,
		Policy:      &api.PolicySpec{Kind: api.PolicyDrain, Drain: []cells.CellID{cell}, Cells: o.Into},
		OperationID: fmt.Sprintf("drain.%s.%d", cell, rec.Drains)}
	ctx, cancel := context.WithTimeout(ctx, planTime)
	defer cancel()
	c, items, err := p.s.plan(ctx, &req)
	if err != nil {
		return fmt.Errorf("drain of %s: %w", cell, err)
	}
	now := time.Now().UTC()
	who := caller{peer: p.s.instance, actor: o.Actor, request: req.OperationID}
	c.ID, c.RequestID, c.CreatedAt, c.UpdatedAt = api.CampaignID("cp-"+rand.Text()[:13]), who.request, now, now
	e := who.audit("campaign.plan")
	e.Cell, e.Detail = cell, detail(map[string]any{"campaign": c.ID, "name": c.Name, "moves": len(items), "policy": c.Policy, "settings": c.Settings})
	camp, _, err := p.s.store.CreateCampaign(ctx, c, items, e)
	if err != nil {
		return err
	}
	if err := p.s.camps.hook(ctx, DrainStepPlanned, camp.ID, 0); err != nil {
		return err
	}
	e = who.audit("campaign.run")
	e.Cell, e.Detail = cell, detail(map[string]any{"campaign": camp.ID})
	_, err = p.s.store.UpdateCampaign(ctx, camp.ID, func(c *api.Campaign) error {
		if c.State != api.CampaignPlanned {
			return errNoChange // by the one who was here before, or an operator has decided otherwise
		}
		c.UpdatedAt = now
		return runCampaign(c, &api.CampaignOrder{Actor: o.Actor})
	}, &e)
	if err != nil && !errors.Is(err, errNoChange) {
		return err
	}
	if err := p.s.camps.hook(ctx, DrainStepRunning, camp.ID, 0); err != nil {
		return err
	}
	p.s.camps.kick()
	drains := rec.Drains
	_, err = p.s.store.UpdateProvisioned(ctx, cell, func(ch *ProvisionChange) error {
		if ch.Record.Spec.Desired == provision.DesiredDrained && ch.Record.Drains == drains {
			ch.Record.Campaign = string(camp.ID)
		}
		return nil
	}, nil)
	return err
}

// presentCell adds to a record what is made when it is read.
func (s *Server) presentCell(ctx context.Context, rec provision.Record) (api.Provisioned, error) {
	if rec.Status.Cell == "" {
		rec.Status.Cell, rec.Status.Phase = rec.Spec.Cell, provision.PhasePending
	}
	out := api.Provisioned{Record: rec}
	list, _, err := s.store.Cells(ctx)
	if err != nil {
		return out, err
	}
	for i := range list {
		if list[i].ID == rec.Spec.Cell {
			out.Cell = &list[i]
		}
	}
	if rec.Campaign != "" {
		c, err := s.store.Campaign(ctx, api.CampaignID(rec.Campaign))
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			return out, err
		}
		if err == nil {
			c = s.present(ctx, c)
			out.Drain = &c
		}
	}
	out.Progress = progressOf(&out, time.Now())
	return out, nil
}

// progressOf says how far a wish is.
func progressOf(p *api.Provisioned, now time.Time) api.ProvisionProgress {
	st, spec := &p.Status, &p.Spec
	out := api.ProvisionProgress{Reached: st.Reached(spec), Total: int64(spec.Replicas), What: "processes"}
	if st.ObservedGeneration == spec.Generation {
		out.Done = int64(st.Updated)
		if !st.Since.IsZero() {
			out.Elapsed = max(now.Sub(st.Since), 0)
		}
	} else {
		out.Waiting = "for the provisioner"
	}
	switch spec.Desired {
	case provision.DesiredDrained:
		out.What = "tenants"
		out.Done, out.Total = 0, 0
		if c := p.Drain; c != nil {
			out.Done, out.Total, out.Waiting = c.Counts.Moved+c.Counts.Already, c.Counts.Total+int64(c.StaysTotal), c.Waiting
			out.Elapsed = 0
			if c.Estimate != nil {
				out.Left = c.Estimate.Left
			}
			if !c.StartedAt.IsZero() {
				end := now
				if !c.FinishedAt.IsZero() {
					end = c.FinishedAt
				}
				out.Elapsed = max(end.Sub(c.StartedAt), 0)
			}
			if c.State.Final() && p.Cell != nil && p.Cell.Tenants > 0 {
				out.Waiting = fmt.Sprintf("%d tenants stay: campaign %s is over (%d failed, %d skipped, %d have nowhere to go); drain again",
					p.Cell.Tenants, c.ID, c.Counts.Failed, c.Counts.Skipped, c.StaysTotal)
			}
		}
		out.Reached = out.Reached && p.Cell != nil && p.Cell.Tenants == 0
	case provision.DesiredRetired:
		out.Total, out.What = int64(st.Replicas), "processes to end"
		out.Done = 0
	}
	if spec.Desired == provision.DesiredServing && out.Done > 0 && out.Done < out.Total {
		out.Left = out.Elapsed / time.Duration(out.Done) * time.Duration(out.Total-out.Done)
	}
	if st.Phase == provision.PhaseFailed && st.ObservedGeneration == spec.Generation {
		out.Waiting = st.Message
	}
	return out
}

// getSpecs gives a provisioner the specs.
func (s *Server) getSpecs(w http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "watch")
	if err != nil {
		return 0, nil, err
	}
	read := func() (api.SpecList, error) {
		list, rev, err := s.store.Provisioned(r.Context())
		if list == nil {
			list = []provision.Record{}
		}
		return api.SpecList{Revision: rev, Records: list}, err
	}
	now, err := read()
	if err != nil || q["watch"] == "" {
		return http.StatusOK, now, err
	}
	out := newLines(w)
	alive := time.NewTicker(min(s.cfg.AliveEvery, s.cfg.SyncEvery))
	defer alive.Stop()
	sent := int64(-1)
	for {
		changed := s.specs.changed.next()
		line := api.SpecLine{Alive: true}
		if now, err = read(); err != nil {
			return 0, nil, nil // the provisioner watches again
		}
		if now.Revision != sent {
			sent = now.Revision
			line = api.SpecLine{Specs: &now}
		}
		if err := out.send(line); err != nil {
			return 0, nil, nil
		}
		select {
		case <-changed:
		case <-alive.C:
		case <-r.Context().Done():
			return 0, nil, nil
		case <-s.ctx.Done():
			return 0, nil, nil
		}
	}
}

// getLiving tells a provisioner which processes of a cell are heard.
func (s *Server) getLiving(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "cell")
	if err != nil {
		return 0, nil, err
	}
	cell := cells.CellID(q["cell"])
	if err := cell.Validate(); err != nil {
		return 0, nil, err
	}
	out := api.LivingList{Processes: []provision.Live{}}
	for _, m := range s.members.list() {
		if m.Cell == cell && m.Live && !m.Replaced {
			out.Processes = append(out.Processes, provision.Live{Cell: m.Cell, Instance: m.Instance, Version: m.Version, PID: m.PID,
				ServiceURL: m.ServiceURL, Ready: m.Ready, Reason: m.Reason})
		}
	}
	return http.StatusOK, out, nil
}

// postStatus takes what a provisioner says of a cell.
func (s *Server) postStatus(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var st provision.Status
	// A newer provisioner may say more than this directory knows.
	if err := decodeJSON(w, r, &st, false); err != nil {
		return 0, nil, err
	}
	if err := st.Cell.Validate(); err != nil {
		return 0, nil, err
	}
	if !st.Phase.Valid() || st.Replicas < 0 || st.Ready < 0 || st.Updated < 0 || st.ObservedGeneration < 0 {
		return 0, nil, bad("the status is malformed: %+v", st)
	}
	st.Message, st.Version = clip(st.Message, provision.MaxMessage), clip(st.Version, provision.VersionLabel)
	now := time.Now().UTC()
	rec, err := s.store.UpdateProvisioned(r.Context(), st.Cell, func(ch *ProvisionChange) error {
		if !ch.Exists {
			return notProvisioned(st.Cell)
		}
		rec := &ch.Record
		if st.ObservedGeneration < rec.Status.ObservedGeneration || st.ObservedGeneration > rec.Spec.Generation {
			return errNoChange // overtaken, or of a store that was restored since
		}
		next := st
		next.At, next.Since = now, rec.Status.Since
		if next.Phase != rec.Status.Phase || next.ObservedGeneration != rec.Status.ObservedGeneration || next.Since.IsZero() {
			next.Since = now
		}
		rec.Status = next
		return nil
	}, nil)
	if errors.Is(err, errNoChange) {
		return http.StatusOK, struct{}{}, nil
	}
	if err == nil {
		err = s.specs.settle(r.Context(), &rec)
	}
	return http.StatusOK, struct{}{}, err
}

// settle makes of a status what it means for the cell: with its first process it
// serves, and with its last it is forgotten.
func (p *specs) settle(ctx context.Context, rec *provision.Record) error {
	cell, due := rec.Spec.Cell, ""
	if c, ok := p.s.fleet.cell(cell); ok {
		due = dueOf(rec, &c)
	}
	if due == "" {
		return nil
	}
	e := caller{peer: p.s.instance, actor: rec.Actor}.audit("cell." + due)
	e.Cell, e.Detail = cell, detail(map[string]any{"generation": rec.Spec.Generation, "phase": rec.Status.Phase})
	_, err := p.s.store.UpdateProvisioned(ctx, cell, func(ch *ProvisionChange) error {
		if ch.Cell == nil || dueOf(&ch.Record, ch.Cell) != due {
			return nil
		}
		if due == "retired" {
			ch.Cell = nil
		} else {
			ch.Cell.State = api.CellServing
		}
		return nil
	}, &e)
	if err == nil {
		p.s.log.Info("a provisioner has changed a cell", "cell", cell, "now", due)
		p.s.provisionChanged(ctx)
	}
	return err
}

// dueOf says what a record makes of its cell: "serving", "retired" or nothing new.
func dueOf(rec *provision.Record, c *api.Cell) string {
	st := &rec.Status
	switch {
	case st.ObservedGeneration != rec.Spec.Generation:
	case rec.Spec.Desired == provision.DesiredServing && c.State == api.CellAttaching && st.Ready > 0:
		return "serving"
	case rec.Spec.Desired == provision.DesiredRetired && st.Phase == provision.PhaseRetired:
		return "retired"
	}
	return ""
}
