// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/directory/sqlite"
)

// broken is a directory whose deployments are wrong in one way.
type broken struct {
	*sqlite.Store
	name string
}

func (b *broken) Deployments() deploy.Store {
	return &brokenStore{b.Store.Deployments(), b.Store, b.name}
}

type brokenStore struct {
	deploy.Store
	dir  *sqlite.Store
	name string
}

func (s *brokenStore) Settle(ctx context.Context, k deploy.Kind, a api.AuditEntry) error {
	err := s.Store.Settle(ctx, k, a)
	if s.name == "kinds change" && errors.Is(err, cells.ErrConflict) {
		return nil
	}
	return err
}

func (s *brokenStore) Change(ctx context.Context, cell cells.CellID, rule deploy.Rule, a api.AuditEntry) (deploy.Cell, error) {
	switch s.name {
	case "changes are read before":
		v, err := s.Read(ctx)
		if err != nil {
			return deploy.Cell{}, err
		}
		ch, err := deploy.Apply(&v, cell, a.At, rule)
		if err != nil {
			return deploy.Cell{}, err
		}
		runtime.Gosched()
		return s.Store.Change(ctx, cell, func(now *deploy.Change) error { now.Cell, now.Place = ch.Cell, ch.Place; return nil }, a)
	case "repeated changes are audited":
		c, err := s.Store.Change(ctx, cell, rule, a)
		if err == nil {
			err = s.dir.AppendAudit(ctx, a)
		}
		return c, err
	case "attach is bound":
		return s.Store.Change(ctx, cell, func(ch *deploy.Change) error {
			err := rule(ch)
			for i := range ch.Place {
				ch.Place[i].Bound = true
			}
			return err
		}, a)
	case "configured tenants are not bound":
		return s.Store.Change(ctx, cell, func(ch *deploy.Change) error {
			err := rule(ch)
			for i := range ch.Place {
				ch.Place[i].Bound = false
			}
			return err
		}, a)
	case "tenants of others are left out":
		c, err := s.Store.Change(ctx, cell, rule, a)
		if errors.Is(err, deploy.ErrPlacedElsewhere) {
			return s.Store.Change(ctx, cell, func(ch *deploy.Change) error { err := rule(ch); ch.Place = nil; return err }, a)
		}
		return c, err
	}
	return s.Store.Change(ctx, cell, rule, a)
}

func (s *brokenStore) Place(ctx context.Context, c deploy.Call, a api.AuditEntry) (deploy.Placement, bool, error) {
	switch s.name {
	case "the gate is asked first":
		v, err := s.Read(ctx)
		if err != nil {
			return deploy.Placement{}, false, err
		}
		if cell := v.Cell(c.Cell); cell == nil {
			return deploy.Placement{}, false, deploy.ErrNoCell
		} else if err := deploy.Judge(cell, &c); err != nil {
			return deploy.Placement{}, false, err
		}
	case "credentials are not looked at":
		c.By = deploy.ByOperator
	case "winners are whoever asks":
		p, created, err := s.Store.Place(ctx, c, a)
		p.Cell = c.Cell
		return p, created, err
	case "everything is new":
		p, _, err := s.Store.Place(ctx, c, a)
		return p, err == nil, err
	}
	return s.Store.Place(ctx, c, a)
}

func (s *brokenStore) Repoint(ctx context.Context, r deploy.Repoint, a api.AuditEntry) (deploy.Placement, error) {
	p, err := s.Store.Repoint(ctx, r, a)
	switch {
	case s.name == "pinned directories pretend" && errors.Is(err, deploy.ErrPinned):
		return deploy.Placement{Tenant: r.Tenant, Cell: r.To}, nil
	case s.name == "moves need no higher epoch" && errors.Is(err, cells.ErrConflict):
		return p, nil
	}
	return p, err
}

func (s *brokenStore) Reserve(ctx context.Context, r deploy.Repoint, a api.AuditEntry) error {
	err := s.Store.Reserve(ctx, r, a)
	switch {
	case s.name == "places are not kept" && err == nil:
		return s.Store.Release(ctx, r.Tenant, r.Move, a)
	case s.name == "full cells have places" && errors.Is(err, deploy.ErrClosed):
		return nil
	}
	return err
}

func (s *brokenStore) Release(ctx context.Context, tenant cells.TenantID, move cells.MoveID, a api.AuditEntry) error {
	switch s.name {
	case "anybody gives places up":
		p, err := s.Placement(ctx, tenant)
		if err != nil {
			return nil
		}
		move = p.MovingBy
	case "places are kept for ever":
		return nil
	}
	return s.Store.Release(ctx, tenant, move, a)
}

func (s *brokenStore) Placements(ctx context.Context, f deploy.PlacementFilter) ([]deploy.Placement, error) {
	if s.name == "pages are of every cell" {
		f.Cell = ""
	}
	return s.Store.Placements(ctx, f)
}

// TestDeploymentsKillMutants runs the suite of deployments against stores that are
// wrong in one way each: the named case, at least, must fail.
func TestDeploymentsKillMutants(t *testing.T) {
	byName := map[string]deploytest.Case{}
	for _, c := range deploytest.Cases() {
		byName[c.Name] = c
	}
	for name, killer := range map[string]string{
		"kinds change":                     "KindIsSettledOnce",
		"changes are read before":          "ChangesAreAlone",
		"repeated changes are audited":     "AuditFollowsChanges",
		"attach is bound":                  "AttachPlacesBeyondTheQuota",
		"configured tenants are not bound": "AttachRefusesTenantsOfOthers",
		"tenants of others are left out":   "AttachRefusesTenantsOfOthers",
		"the gate is asked first":          "PlaceReadsBackWhateverTheCell",
		"credentials are not looked at":    "PlaceGate",
		"winners are whoever asks":         "PlaceOneWinner",
		"everything is new":                "PlaceOneWinner",
		"pinned directories pretend":       "PinnedNeverChanges",
		"moves need no higher epoch":       "MovableFollowsMoves",
		"pages are of every cell":          "PlacementPages",
		"places are not kept":              "MovesHaveTheirPlace",
		"full cells have places":           "MovesHaveTheirPlace",
		"anybody gives places up":          "MovesHaveTheirPlace",
		"places are kept for ever":         "MovesHaveTheirPlace",
	} {
		t.Run(name, func(t *testing.T) {
			c, ok := byName[killer]
			if !ok {
				t.Fatalf("there is no case %s", killer)
			}
			// A race needs not be lost at the first attempt.
			for range 20 {
				path := filepath.Join(t.TempDir(), "directory.db")
				r := &recorder{}
				failures := r.run(directorytest.Case{Run: func(tb directorytest.TB, _ directorytest.Harness) {
					c.Run(tb, deploytest.Harness{Open: func(ctx context.Context) (deploytest.Directory, error) {
						s, err := sqlite.Open(ctx, path)
						return &broken{s, name}, err
					}})
				}}, directorytest.Harness{})
				if len(failures) > 0 {
					return
				}
			}
			t.Errorf("%s passes a store where %s", killer, name)
		})
	}
}

var _ directory.Store = (*broken)(nil)
