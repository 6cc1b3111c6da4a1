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
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// Updated is what a change of configuration left.
type Updated struct {
	Current *tenancy.Fingerprint `json:"current"`
	Next    *tenancy.Fingerprint `json:"next,omitempty"`
	// Reserved says that the directory has them, which it does from the attach on.
	Reserved bool `json:"reserved"`
}

// values are what the directory and the own row say.
func (c *Cell) values(ctx context.Context) (row *deploy.Cell, self tenancy.Self, err error) {
	_, row, err = c.registered(ctx)
	if err != nil {
		return nil, self, err
	}
	rows, err := c.Rows.Read(ctx)
	if err != nil {
		return nil, self, err
	}
	if rows.Self == nil || rows.First == nil {
		return nil, self, refuse("the cell's own rows are not complete; run cell prepare again, or cell restore after a restore")
	}
	if rows.First.Cell != c.Name {
		return nil, self, refuse("the stores are cell %s's", rows.First.Cell)
	}
	return row, *rows.Self, nil
}

// Next takes the command's configuration beside the present one. Before the attach has
// written the cell's values to the directory only the own row has it.
func (c *Cell) Next(ctx context.Context) (out Updated, err error) {
	row, self, err := c.values(ctx)
	if err != nil {
		return out, err
	}
	next, err := c.Config.Fingerprint()
	if err != nil {
		return out, err
	}
	current := self.Current
	pending := []*tenancy.Fingerprint{self.Next}
	if row.Current != nil {
		current, pending = row.Current, append(pending, row.Next)
	}
	for _, p := range pending {
		if p != nil && !p.Equal(next) && !(row.Current != nil && p == self.Next && p.Equal(*row.Current)) {
			return out, refuse("another next configuration of cell %s is pending; end it with cell update --finish or --revert", c.Name)
		}
	}
	if !next.SameStores(*current) {
		return out, refuse("deployment id, bucket and prefix of cell %s never change; keep them", c.Name)
	}
	if next.Equal(*current) && row.Next == nil && self.Next == nil {
		return Updated{Current: current, Reserved: row.Current != nil}, c.done(ctx, StepSelf, "the configuration is the cell's already")
	}
	return c.takeNext(ctx, row, tenancy.Self{Current: current, Next: &next})
}

// takeNext writes next wherever it is missing: the directory, the rows of configured
// tenants that it placed, the own row.
func (c *Cell) takeNext(ctx context.Context, row *deploy.Cell, self tenancy.Self) (out Updated, err error) {
	if row.Current != nil {
		if _, err := c.Directory.Config(ctx, c.Name, wire.Config{Action: wire.Next, Value: self.Next, Actor: c.Actor}); err != nil {
			return out, err
		}
		if err := c.done(ctx, StepNext, "the directory has the next configuration"); err != nil {
			return out, err
		}
		var added []cells.TenantID
		for _, t := range self.Next.Get(tenancy.FieldTenants) {
			if !slices.Contains(self.Current.Get(tenancy.FieldTenants), t) {
				added = append(added, cells.TenantID(t))
			}
		}
		if len(added) > 0 {
			if err := c.Rows.Hold(ctx, added...); err != nil {
				return out, err
			}
			if err := c.done(ctx, StepHeld, "%d tenancy rows", len(added)); err != nil {
				return out, err
			}
		}
	}
	if err := c.Rows.SetSelf(ctx, self); err != nil {
		return out, err
	}
	return Updated{Current: self.Current, Next: self.Next, Reserved: row.Current != nil}, c.done(ctx, StepSelf, "the own row has both configurations")
}

// pendingNext is the next configuration of either place, nil without one.
func pendingNext(row *deploy.Cell, self tenancy.Self) (*tenancy.Fingerprint, error) {
	next := self.Next
	if row.Current == nil {
		return next, nil
	}
	if next != nil && row.Next != nil && !next.Equal(*row.Next) {
		return nil, refuse("the own row and the directory have different next configurations; run cell restore, which writes the directory's back")
	}
	return row.Next, nil
}

// Finish makes the next configuration the only one, once every live process runs it.
func (c *Cell) Finish(ctx context.Context, revokeUnprovisioned bool) (out Updated, err error) {
	row, self, err := c.values(ctx)
	if err != nil {
		return out, err
	}
	next, err := pendingNext(row, self)
	if err != nil {
		return out, err
	}
	if next == nil {
		return out, refuse("no next configuration of cell %s is pending", c.Name)
	}
	current := self.Current
	if row.Current != nil {
		current = row.Current
	}
	// A run before may have ended between the own row and the directory.
	if !(self.Next == nil && self.Current.Equal(*next)) {
		if _, err := c.takeNext(ctx, row, tenancy.Self{Current: current, Next: next}); err != nil {
			return out, err
		}
		end := time.Now().Add(c.Wait)
		both := tenancy.Self{Current: current, Next: next}
		if err := c.until(ctx, end, "processes that do not report the next configuration", func(f *tenancy.Fingerprint) bool {
			m := tenancy.MatchNone
			if f != nil {
				m = both.Match(*f)
			}
			return m == tenancy.MatchNext || m == tenancy.MatchBoth
		}); err != nil {
			return out, err
		}
		if err := c.outlast(ctx, end); err != nil {
			return out, err
		}
		if scimChanges(current, next) {
			if err := provisioned(ctx, c, revokeUnprovisioned, time.Now()); err != nil {
				return out, err
			}
		}
		if err := c.Rows.SetSelf(ctx, tenancy.Self{Current: next}); err != nil {
			return out, err
		}
		if err := c.done(ctx, StepSelf, "the own row has the next configuration alone"); err != nil {
			return out, err
		}
	}
	if row.Current != nil {
		if _, err := c.Directory.Config(ctx, c.Name, wire.Config{Action: wire.Finish, Value: next, Actor: c.Actor}); err != nil {
			return out, err
		}
	}
	return Updated{Current: next, Reserved: row.Current != nil}, c.done(ctx, StepEnded, "the next configuration is the only one")
}

// scimChanges: SCIM is turned on, or the people come from another client.
func scimChanges(current, next *tenancy.Fingerprint) bool {
	if next.Value(tenancy.FieldSCIM) != "on" {
		return false
	}
	return current.Value(tenancy.FieldSCIM) != "on" || !slices.Equal(current.Get(tenancy.FieldOIDC), next.Get(tenancy.FieldOIDC))
}

// Revert drops the next configuration, once no live process runs it alone.
func (c *Cell) Revert(ctx context.Context) (out Updated, err error) {
	row, self, err := c.values(ctx)
	if err != nil {
		return out, err
	}
	next, err := pendingNext(row, self)
	if err != nil {
		return out, err
	}
	if next == nil && self.Next == nil {
		return out, refuse("no next configuration of cell %s is pending", c.Name)
	}
	current := self.Current
	if row.Current != nil {
		current = row.Current
	}
	if row.Current != nil && self.Next == nil && next != nil && self.Current.Equal(*next) && !self.Current.Equal(*row.Current) {
		return out, refuse("the next configuration of cell %s is being finished; run cell update --finish again", c.Name)
	}
	if n := self.Next; n != nil {
		both := tenancy.Self{Current: current, Next: n}
		if err := c.until(ctx, time.Now().Add(c.Wait), "processes that run the next configuration alone", func(f *tenancy.Fingerprint) bool {
			return f == nil || both.Match(*f) != tenancy.MatchNext
		}); err != nil {
			return out, err
		}
		if err := c.Rows.SetSelf(ctx, tenancy.Self{Current: current}); err != nil {
			return out, err
		}
		if err := c.done(ctx, StepSelf, "the own row has the present configuration alone"); err != nil {
			return out, err
		}
	}
	if row.Current != nil && next != nil {
		if _, err := c.Directory.Config(ctx, c.Name, wire.Config{Action: wire.Revert, Value: next, Actor: c.Actor}); err != nil {
			return out, err
		}
	}
	return Updated{Current: current, Reserved: row.Current != nil}, c.done(ctx, StepEnded, "the next configuration is dropped")
}

// until waits until every live process is as it should be.
func (c *Cell) until(ctx context.Context, end time.Time, what string, good func(*tenancy.Fingerprint) bool) error {
	told := ""
	for {
		live, err := c.live(ctx)
		if err != nil {
			return err
		}
		var bad []string
		for _, h := range live {
			if !good(h.Fingerprint) {
				bad = append(bad, h.Instance)
			}
		}
		if bad == nil {
			return nil
		}
		if list := strings.Join(bad, ", "); list != told {
			c.tell(StepEnded, "waiting for %s: %s", what, list)
			told = list
		}
		if !time.Now().Before(end) {
			return refuse("%s after --wait: %s; both configurations stay, run the command again", what, told)
		}
		if err := c.pause(ctx, end); err != nil {
			return err
		}
	}
}

// outlast waits for the longest request.
func (c *Cell) outlast(ctx context.Context, end time.Time) error {
	if time.Until(end) < c.RequestDeadline {
		return refuse("less of --wait is left than a request may last (%s); both configurations stay, run the command again", c.RequestDeadline)
	}
	t := time.NewTimer(c.RequestDeadline)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// Addresses replaces a later cell's probe address, or with "" brings the first cell's
// addresses to the router's configuration, after the same nonces as Prepare's.
func (c *Cell) Addresses(ctx context.Context, probeURL string) (row deploy.Cell, err error) {
	_, have, err := c.registered(ctx)
	if err != nil {
		return row, err
	}
	if have.First && probeURL != "" {
		return row, refuse("the first cell's probe address is the router's own configuration (--upstream-probe); run cell update --addresses once every router replica has it")
	}
	if !have.First && probeURL == "" {
		return row, refuse("a later cell's addresses are not the router's; give the probe address")
	}
	if probeURL != "" {
		if probeURL, err = deploy.NormalProbeURL(probeURL); err != nil {
			return row, err
		}
		if have.ProbeURL == probeURL {
			c.tell(StepNonces, "the probe address is that already; it is checked")
		}
	}
	nonces, err := c.Stores.WriteNonces(ctx)
	defer func() { err = errors.Join(err, c.deleteNonces(ctx)) }()
	if err != nil {
		return row, err
	}
	err = probe.Wait(ctx, c.Wait, func(ctx context.Context) (err error) {
		row, err = c.Directory.Addresses(ctx, c.Name, wire.Addresses{ProbeURL: probeURL, Nonces: nonces, Actor: c.Actor})
		return err
	})
	if err != nil {
		return row, fmt.Errorf("new addresses of cell %s: %w", c.Name, err)
	}
	return row, c.done(ctx, StepRegistered, "the probe address is %s", row.ProbeURL)
}
