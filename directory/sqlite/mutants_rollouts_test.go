// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

func (m *mutant) CreateRollout(ctx context.Context, r api.Rollout, units []api.RolloutUnit, a api.AuditEntry) (api.Rollout, bool, error) {
	if m.is("rollouts are made again") {
		r.OperationID = ""
	}
	if m.is("rollouts hold no cells") {
		r.Old, r.New = nil, nil
	}
	return m.Store.CreateRollout(ctx, r, units, a)
}

func (m *mutant) ChangeUnits(ctx context.Context, id api.RolloutID, at time.Time, list []rollout.UnitChange) (int64, error) {
	n, err := m.Store.ChangeUnits(ctx, id, at, list)
	if m.is("units become anything") {
		n = int64(len(list))
	}
	return n, err
}

func (m *mutant) AddUnits(ctx context.Context, id api.RolloutID, at time.Time, wave int, units []api.RolloutUnit) (int64, error) {
	if m.is("newcomers come twice") {
		for i := range units {
			units[i].Unit = fmt.Sprintf("%s-%d", units[i].Unit, i)
		}
	}
	return m.Store.AddUnits(ctx, id, at, wave, units)
}

func (m *mutant) TakeRollout(ctx context.Context, seen directory.RolloutBeat, driver string) (bool, error) {
	if m.is("rollouts are taken from the living") {
		now, err := m.RolloutBeats(ctx)
		if err != nil {
			return false, err
		}
		for _, b := range now {
			if b.ID == seen.ID {
				seen = b
			}
		}
	}
	return m.Store.TakeRollout(ctx, seen, driver)
}

func (m *mutant) SaveVitals(ctx context.Context, rows []directory.VitalsRow, at time.Time) error {
	if m.is("counts are added up") {
		for i := range rows {
			rows[i].Source += fmt.Sprint(rows[i].Requests)
		}
	}
	return m.Store.SaveVitals(ctx, rows, at)
}

func (m *mutant) Vitals(ctx context.Context) ([]directory.VitalsTotal, error) {
	list, err := m.Store.Vitals(ctx)
	if m.is("folding forgets") && m.folded {
		list = nil
	}
	return list, err
}

func (m *mutant) FoldVitals(ctx context.Context, before time.Time) error {
	m.folded = true
	return m.Store.FoldVitals(ctx, before)
}
