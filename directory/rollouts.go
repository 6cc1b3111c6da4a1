// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// rollouts drives rollouts.
type rollouts struct {
	*drivers[api.RolloutID]
	driver rollout.Driver

	seenMu sync.Mutex
	seen   map[api.RolloutID]api.Rollout // guarded by seenMu; those driven here, as last read
}

func newRollouts(s *Server) *rollouts {
	p := &rollouts{drivers: newDrivers[api.RolloutID](s, "rollout"), seen: map[api.RolloutID]api.Rollout{}}
	p.beats, p.beat, p.take = s.store.RolloutBeats, s.store.BeatRollouts, s.store.TakeRollout
	p.taken = func(ctx context.Context, id api.RolloutID) error { return p.hook(ctx, rollout.StepTaken, id) }
	p.driver = rollout.Driver{
		Store: noting{s.store, p}, Tenants: rolloutTenants{s}, Versions: rolloutVersions{s}, Totals: s.totals, Now: s.cfg.Now, Name: s.instance,
		// An edge's report or a heartbeat, and the writing of it.
		Lag: vitalsReport + s.cfg.HeartbeatEvery + vitalsEvery,
		Audit: func(action string, r *api.Rollout) api.AuditEntry {
			by := "directory/" + s.cfg.Name
			return api.AuditEntry{At: time.Now().UTC(), Peer: by, Actor: by, RequestID: string(r.ID), Action: action,
				Detail: detail(map[string]any{"rollout": r.ID, "state": r.State, "wave": r.Wave, "paused": r.Paused, "reason": r.Reason, "campaign": r.Campaign})}
		},
		Hook: p.hook,
	}
	p.step = func(ctx context.Context, id api.RolloutID) (time.Duration, bool, error) {
		wait, err := p.driver.Step(ctx, id)
		return wait, errors.Is(err, rollout.ErrNotDriver), err
	}
	p.ended = func(id api.RolloutID) {
		p.seenMu.Lock()
		defer p.seenMu.Unlock()
		delete(p.seen, id)
	}
	return p
}

func (p *rollouts) hook(ctx context.Context, step string, id api.RolloutID) error {
	p.s.metrics.rolloutSteps.WithLabelValues(step).Inc()
	if p.s.cfg.RolloutHook == nil {
		return nil
	}
	if err := p.s.cfg.RolloutHook(ctx, step, id); err != nil {
		return &hookError{err}
	}
	return nil
}

// driven returns the rollouts that are driven here.
func (p *rollouts) driven() []api.Rollout {
	p.seenMu.Lock()
	defer p.seenMu.Unlock()
	var out []api.Rollout
	for _, r := range p.seen {
		out = append(out, r)
	}
	return out
}

// noting is the store for the driver; what it reads and writes is remembered for
// metrics, and logged when the state has changed.
type noting struct {
	Store
	p *rollouts
}

func (n noting) Rollout(ctx context.Context, id api.RolloutID) (api.Rollout, error) {
	r, err := n.Store.Rollout(ctx, id)
	if err == nil && r.Driver == n.p.s.instance {
		n.note(&r)
	}
	return r, err
}

func (n noting) UpdateRollout(ctx context.Context, id api.RolloutID, fn func(*api.Rollout) error, audit *api.AuditEntry) (api.Rollout, error) {
	r, err := n.Store.UpdateRollout(ctx, id, fn, audit)
	if err == nil {
		n.note(&r)
	}
	return r, err
}

func (n noting) note(r *api.Rollout) {
	n.p.seenMu.Lock()
	old, ok := n.p.seen[r.ID]
	n.p.seen[r.ID] = *r
	n.p.seenMu.Unlock()
	if ok && old.State == r.State && old.Wave == r.Wave && old.Paused == r.Paused {
		return
	}
	log := n.p.s.log.Info
	if r.State == api.RolloutReturning || r.State == api.RolloutHalted || r.Paused {
		log = n.p.s.log.Warn
	}
	log("rollout", "rollout", r.ID, "state", r.State, "wave", r.Wave, "of", len(r.Waves), "paused", r.Paused, "reason", r.Reason)
	if ok && r.State.Final() && !old.State.Final() {
		n.p.s.metrics.rolloutsEnded.WithLabelValues(string(r.State)).Inc()
	}
}

// rolloutVersions gives cells versions through their specs.
type rolloutVersions struct{ s *Server }

// rolloutActor is who changes what a rollout changes.
const rolloutActor = "rollout"

// SetVersion implements [rollout.Versions].
func (v rolloutVersions) SetVersion(ctx context.Context, cell cells.CellID, version string) error {
	_, err := v.s.upgradeCell(ctx, cell, api.UpgradeRequest{Version: version, Actor: rolloutActor})
	if a := cells.AnswerOf(err); a != nil {
		switch a.Code {
		case cells.CodeNotFound, cells.CodeConflict, cells.CodeBadRequest:
			return errors.Join(cells.ErrInvalid, err)
		}
	}
	return err
}

// CellVersion implements [rollout.Versions].
func (v rolloutVersions) CellVersion(ctx context.Context, cell cells.CellID) (version string, ready, total int, err error) {
	rec, err := v.s.provisioned(ctx, cell)
	if a := cells.AnswerOf(err); a != nil && a.Code == cells.CodeNotFound {
		return "", 0, 0, errors.Join(cells.ErrNotFound, err)
	}
	if err != nil {
		return "", 0, 0, err
	}
	st := &rec.Status
	if rec.Spec.Desired == provision.DesiredServing && st.Reached(&rec.Spec) {
		version = st.Version
	}
	return version, st.Updated, rec.Spec.Replicas, nil
}
