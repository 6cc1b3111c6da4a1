// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Attach makes a prepared cell serve as a cell, or goes on where a run before ended. A
// cell that serves already is left as it is.
func (c *Cell) Attach(ctx context.Context, a Attachment) (deploy.Cell, error) {
	v, row, err := c.registered(ctx)
	if err != nil {
		return deploy.Cell{}, err
	}
	rows, err := c.Rows.Read(ctx)
	if err != nil {
		return *row, err
	}
	if row.State == deploy.Serving {
		if s := rows.State(); s != tenancy.StateEnforced {
			return *row, refuse("cell %s serves already, and its own rows are %s: they are those of a restore; stop it and run cell restore", c.Name, s)
		}
		return *row, c.done(ctx, StepServing, "cell %s serves already", c.Name)
	}
	if rows.State() == tenancy.StateOpen || rows.State() == tenancy.StatePartial {
		return *row, refuse("the cell's own rows are not complete (%s); run cell prepare again, or cell restore after a restore", rows.State())
	}
	if rows.First.Cell != c.Name || rows.First.First != row.First {
		return *row, refuse("the first row says (%t, %s), and the directory (%t, %s)", rows.First.First, rows.First.Cell, row.First, c.Name)
	}
	r := &run{Cell: c, a: a, view: v, row: *row, self: *rows.Self}
	if row.First {
		return r.first(ctx, rows)
	}
	return r.later(ctx, rows)
}

// first attaches the first cell.
func (r *run) first(ctx context.Context, rows tenancy.Rows) (deploy.Cell, error) {
	end := time.Now().Add(r.Wait)
	if rows.Mode == tenancy.Enforced && (r.row.AttachStartedAt.IsZero() || r.row.Mode != tenancy.Enforced) {
		return r.row, refuse("the mode is enforced and no attach of cell %s has raised it; look who wrote it", r.Name)
	}
	if err := r.refusals(ctx); err != nil {
		return r.row, err
	}
	if err := r.done(ctx, StepChecked, "the mode is %s", rows.Mode); err != nil {
		return r.row, err
	}
	if rows.Mode == tenancy.Recording {
		if err := r.record(ctx); err != nil {
			return r.row, err
		}
	}
	if err := r.enforce(ctx, end); err != nil {
		return r.row, err
	}
	if err := r.reported(ctx, end); err != nil {
		return r.row, err
	}
	if err := r.people(ctx); err != nil {
		return r.row, err
	}
	rep, err := r.Rows.EnsureTriggers(ctx)
	if err != nil {
		return r.row, err
	}
	if err := r.triggers(ctx, false); err != nil {
		return r.row, err
	}
	if err := r.done(ctx, StepTriggers, "%d made, %d repaired", len(rep.Created), len(rep.Repaired)); err != nil {
		return r.row, err
	}
	if err := r.quiet(ctx, end); err != nil {
		return r.row, err
	}
	if err := r.place(ctx); err != nil {
		return r.row, err
	}
	behind, err := r.behind(ctx)
	if err != nil {
		return r.row, err
	}
	if behind != "" {
		return r.row, r.back(ctx, fmt.Sprintf("live processes do not report enforced any more: %s", behind))
	}
	return r.serve(ctx)
}

// record is the directory's transaction, and the tenancy rows of what it placed.
func (r *run) record(ctx context.Context) error {
	tenants, err := r.everyTenant(ctx, &r.self)
	if err != nil {
		return err
	}
	row, err := r.Directory.Attach(ctx, r.Name, wire.Attach{Current: r.self.Current, Next: r.self.Next, KeysFP: r.a.KeysFP, Bots: r.a.Bots, Tenants: tenants, Actor: r.Actor})
	if err != nil {
		return err
	}
	r.row = row
	if err := r.done(ctx, StepDirectory, "%d tenants placed", len(tenants)); err != nil {
		return err
	}
	if err := r.Rows.Hold(ctx, tenants...); err != nil {
		return err
	}
	return r.done(ctx, StepHeld, "%d tenancy rows", len(tenants))
}

// enforce records the mode in the directory and then sets it. One that is there already
// is written again: a commit that was cut off while it waited for a standby is on the
// primary alone.
func (r *run) enforce(ctx context.Context, end time.Time) error {
	row, err := r.Directory.RaiseMode(ctx, r.Name, wire.Mode{Mode: tenancy.Enforced, Actor: r.Actor})
	if err != nil {
		return err
	}
	r.row = row
	if err := r.done(ctx, StepRecorded, "the directory records enforced"); err != nil {
		return err
	}
	// Nothing begins that could commit with less left than the wait for the processes takes.
	mode, err := r.Rows.SetMode(ctx, tenancy.Enforced, tenancy.ModeWrite{Deadline: end.Add(-r.ModeCache - r.RequestDeadline), Tried: func(n int) error {
		r.tell(StepEnforced, "try %d", n)
		return nil
	}})
	switch {
	case err == nil:
		return r.done(ctx, StepEnforced, "the mode is %s", mode)
	case errors.Is(err, tenancy.ErrModeUnknown):
		return fmt.Errorf("the mode was perhaps set and cannot be read; run cell attach again, it goes on by the mode that it reads: %w", err)
	case ctx.Err() != nil:
		return err
	case mode == "":
		return err
	}
	return refuse("the mode was not set within --wait and is %s now; run cell attach again, with a longer --wait or when no request holds a new tenant's insert open (%v)", mode, err)
}

// remember takes the longest time for which a process says that it uses what it has read
// for the command's own, if that is shorter. A build that does not say is as the command
// was told.
func (r *run) remember(live []tenancy.Heartbeat) {
	for _, h := range live {
		if h.CacheFor > r.ModeCache {
			r.tell(StepReported, "process %s uses what it has read for %s", h.Instance, h.CacheFor)
			r.ModeCache = h.CacheFor
		}
	}
}

// behind names live processes that do not report enforced.
func (r *run) behind(ctx context.Context) (string, error) {
	live, err := r.live(ctx)
	if err != nil {
		return "", err
	}
	r.remember(live)
	var out []string
	for _, h := range live {
		switch {
		case h.Cell != r.Name:
			out = append(out, fmt.Sprintf("%s (CELL is %q)", h.Instance, h.Cell))
		case h.Mode != tenancy.Enforced:
			out = append(out, fmt.Sprintf("%s (%s)", h.Instance, h.Mode))
		}
	}
	return strings.Join(out, ", "), nil
}

// reported waits until every live process reports enforced, and then for as long as the
// mode may be remembered and a request last. When the time is not enough, the mode
// becomes recording again.
func (r *run) reported(ctx context.Context, end time.Time) error {
	told := ""
	for {
		behind, err := r.behind(ctx)
		if err != nil {
			return err
		}
		if behind == "" {
			break
		}
		if behind != told {
			r.tell(StepReported, "waiting for live processes to report enforced: %s", behind)
			told = behind
		}
		if time.Until(end) < r.ModeCache+r.RequestDeadline {
			return r.back(ctx, "live processes do not report enforced within --wait: "+behind)
		}
		if err := r.pause(ctx, end); err != nil {
			return err
		}
	}
	rest := r.ModeCache + r.RequestDeadline
	if time.Until(end) < rest {
		return r.back(ctx, fmt.Sprintf("less of --wait is left than a mode is remembered and a request lasts (%s)", rest))
	}
	r.tell(StepReported, "every process reports enforced; waiting %s for what they remember and for requests under way", rest)
	t := time.NewTimer(rest)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
	}
	return r.done(ctx, StepReported, "every process has followed")
}

// back sets recording again and refuses, with the mode as it is then.
func (r *run) back(ctx context.Context, why string) error {
	bctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	mode, err := r.Rows.SetMode(bctx, tenancy.Recording, tenancy.ModeWrite{})
	switch {
	case err == nil:
		return refuse("%s; the mode is recording again, run cell attach again", why)
	case mode == "" || errors.Is(err, tenancy.ErrModeUnknown):
		return fmt.Errorf("%s; recording could not be set again, and the mode cannot be read: %w; run cell attach again, it goes on by the mode that it reads", why, err)
	}
	return refuse("%s; recording could not be set again, the mode is %s (%v); run cell attach again", why, mode, err)
}

// people is the precondition of a cell with SCIM on. It leaves the mode.
func (r *run) people(ctx context.Context) error {
	if r.scim() {
		started := r.row.AttachStartedAt
		if err := provisioned(ctx, r.Cell, r.a.RevokeUnprovisioned, started); err != nil {
			return err
		}
	}
	return r.done(ctx, StepPeople, "SCIM is on: %t", r.scim())
}

// provisioned refuses accounts that SCIM would refuse, or ends their tokens.
func provisioned(ctx context.Context, c *Cell, revoke bool, before time.Time) error {
	if c.People == nil {
		return refuse("cell %s has SCIM on, and this command cannot look at its accounts; use the service's own", c.Name)
	}
	list, err := c.People.Unprovisioned(ctx)
	if err != nil || len(list) == 0 {
		return err
	}
	if revoke {
		if err := c.People.Revoke(ctx, list, before); err != nil {
			return err
		}
		c.tell(StepPeople, "the tokens of %d accounts from before %s are revoked", len(list), before.Format(time.RFC3339))
		return nil
	}
	var names []string
	for _, a := range list {
		names = append(names, a.ID+" ("+a.Why+")")
	}
	return refuse("%d live accounts have no active SCIM row: %s; provision them, or end their tokens with --revoke-unprovisioned", len(list), strings.Join(names, ", "))
}

// quiet waits for every transaction that could have read recording. The mode stays
// enforced whatever comes of it.
func (r *run) quiet(ctx context.Context, end time.Time) error {
	rows, err := r.Rows.Read(ctx)
	if err != nil {
		return err
	}
	if rows.EffectiveMode() != tenancy.Enforced {
		return refuse("the mode is %s now; somebody else changed it", rows.Mode)
	}
	snapshot, err := r.Rows.Snapshot(ctx)
	if err != nil {
		return err
	}
	told := ""
	for {
		open, err := r.Rows.OpenBefore(ctx, snapshot)
		if err != nil {
			return err
		}
		if len(open) == 0 {
			return r.done(ctx, StepQuiet, "no transaction is open that could have read recording")
		}
		var names []string
		for _, b := range open {
			if b.Prepared {
				return refuse("%s does not end by itself: commit it or roll it back, set max_prepared_transactions to 0 and run cell attach again; the mode stays enforced", b)
			}
			names = append(names, b.String())
		}
		slices.Sort(names)
		if list := strings.Join(names, "; "); list != told {
			r.tell(StepQuiet, "waiting for transactions that began before: %s", list)
			told = list
		}
		if !time.Now().Before(end) {
			return refuse("transactions that may have read recording are open after --wait: %s; the mode stays enforced, run cell attach again when they have ended", told)
		}
		if err := r.pause(ctx, end); err != nil {
			return err
		}
	}
}

// place places what was written since the directory's transaction.
func (r *run) place(ctx context.Context) error {
	tenants, err := r.everyTenant(ctx, &r.self)
	if err != nil {
		return err
	}
	have, err := r.Cell.placements(ctx)
	if err != nil {
		return err
	}
	var more []cells.TenantID
	for _, t := range tenants {
		if _, ok := have[t]; !ok {
			more = append(more, t)
		}
	}
	if len(more) > 0 {
		if r.row, err = r.Directory.Held(ctx, r.Name, wire.Held{Tenants: more, Actor: r.Actor}); err != nil {
			return err
		}
	}
	if err := r.Rows.Hold(ctx, tenants...); err != nil {
		return err
	}
	return r.done(ctx, StepPlaced, "%d more tenants placed", len(more))
}

func (r *run) serve(ctx context.Context) (deploy.Cell, error) {
	row, err := r.Directory.Serve(ctx, r.Name, wire.Serve{Actor: r.Actor})
	if err != nil {
		return r.row, err
	}
	return row, r.done(ctx, StepServing, "cell %s serves, %d tenants", r.Name, row.Placements)
}

// placements lists the cell's tenants with the directory.
func (c *Cell) placements(ctx context.Context) (map[cells.TenantID]deploy.Placement, error) {
	out := map[cells.TenantID]deploy.Placement{}
	var after cells.TenantID
	for {
		page, err := c.Directory.Placements(ctx, c.Name, after, 0)
		if err != nil {
			return nil, err
		}
		for _, p := range page.Placements {
			out[p.Tenant] = p
		}
		if after = page.Next; after == "" {
			return out, nil
		}
	}
}
