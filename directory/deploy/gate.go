// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"crypto/subtle"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

func closed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrClosed, fmt.Sprintf(format, args...))
}

// Judge is the gate of a tenant that is placed nowhere, given the locked row of the
// cell that asks. It returns nil, [ErrCredential] or [ErrClosed] with the reason.
func Judge(c *Cell, call *Call) error {
	if call.By == ByCell && !c.hasHash(call.CredentialHash) {
		return ErrCredential
	}
	// The first cell asks while it attaches, once the directory records enforced: its
	// attach writes that before it sets the cell's mode.
	if c.State != Serving && !(c.First && c.Mode == tenancy.Enforced) {
		return closed("cell %s is %s", c.Name, c.State)
	}
	if call.Fingerprint == nil || !c.Accepts(*call.Fingerprint) {
		return closed("the caller's configuration is not cell %s's", c.Name)
	}
	return c.room(1)
}

// room refuses n more tenants of a cell that is closed, or whose quota they would pass.
func (c *Cell) room(n int64) error {
	switch {
	case n == 0:
		return nil
	case c.Closed:
		return closed("cell %s is closed", c.Name)
	case c.PlacementsMax != nil && c.Placements+n > *c.PlacementsMax:
		return closed("cell %s may hold %d tenants and holds %d", c.Name, *c.PlacementsMax, c.Placements)
	}
	return nil
}

// Room refuses n more tenants of a cell that is closed, or whose quota they would
// pass, with [ErrClosed].
func Room(c *Cell, n int64) error { return c.room(n) }

func (c *Cell) hasHash(hash string) bool {
	ok := 0
	for _, h := range c.Hashes() {
		ok |= subtle.ConstantTimeCompare([]byte(h), []byte(hash))
	}
	return hash != "" && ok == 1
}

// CheckTenant reports whether a tenant can be placed at all. The error wraps
// [cells.ErrInvalid].
func CheckTenant(t cells.TenantID) error {
	if tenancy.Everybody(string(t)) {
		return invalid("%q names no tenant", t)
	}
	return t.Validate()
}
