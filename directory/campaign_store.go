// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// CampaignFilter selects campaigns, newest first.
type CampaignFilter struct {
	State api.CampaignState // "" is all
	// After is the Seq of the last record of the page before; 0 starts at the newest.
	After int64
	// Limit; 0 means api.DefaultPage.
	Limit int
}

// ItemFilter selects items of a campaign, in order of their numbers.
type ItemFilter struct {
	Campaign api.CampaignID
	State    api.ItemState // "" is all
	// After is the Pos of the last item of the page before, 0 starts at the first:
	// items are numbered from 1.
	After int64
	// Limit; 0 means api.DefaultPage.
	Limit int
}

// Measurement is how large a tenant is.
type Measurement struct {
	Tenant      cells.TenantID
	Rows, Bytes int64
	At          time.Time
}

// CampaignStore keeps campaigns and what policies know of tenants; it is a part of
// [Store], whose rules for errors and audit entries hold.
type CampaignStore interface {
	// CreateCampaign records a campaign in state PLANNED with its items, which are
	// numbered from 1 and PENDING. A repeated operation id answers the first record and
	// created false.
	CreateCampaign(ctx context.Context, c api.Campaign, items []api.PlannedItem, audit api.AuditEntry) (rec api.Campaign, created bool, err error)
	// Campaign returns a record. ErrNotFound.
	Campaign(ctx context.Context, id api.CampaignID) (api.Campaign, error)
	// Campaigns lists records.
	Campaigns(ctx context.Context, f CampaignFilter) ([]api.Campaign, error)
	// CampaignItems lists items.
	CampaignItems(ctx context.Context, f ItemFilter) ([]api.CampaignItem, error)
	// UpdateCampaign changes a record by fn, alone among all writers, and raises its
	// Version. fn must be pure: it may run more than once. An error of fn is returned
	// and changes nothing. ID, Seq, Counts, Rows, Bytes and NextPos cannot be changed;
	// Driver can only be given up (""). A nil audit writes none.
	UpdateCampaign(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, audit *api.AuditEntry) (api.Campaign, error)
	// ReplaceItems does as UpdateCampaign, and puts items in the place of those that
	// are PENDING, under new numbers.
	ReplaceItems(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, items []api.PlannedItem, audit api.AuditEntry) (api.Campaign, error)
	// UpdateItem changes an item by fn, and the campaign's record by also unless it is
	// nil, in one transaction, and keeps the counts. fn and also must be pure; an
	// error of one is returned and changes nothing. Pos, Tenant, From and To cannot be
	// changed. ErrNotFound.
	UpdateItem(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error, also func(*api.Campaign, *api.CampaignItem) error, audit *api.AuditEntry) (api.CampaignItem, error)
	// UpdateUnmoved does as UpdateItem, and refuses with ErrConflict when the item's
	// move is recorded: so an item never gets a result that its move does not have.
	UpdateUnmoved(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error, also func(*api.Campaign, *api.CampaignItem) error, audit *api.AuditEntry) (api.CampaignItem, error)
	// MoveItems gives every item in one of the states another state and reason, and
	// reports how many there were.
	MoveItems(ctx context.Context, id api.CampaignID, from []api.ItemState, to api.ItemState, reason string) (int64, error)

	// CampaignBeats returns the drivers of all campaigns for which there is something
	// to do.
	CampaignBeats(ctx context.Context) ([]CampaignBeat, error)
	// BeatCampaigns raises the beats of the campaigns that driver drives.
	BeatCampaigns(ctx context.Context, driver string) error
	// TakeCampaign makes driver the driver of the campaign if its beat is still seen;
	// it reports whether it did.
	TakeCampaign(ctx context.Context, seen CampaignBeat, driver string) (bool, error)

	// Facts lists what is known of tenants, in their order.
	Facts(ctx context.Context, after cells.TenantID, limit int) ([]api.TenantFacts, error)
	// TenantFacts returns what is known of one; zero but for its name when that is
	// nothing.
	TenantFacts(ctx context.Context, t cells.TenantID) (api.TenantFacts, error)
	// SetAttributes sets a tenant's group and jurisdiction.
	SetAttributes(ctx context.Context, t cells.TenantID, group, jurisdiction string, audit api.AuditEntry) (api.TenantFacts, error)
	// SaveMeasures records measures; one that is older than the recorded one changes
	// nothing.
	SaveMeasures(ctx context.Context, list []Measurement) error
}
