// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/directory/api"
)

// StartRollout starts a rollout; the directory goes on with it. With DryRun it answers
// the waves and starts nothing. CONFLICT when a cell has a rollout that is not over.
func (c *Client) StartRollout(ctx context.Context, r api.RolloutRequest) (api.RolloutPlan, error) {
	ctx, cancel := patient(ctx)
	defer cancel()
	var out api.RolloutPlan
	_, err := c.call(ctx, request{method: http.MethodPost, path: api.PathRollouts, body: r, operation: r.OperationID}, &out)
	if r.DryRun {
		err = changesNothing(err)
	}
	return out, err
}

// RolloutQuery selects a page of rollouts.
type RolloutQuery struct {
	State api.RolloutState
	// After is RolloutList.Next of the page before.
	After int64
	Limit int
}

// Rollouts lists rollouts, newest first.
func (c *Client) Rollouts(ctx context.Context, q RolloutQuery) (api.RolloutList, error) {
	var out api.RolloutList
	v := page(strconv.FormatInt(q.After, 10), q.Limit)
	set(v, "state", string(q.State))
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathRollouts, query: v}, &out)
	return out, err
}

func rolloutPath(id api.RolloutID, rest string) (string, error) {
	return api.PathRollouts + "/" + url.PathEscape(string(id)) + rest, id.Validate()
}

// Rollout returns a rollout's record; NOT_FOUND when there is none.
func (c *Client) Rollout(ctx context.Context, id api.RolloutID) (api.Rollout, error) {
	var out api.Rollout
	path, err := rolloutPath(id, "")
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path}, &out)
	}
	return out, err
}

// UnitQuery selects a page of a rollout's units.
type UnitQuery struct {
	State api.UnitState
	Wave  int // 0 is all
	// After is RolloutUnits.Next of the page before.
	After int64
	Limit int
}

// RolloutUnits lists a rollout's units in order of their waves.
func (c *Client) RolloutUnits(ctx context.Context, id api.RolloutID, q UnitQuery) (api.RolloutUnits, error) {
	var out api.RolloutUnits
	v := page(strconv.FormatInt(q.After, 10), q.Limit)
	set(v, "state", string(q.State))
	if q.Wave > 0 {
		v.Set("wave", strconv.Itoa(q.Wave))
	}
	path, err := rolloutPath(id, "/units")
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path, query: v}, &out)
	}
	return out, err
}

func (c *Client) orderRollout(ctx context.Context, id api.RolloutID, verb string, o api.RolloutOrder) (api.Rollout, error) {
	var out api.Rollout
	path, err := rolloutPath(id, "/"+verb)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPost, path: path, body: o}, &out)
	}
	return out, err
}

// PauseRollout begins nothing more; bad health still returns the wave.
func (c *Client) PauseRollout(ctx context.Context, id api.RolloutID, o api.RolloutOrder) (api.Rollout, error) {
	return c.orderRollout(ctx, id, "pause", o)
}

// ResumeRollout goes on with a paused rollout. What has failed is tried again, or left
// with Skip.
func (c *Client) ResumeRollout(ctx context.Context, id api.RolloutID, o api.RolloutOrder) (api.Rollout, error) {
	return c.orderRollout(ctx, id, "resume", o)
}

// AbortRollout gives a rollout up and returns everything, or nothing with Keep.
func (c *Client) AbortRollout(ctx context.Context, id api.RolloutID, o api.RolloutOrder) (api.Rollout, error) {
	return c.orderRollout(ctx, id, "abort", o)
}

// WatchRollout calls f with the record now and about once a second, until it is final
// or paused. It rides out a directory that restarts. It returns f's error, the
// context's, a refusal of the directory, or an error that wraps [ErrWatchBroken] when
// the directory cannot be reached for a while.
func (c *Client) WatchRollout(ctx context.Context, id api.RolloutID, f func(api.Rollout) error) error {
	return poll(ctx, time.Second, "rollout "+string(id), func(ctx context.Context) (api.Rollout, error) { return c.Rollout(ctx, id) }, func(rec api.Rollout) (bool, error) {
		return rec.State.Final() || rec.Paused, f(rec)
	})
}
