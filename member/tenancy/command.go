// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// ErrCommandRefused is wrapped by the refusals of [CheckCommand]: the command must
// not run, and has written nothing.
var ErrCommandRefused = errors.New("tenancy: the command is refused")

// Command is what a command line that connects to the cell's stores declares.
type Command struct {
	Name string
	// Tenants are those that it writes for.
	Tenants []cells.TenantID
	// Free says why it writes for none. Exactly one of the two is set.
	Free string
	// RouterToken says that CELL_ROUTER_TOKEN is set in the command's environment.
	RouterToken bool
}

// CheckCommand is the check of a command, before it writes. A tenant-free command
// runs always, also while the database is down. One that declares tenants is refused
// where requests would get nothing, and while it holds the cell's router credential
// anywhere but in a first cell that records; a tenant that the cell does not hold is
// recorded there, while the directory answers that the cell is being attached, and
// refused otherwise. A command never places a tenant.
//
// cfg is as for [New]; its Router is only needed with the credential. The error
// wraps [ErrCommandRefused].
func CheckCommand(ctx context.Context, cfg Config, cmd Command) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s: %w", ErrCommandRefused, cmd.Name, fmt.Errorf(format, args...))
	}
	if (len(cmd.Tenants) == 0) == (cmd.Free == "") {
		return refuse("it declares neither tenants nor why it writes for none, or both")
	}
	if cmd.Free != "" {
		return nil
	}
	for _, t := range cmd.Tenants {
		if err := validTenant(t); err != nil {
			return refuse("%w", err)
		}
	}
	if cfg.Router == nil {
		cfg.Router = noRouter{}
	}
	p, err := New(cfg)
	if err != nil {
		return err
	}
	defer p.end()
	if err := p.refresh(ctx); err != nil {
		return refuse("the cell's own rows cannot be read: %w", err)
	}
	rows, reason := p.view(ctx)
	recording := rows.State() == tenancy.StateRecording
	// Before anything else: whoever holds the credential can place tenants.
	if cmd.RouterToken && cfg.Cell != "" && !recording {
		return refuse("CELL_ROUTER_TOKEN is set; a command has it only on a first cell that records tenants, so unset it")
	}
	if reason.Gated() {
		return refuse("%s", reason.Text)
	}
	if cfg.Cell == "" {
		return nil
	}
	for _, t := range cmd.Tenants {
		held, err := p.isHeld(ctx, t, false)
		if err != nil {
			return refuse("%w", err)
		}
		if !held && recording {
			if held, err = p.record(ctx, t); err != nil {
				return refuse("tenant %s: %w", t, err)
			}
		}
		if !held {
			return refuse("cell %s does not hold tenant %s; place it with cell place --tenant %s", cfg.Cell, t, t)
		}
	}
	return nil
}

// noRouter is the directory of a command without the credential.
type noRouter struct{}

var errNoRouter = fmt.Errorf("%w: CELL_ROUTER_URL and CELL_ROUTER_TOKEN are not set", cells.ErrUnavailable)

func (noRouter) Place(context.Context, PlaceCall) (Winner, error)      { return Winner{}, errNoRouter }
func (noRouter) Attaching(context.Context, cells.CellID) (bool, error) { return false, errNoRouter }
