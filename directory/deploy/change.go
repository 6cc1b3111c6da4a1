// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// registered refuses a change of a cell that there is not.
func (ch *Change) registered() error {
	if !ch.Exists {
		return ErrNoCell
	}
	return nil
}

// Attachment is what the directory's transaction of an attach writes.
type Attachment struct {
	// Current and Next are both values of the cell's own row.
	Current tenancy.Fingerprint
	Next    *tenancy.Fingerprint
	KeysFP  string
	// Upstream of a later cell; the first one's is the router's.
	Upstream string
	Bots     []Bot
	// Tenants are those that the first cell holds; empty for a later one.
	Tenants []cells.TenantID
}

// Attach reserves what a cell accepts, and places its tenants: those that the first
// cell holds and its configured ones, beyond any bound; the configured ones of a later
// cell through the gate's bounds. Repeated while the cell is attaching it takes the
// values again.
func Attach(a Attachment) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		c := &ch.Cell
		if c.State != Attaching {
			return conflict("cell %s is %s", c.Name, c.State)
		}
		for i := range ch.Others {
			switch o := &ch.Others[i]; {
			case o.State == Attaching && !o.AttachStartedAt.IsZero():
				return conflict("cell %s is being attached", o.Name)
			case o.First && o.State != Serving:
				return conflict("the first cell, %s, does not serve yet", o.Name)
			}
		}
		c.Current, c.Next, c.KeysFP, c.Bots = &a.Current, a.Next, a.KeysFP, a.Bots
		if !c.First {
			if len(a.Tenants) > 0 {
				return conflict("a cell that is attached beside others holds no tenants")
			}
			var err error
			if c.Upstream, err = NormalUpstream(a.Upstream); err != nil {
				return err
			}
		}
		for _, f := range c.Values() {
			if err := c.fits(f); err != nil {
				return err
			}
		}
		if err := ch.overlaps(); err != nil {
			return err
		}
		if c.AttachStartedAt.IsZero() {
			c.AttachStartedAt = ch.At
		}
		for _, t := range a.Tenants {
			ch.Place = append(ch.Place, Claim{Tenant: t})
		}
		ch.placeConfigured(c.Get(tenancy.FieldTenants))
		return nil
	}
}

// fits refuses a configuration that is not of the cell's stores or host.
func (c *Cell) fits(f tenancy.Fingerprint) error {
	if f.Schema < 1 {
		return invalid("a fingerprint is missing")
	}
	if f.Value(tenancy.FieldDeploymentID) != c.DeploymentID || f.Value(tenancy.FieldBucket) != c.Bucket || f.Value(tenancy.FieldPrefix) != c.Prefix {
		return conflict("the configuration names other stores than cell %s's", c.Name)
	}
	if len(f.Get(tenancy.FieldHosts)) == 0 {
		return conflict("the configuration of cell %s names no public host", c.Name)
	}
	for _, h := range f.Get(tenancy.FieldHosts) {
		if !slices.Contains(c.Hosts(), h) {
			return conflict("host %q of the configuration is not cell %s's", h, c.Name)
		}
	}
	return nil
}

func (ch *Change) placeConfigured(tenants []string) {
	for _, t := range tenants {
		ch.Place = append(ch.Place, Claim{Tenant: cells.TenantID(t), Bound: !ch.Cell.First || ch.Cell.State == Serving})
	}
}

// PlaceHeld places further tenants that the first cell holds, while it is being
// attached.
func PlaceHeld(tenants []cells.TenantID) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		if c := &ch.Cell; !c.First || c.State != Attaching || c.AttachStartedAt.IsZero() {
			return conflict("cell %s is not a first cell that is being attached", c.Name)
		}
		for _, t := range tenants {
			ch.Place = append(ch.Place, Claim{Tenant: t})
		}
		return nil
	}
}

// RaiseMode records a mode that attach is about to raise; a lower one than is recorded
// changes nothing.
func RaiseMode(m tenancy.Mode) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		if err := m.Validate(); err != nil {
			return err
		}
		c := &ch.Cell
		if c.AttachStartedAt.IsZero() {
			return conflict("cell %s is not being attached", c.Name)
		}
		if m == tenancy.Enforced && c.Mode != m {
			c.Mode = m
			c.Modes = append(slices.Clone(c.Modes), ModeChange{Mode: m, At: ch.At})
		}
		return nil
	}
}

// Serve ends an attach. A cell that serves stays as it is.
func Serve() Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		c := &ch.Cell
		if c.AttachStartedAt.IsZero() || c.Mode != tenancy.Enforced || c.Current == nil {
			return conflict("cell %s is not attached so far that it could serve", c.Name)
		}
		c.State = Serving
		return nil
	}
}

// Limit closes or opens a cell for new tenants and sets its quota. Nil leaves what is;
// a quota below 0 clears it.
func Limit(closed *bool, placementsMax *int64) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		if closed != nil {
			ch.Cell.Closed = *closed
		}
		if placementsMax != nil {
			if ch.Cell.PlacementsMax = nil; *placementsMax >= 0 {
				n := *placementsMax
				ch.Cell.PlacementsMax = &n
			}
		}
		return nil
	}
}

// NextCredential records the hash of a new credential, beside the present one. It is
// refused while one is pending, and when any cell has it.
func NextCredential(hash string) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		if err := checkHash(hash); err != nil {
			return err
		}
		if ch.Cell.NextHash != "" {
			return conflict("cell %s has a next credential already; finish it or revert it", ch.Cell.Name)
		}
		for _, c := range append(slices.Clone(ch.Others), ch.Cell) {
			if slices.Contains(c.Hashes(), hash) {
				return conflict("the credential is cell %s's", c.Name)
			}
		}
		ch.Cell.NextHash = hash
		return nil
	}
}

// EndCredential ends a rotation: the next credential becomes the only one (finish), or
// is dropped. It is refused when none is pending.
func EndCredential(finish bool) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		c := &ch.Cell
		if c.NextHash == "" {
			return conflict("cell %s has no next credential", c.Name)
		}
		if finish {
			c.CredentialHash = c.NextHash
		}
		c.NextHash = ""
		return nil
	}
}

// NextConfig reserves a configuration beside the present one, and places the
// configured tenants that are new in it, through the gate's bounds. Repeated with the
// same value it changes nothing.
func NextConfig(next tenancy.Fingerprint) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		c := &ch.Cell
		if c.Current == nil {
			return conflict("the directory holds no configuration of cell %s before its attach", c.Name)
		}
		if c.Next != nil && !c.Next.Equal(next) {
			return conflict("cell %s has another next configuration; finish it or revert it", c.Name)
		}
		if !next.SameStores(*c.Current) {
			return conflict("deployment id, bucket and prefix of cell %s never change", c.Name)
		}
		if err := c.fits(next); err != nil {
			return err
		}
		var added []string
		for _, t := range next.Get(tenancy.FieldTenants) {
			if !slices.Contains(c.Current.Get(tenancy.FieldTenants), t) {
				added = append(added, t)
			}
		}
		if len(added) > 0 && c.State != Serving && !c.First {
			return conflict("configured tenants of cell %s change when it serves", c.Name)
		}
		c.Next = &next
		if err := ch.overlaps(); err != nil {
			return err
		}
		ch.placeConfigured(added)
		return nil
	}
}

// EndConfig ends a change of configuration that NextConfig began with the value: it
// becomes the only one (finish), or is dropped. Repeated, it changes nothing; another
// pending value is refused.
func EndConfig(value tenancy.Fingerprint, finish bool) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		c := &ch.Cell
		switch {
		case c.Current == nil:
			return conflict("the directory holds no configuration of cell %s before its attach", c.Name)
		case c.Next == nil && (!finish || c.Current.Equal(value)):
			return nil
		case c.Next == nil || !c.Next.Equal(value):
			return conflict("that is not the next configuration of cell %s", c.Name)
		}
		if finish {
			c.Current = c.Next
		}
		c.Next = nil
		return nil
	}
}

// Addresses replaces the addresses of a cell, after they were checked: a later cell's
// probe address, or the first one's probe and upstream from the router's configuration.
func Addresses(probe, upstream string) Rule {
	return func(ch *Change) error {
		if err := ch.registered(); err != nil {
			return err
		}
		var err error
		if ch.Cell.ProbeURL, err = NormalProbeURL(probe); err != nil {
			return err
		}
		if upstream != "" {
			ch.Cell.Upstream, err = NormalUpstream(upstream)
		}
		return err
	}
}

// Apply runs a rule on a view, as a store does on its rows: for checks before a
// change, and for stores. It returns the change; what the rule must not change is put
// back.
func Apply(v *View, name cells.CellID, at time.Time, rule Rule) (Change, error) {
	ch := Change{Kind: v.Kind, At: at, Cell: Cell{Name: name}}
	for _, c := range v.Cells {
		if c.Name == name {
			ch.Cell, ch.Exists = c, true
		} else {
			ch.Others = append(ch.Others, c)
		}
	}
	was := ch.Cell
	if err := rule(&ch); err != nil {
		return ch, err
	}
	ch.Cell.Name = name
	if ch.Exists {
		ch.Cell.First, ch.Cell.Stores, ch.Cell.CreatedAt = was.First, was.Stores, was.CreatedAt
	} else {
		ch.Cell.CreatedAt = at
	}
	ch.Cell.Placements, ch.Cell.Revision = was.Placements, was.Revision
	for _, p := range ch.Place {
		if err := CheckTenant(p.Tenant); err != nil {
			return ch, err
		}
	}
	return ch, nil
}
