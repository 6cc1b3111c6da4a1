// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/member/tenancy"
)

// Router is the cell's client as a process's tenancy check asks it.
func (c *Cell) Router() tenancy.Router { return processRouter{c} }

type processRouter struct{ c *Cell }

// Place implements [tenancy.Placer].
func (p processRouter) Place(ctx context.Context, call tenancy.PlaceCall) (tenancy.Winner, error) {
	if call.Cell != p.c.name {
		return tenancy.Winner{}, fmt.Errorf("%w: the credential is that of cell %s, not %s", cells.ErrInvalid, p.c.name, call.Cell)
	}
	w, err := p.c.Place(ctx, call.Tenant, call.Fingerprint)
	if err == nil && w.Tenant != call.Tenant {
		err = fmt.Errorf("%w: the answer is about another tenant", cells.ErrUnavailable)
	}
	if err != nil {
		return tenancy.Winner{}, err
	}
	return tenancy.Winner{Cell: w.Cell, DeploymentID: w.DeploymentID}, nil
}

// Attaching implements [tenancy.StateReader]. Only the first cell is answered, so a
// state is that of the first; one about another cell, or none, is an error.
func (p processRouter) Attaching(ctx context.Context, cell cells.CellID) (bool, error) {
	s, err := p.c.State(ctx)
	if err != nil {
		return false, err
	}
	if s.Cell != cell || s.State != deploy.Attaching && s.State != deploy.Serving {
		return false, fmt.Errorf("%w: the answer about cell %s is about %q in state %q", cells.ErrUnavailable, cell, s.Cell, s.State)
	}
	return s.State == deploy.Attaching, nil
}
