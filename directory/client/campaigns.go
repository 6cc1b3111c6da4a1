// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// planTimeout bounds the making of a plan when the context has no deadline.
const planTimeout = 6 * time.Minute

func patient(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, planTimeout)
}

// PlanCampaign makes and stores a plan; nothing is moved. With DryRun it answers
// the plan and stores nothing. BAD_REQUEST names the moves that do not fit.
func (c *Client) PlanCampaign(ctx context.Context, r api.CampaignRequest) (api.CampaignPlan, error) {
	ctx, cancel := patient(ctx)
	defer cancel()
	var out api.CampaignPlan
	_, err := c.call(ctx, request{method: http.MethodPost, path: api.PathCampaigns, body: r, operation: r.OperationID}, &out)
	if r.DryRun {
		err = changesNothing(err)
	}
	return out, err
}

// CampaignQuery selects a page of campaigns.
type CampaignQuery struct {
	State api.CampaignState
	// After is CampaignList.Next of the page before.
	After int64
	Limit int
}

// Campaigns lists campaigns, newest first.
func (c *Client) Campaigns(ctx context.Context, q CampaignQuery) (api.CampaignList, error) {
	var out api.CampaignList
	v := page(strconv.FormatInt(q.After, 10), q.Limit)
	set(v, "state", string(q.State))
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathCampaigns, query: v}, &out)
	return out, err
}

func campaignPath(id api.CampaignID, rest string) (string, error) {
	return api.PathCampaigns + "/" + url.PathEscape(string(id)) + rest, id.Validate()
}

// Campaign returns a campaign's record; NOT_FOUND when there is none.
func (c *Client) Campaign(ctx context.Context, id api.CampaignID) (api.Campaign, error) {
	var out api.Campaign
	path, err := campaignPath(id, "")
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path}, &out)
	}
	return out, err
}

// ItemQuery selects a page of a campaign's moves.
type ItemQuery struct {
	State api.ItemState
	// After is CampaignItems.Next of the page before.
	After int64
	Limit int
}

// CampaignItems lists a campaign's moves in the plan's order.
func (c *Client) CampaignItems(ctx context.Context, id api.CampaignID, q ItemQuery) (api.CampaignItems, error) {
	var out api.CampaignItems
	v := page(strconv.FormatInt(q.After, 10), q.Limit)
	set(v, "state", string(q.State))
	path, err := campaignPath(id, "/items")
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path, query: v}, &out)
	}
	return out, err
}

// CampaignFile returns the plan as it can be edited: the moves that are not begun.
func (c *Client) CampaignFile(ctx context.Context, id api.CampaignID) (api.CampaignFile, error) {
	ctx, cancel := patient(ctx)
	defer cancel()
	var out api.CampaignFile
	path, err := campaignPath(id, "/plan")
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path}, &out)
	}
	return out, err
}

// EditCampaign puts the file's settings and moves in the place of those that are
// not begun. CONFLICT when the campaign has changed since the file was read or runs;
// BAD_REQUEST names the moves that do not fit.
func (c *Client) EditCampaign(ctx context.Context, f api.CampaignFile) (api.Campaign, error) {
	ctx, cancel := patient(ctx)
	defer cancel()
	var out api.Campaign
	path, err := campaignPath(f.Campaign, "/plan")
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPut, path: path, body: f}, &out)
	}
	return out, err
}

func (c *Client) order(ctx context.Context, id api.CampaignID, verb string, o api.CampaignOrder) (api.Campaign, error) {
	var out api.Campaign
	path, err := campaignPath(id, "/"+verb)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPost, path: path, body: o}, &out)
	}
	return out, err
}

// RunCampaign starts a planned campaign; the directory goes on with it. Repeating
// it is no harm.
func (c *Client) RunCampaign(ctx context.Context, id api.CampaignID, o api.CampaignOrder) (api.Campaign, error) {
	return c.order(ctx, id, "run", o)
}

// PauseCampaign begins no more moves.
func (c *Client) PauseCampaign(ctx context.Context, id api.CampaignID, o api.CampaignOrder) (api.Campaign, error) {
	return c.order(ctx, id, "pause", o)
}

// ResumeCampaign goes on with a paused campaign, or with Retry tries again what
// failed or was deferred, also in one that is done.
func (c *Client) ResumeCampaign(ctx context.Context, id api.CampaignID, o api.CampaignOrder) (api.Campaign, error) {
	return c.order(ctx, id, "resume", o)
}

// AbortCampaign gives a campaign up.
func (c *Client) AbortCampaign(ctx context.Context, id api.CampaignID, o api.CampaignOrder) (api.Campaign, error) {
	return c.order(ctx, id, "abort", o)
}

// WatchCampaign calls f with the record now and whenever it has changed, until it
// is final, or paused with nothing under way. It asks twice a second, so that a
// directory that restarts, or another one behind the same address, does not end
// it. It returns f's error, the context's, a refusal of the directory, or an error
// that wraps [ErrWatchBroken] when the directory cannot be reached for a while.
func (c *Client) WatchCampaign(ctx context.Context, id api.CampaignID, f func(api.Campaign) error) error {
	version := int64(-1)
	return poll(ctx, 500*time.Millisecond, "campaign "+string(id), func(ctx context.Context) (api.Campaign, error) { return c.Campaign(ctx, id) }, func(rec api.Campaign) (bool, error) {
		done := rec.State.Final() || rec.State == api.CampaignPaused && rec.Counts.Running == 0
		if rec.Version == version {
			return done, nil
		}
		version = rec.Version
		return done, f(rec)
	})
}

// SetAttributes replaces a tenant's group and jurisdiction.
func (c *Client) SetAttributes(ctx context.Context, t cells.TenantID, r api.AttributesRequest) (api.TenantFacts, error) {
	var out api.TenantFacts
	path, err := tenantPath(t)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPut, path: path + "/attributes", body: r}, &out)
	}
	return out, err
}

// Measure asks the cells how large tenants are, at most api.MaxMeasure of them,
// and keeps the answers for later plans.
func (c *Client) Measure(ctx context.Context, tenants []cells.TenantID) (api.Measured, error) {
	var out api.Measured
	_, err := c.call(ctx, request{method: http.MethodPost, path: api.PathMeasures, body: api.MeasureRequest{Tenants: tenants}}, &out)
	return out, err
}
