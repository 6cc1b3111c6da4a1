// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/hostname"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// Preparation is what Prepare registers.
type Preparation struct {
	// Host is the cell's own; the shared host for the first cell.
	Host string
	// CredentialSHA256 is the hash of the credential that the cell calls the router with.
	CredentialSHA256 string
	// ProbeURL of a later cell.
	ProbeURL string
	Bots     []deploy.Bot
}

// Prepared is what Prepare made.
type Prepared struct {
	Cell deploy.Cell  `json:"cell"`
	Rows tenancy.Rows `json:"rows"`
	// Odd says what is wrong with the rows that were there already, or "".
	Odd string `json:"odd,omitempty"`
}

// Prepare registers the cell and writes its rows, or on a rerun those that are missing.
func (c *Cell) Prepare(ctx context.Context, p Preparation) (out Prepared, err error) {
	if _, err := credential.ParseHash(p.CredentialSHA256); err != nil {
		return out, fmt.Errorf("%w: the credential's hash: %w; make both with cell credential new", cells.ErrInvalid, err)
	}
	if p.Host, err = hostname.Normalize(p.Host); err != nil {
		return out, fmt.Errorf("%w: host: %w", cells.ErrInvalid, err)
	}
	if err := c.check(); err != nil {
		return out, err
	}
	if err := c.Rows.Install(ctx); err != nil {
		return out, err
	}
	v, row, id, err := c.known(ctx)
	if err != nil {
		return out, err
	}
	rows, err := c.Rows.Read(ctx)
	if err != nil {
		return out, err
	}
	live, err := c.live(ctx)
	if err != nil {
		return out, err
	}
	// Whoever comes before any other registers the first cell, or is refused by the router.
	later := row != nil && !row.First || row == nil && v.First() != nil
	if err := c.prepareRefuses(row, rows, live, later); err != nil {
		return out, err
	}
	self, err := c.preparedSelf(row, rows, live)
	if err != nil {
		return out, err
	}
	if err := c.hosts(self, row, p.Host, later); err != nil {
		return out, err
	}
	found, err := c.found(ctx, rows, live)
	if err != nil {
		return out, err
	}
	if err := c.done(ctx, StepChecked, "deployment %s, %d live processes", id, len(live)); err != nil {
		return out, err
	}
	nonces, err := c.Stores.WriteNonces(ctx)
	defer func() { err = errors.Join(err, c.deleteNonces(ctx)) }()
	if err != nil {
		return out, err
	}
	if err := c.done(ctx, StepNonces, "the probe listener must answer the nonces of %d stores", len(nonces)); err != nil {
		return out, err
	}
	at := c.Stores.Location()
	reg := wire.Register{Host: p.Host, Stores: deploy.Stores{DeploymentID: id, Bucket: at.Bucket, Prefix: at.Prefix}, CredentialSHA256: p.CredentialSHA256,
		ProbeURL: p.ProbeURL, Nonces: nonces, Found: found, Bots: p.Bots, Actor: c.Actor}
	err = probe.Wait(ctx, c.Wait, func(ctx context.Context) (err error) {
		out.Cell, err = c.Directory.Register(ctx, c.Name, reg)
		return err
	})
	if err != nil {
		return out, err
	}
	if err := c.done(ctx, StepRegistered, "%s, first: %t", out.Cell.Host, out.Cell.First); err != nil {
		return out, err
	}
	// The router said now which aliases there are.
	if err := c.hosts(self, &out.Cell, p.Host, !out.Cell.First); err != nil {
		return out, err
	}
	out.Rows, err = c.Rows.Prepare(ctx, tenancy.Preparation{First: tenancy.First{First: out.Cell.First, Cell: c.Name}, Mode: out.Cell.Mode,
		Self: &self, ReplaceSelf: out.Cell.Current != nil})
	if err != nil {
		return out, err
	}
	out.Odd = out.Rows.Odd()
	return out, c.done(ctx, StepRows, "the state is %s", out.Rows.State())
}

func (c *Cell) deleteNonces(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return c.Stores.DeleteNonces(ctx)
}

func (c *Cell) prepareRefuses(row *deploy.Cell, rows tenancy.Rows, live []tenancy.Heartbeat, later bool) error {
	if row == nil && rows.First != nil {
		return refuse("the stores carry the state of cell %s, and the directory has no cell %s; they are another cell's, or a copy of its", rows.First.Cell, c.Name)
	}
	if rows.First != nil && (rows.First.Cell != c.Name || rows.First.First != row.First) {
		return refuse("the first row is (%t, %s) and never changes; the stores are another cell's than %s (%t)", rows.First.First, rows.First.Cell, c.Name, row.First)
	}
	if row != nil && row.Mode == tenancy.Recording && rows.Mode == tenancy.Enforced {
		return refuse("the mode row says enforced and the directory recording: the row is not what an attach of cell %s wrote", c.Name)
	}
	if later && rows.Mode == tenancy.Recording {
		return refuse("the mode row of cell %s says recording, which is the first cell's alone; set it to enforced by hand, it counts as that", c.Name)
	}
	var others []tenancy.Heartbeat
	for _, h := range live {
		// The first cell is prepared before CELL is rolled out.
		if later || h.Cell != "" && h.Cell != c.Name {
			others = append(others, h)
		}
		if h.Fingerprint != nil && !h.Fingerprint.SameStores(c.stores()) {
			return refuse("process %s runs on other stores (deployment id, bucket or prefix) than this command", h.Instance)
		}
	}
	return c.named(others)
}

// stores is the part of the command's configuration that says which stores it has.
func (c *Cell) stores() tenancy.Fingerprint {
	one := func(v string) []string {
		if v == "" {
			return nil
		}
		return []string{v}
	}
	return tenancy.Fingerprint{Schema: tenancy.SchemaVersion(), Fields: map[tenancy.Field][]string{tenancy.FieldDeploymentID: one(c.Config.DeploymentID),
		tenancy.FieldBucket: one(c.Config.Bucket), tenancy.FieldPrefix: one(c.Config.Prefix)}}
}

// preparedSelf is the own row to be written. The directory's values come first, then a
// row that is there, then what every live process reports. Processes of the first cell
// that run without CELL report none: then it is the command's own configuration.
func (c *Cell) preparedSelf(row *deploy.Cell, rows tenancy.Rows, live []tenancy.Heartbeat) (tenancy.Self, error) {
	what := "a live process of cell " + string(c.Name)
	if row != nil && row.Current != nil {
		self := tenancy.Self{Current: row.Current, Next: row.Next}
		return self, matching(live, &self, what)
	}
	if rows.Self != nil {
		return *rows.Self, matching(live, rows.Self, what)
	}
	var self tenancy.Self
	for _, h := range live {
		switch {
		case h.Fingerprint == nil:
		case self.Current == nil:
			self.Current = h.Fingerprint
		case !h.Fingerprint.Matches(*self.Current) && !self.Current.Matches(*h.Fingerprint):
			return self, refuse("live processes report two configurations (%s); let one be rolled out first", h.Instance)
		}
	}
	if self.Current != nil {
		return self, nil
	}
	f, err := c.Config.Fingerprint()
	if err != nil {
		return self, err
	}
	if len(f.Get(tenancy.FieldHosts)) == 0 {
		return self, refuse("no live process reports a configuration; give the cell's own to this command (CELL_PUBLIC_BASE_URL and the others)")
	}
	self.Current = &f
	return self, nil
}

// hosts refuses a configuration whose public hosts are not the cell's. The aliases of
// the shared host are the router's to say; before it did, one host has to be right.
func (c *Cell) hosts(self tenancy.Self, row *deploy.Cell, host string, later bool) error {
	own := []string{host}
	if row != nil {
		own = row.Hosts()
	}
	for _, f := range []*tenancy.Fingerprint{self.Current, self.Next} {
		if f == nil {
			continue
		}
		for _, h := range f.Get(tenancy.FieldHosts) {
			if !slices.Contains(own, h) && (row != nil || later) {
				return refuse("the configuration's host %s (of its public base URL or its issuer) is not cell %s's: %v; set both to it", h, c.Name, own)
			}
		}
	}
	return nil
}

// found counts what is in the stores.
func (c *Cell) found(ctx context.Context, rows tenancy.Rows, live []tenancy.Heartbeat) (f deploy.Found, err error) {
	held, err := c.Rows.Tenants(ctx)
	if err != nil {
		return f, err
	}
	one := func(there bool) int64 {
		if there {
			return 1
		}
		return 0
	}
	f = deploy.Found{Tenancy: int64(len(held)), FirstRows: one(rows.First != nil), ModeRows: one(rows.Mode != ""), SelfRows: one(rows.Self != nil)}
	for _, h := range live {
		f.Unnamed += one(h.Cell != c.Name)
	}
	for _, s := range c.Stores.All() {
		if s.Location().IsZero() {
			continue
		}
		empty, _, err := s.Empty(ctx)
		if err != nil {
			return f, err
		}
		f.Objects += one(!empty)
	}
	return f, nil
}
