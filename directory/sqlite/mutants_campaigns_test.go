// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"runtime"
	"time"

	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

func (m *mutant) CreateCampaign(ctx context.Context, c api.Campaign, items []api.PlannedItem, a api.AuditEntry) (api.Campaign, bool, error) {
	if m.is("campaigns are made again") {
		c.OperationID = ""
	}
	return m.Store.CreateCampaign(ctx, c, items, a)
}

func (m *mutant) UpdateItem(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, a *api.AuditEntry,
) (api.CampaignItem, error) {
	if m.is("items are read before") {
		list, err := m.CampaignItems(ctx, directory.ItemFilter{Campaign: id, After: pos - 1, Limit: 1})
		if err != nil {
			return api.CampaignItem{}, err
		}
		if len(list) == 1 && list[0].Pos == pos {
			it := list[0]
			if err := fn(&it); err != nil {
				return it, err
			}
			runtime.Gosched()
			fn = func(x *api.CampaignItem) error { *x = it; return nil }
		}
	}
	return m.Store.UpdateItem(ctx, id, pos, fn, also, a)
}

func (m *mutant) ReplaceItems(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, items []api.PlannedItem, a api.AuditEntry) (api.Campaign, error) {
	if m.is("edits keep what was planned") {
		items = nil
	}
	return m.Store.ReplaceItems(ctx, id, fn, items, a)
}

func (m *mutant) TakeCampaign(ctx context.Context, seen directory.CampaignBeat, driver string) (bool, error) {
	if m.is("campaigns are taken from the living") {
		now, err := m.CampaignBeats(ctx)
		if err != nil {
			return false, err
		}
		for _, b := range now {
			if b.ID == seen.ID {
				seen = b
			}
		}
	}
	return m.Store.TakeCampaign(ctx, seen, driver)
}

func (m *mutant) SaveMeasures(ctx context.Context, list []directory.Measurement) error {
	if m.is("measures are the last") {
		for i := range list {
			list[i].At = time.Now()
		}
	}
	return m.Store.SaveMeasures(ctx, list)
}

func (m *mutant) UpdateUnmoved(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, a *api.AuditEntry,
) (api.CampaignItem, error) {
	if m.is("results look at no moves") {
		return m.Store.UpdateItem(ctx, id, pos, fn, also, a)
	}
	return m.Store.UpdateUnmoved(ctx, id, pos, fn, also, a)
}
