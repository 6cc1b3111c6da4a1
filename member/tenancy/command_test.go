// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	mt "github.com/cloister-dev/cloister/member/tenancy"
)

func TestCommands(t *testing.T) {
	writes := mt.Command{Name: "import", Tenants: []cells.TenantID{"t"}}
	withToken := writes
	withToken.RouterToken = true
	free := mt.Command{Name: "revoke", Free: "it ends a token of the deployment", RouterToken: true}
	recording, enforced := rows(true, tenancy.Recording), rows(true, tenancy.Enforced)
	lost := rows(true, tenancy.Enforced)
	lost.Mode = ""
	for _, c := range []struct {
		name      string
		cell      cells.CellID
		rows      tenancy.Rows
		held      bool
		down      bool
		meanwhile bool
		cmd       mt.Command
		router    *fakeRouter
		refuse    string // words of the refusal; "" runs
		writes    int
	}{
		{name: "held", cell: "a", rows: enforced, held: true, cmd: writes},
		{name: "unheld", cell: "a", rows: enforced, cmd: writes, refuse: "cell place"},
		{name: "held, with the credential", cell: "a", rows: enforced, held: true, cmd: withToken, refuse: "CELL_ROUTER_TOKEN"},
		{name: "a later cell, with the credential", cell: "a", rows: rows(false, tenancy.Enforced), held: true, cmd: withToken, refuse: "CELL_ROUTER_TOKEN"},
		{name: "a later cell that says recording, with the credential", cell: "a", rows: rows(false, tenancy.Recording), cmd: withToken, refuse: "CELL_ROUTER_TOKEN"},
		{name: "recorded", cell: "a", rows: recording, cmd: withToken, router: &fakeRouter{attaching: true}, writes: 1},
		{name: "recording, and the directory has it serving", cell: "a", rows: recording, cmd: withToken, router: &fakeRouter{}, refuse: "directory"},
		{name: "recording, and the directory cannot be read", cell: "a", rows: recording, cmd: withToken, router: &fakeRouter{stateErr: errors.New("no"), attaching: true}, refuse: "directory"},
		{name: "recording, without the credential", cell: "a", rows: recording, cmd: writes, refuse: "directory"},
		{name: "enforced meanwhile", cell: "a", rows: recording, meanwhile: true, cmd: withToken, router: &fakeRouter{attaching: true, winner: won}, refuse: "cell place"},
		{name: "partial", cell: "a", rows: lost, held: true, cmd: writes, refuse: "cell prepare"},
		{name: "never prepared", cell: "a", rows: tenancy.Rows{}, cmd: writes, refuse: "cell prepare"},
		{name: "rows unread", cell: "a", rows: enforced, held: true, down: true, cmd: writes, refuse: "cannot be read"},
		{name: "without CELL, enforced", rows: enforced, held: true, cmd: writes, refuse: "CELL"},
		{name: "without CELL, partial", rows: lost, held: true, cmd: writes, refuse: "CELL"},
		{name: "without CELL, unread", rows: tenancy.Rows{}, down: true, cmd: writes, refuse: "cannot be read"},
		{name: "without CELL, open", rows: tenancy.Rows{}, cmd: writes},
		{name: "without CELL, recording", rows: recording, cmd: writes},
		{name: "free", cell: "a", rows: lost, down: true, cmd: free},
		{name: "declares nothing", cell: "a", rows: enforced, cmd: mt.Command{Name: "x"}, refuse: "declares"},
		{name: "declares both", cell: "a", rows: enforced, cmd: mt.Command{Name: "x", Tenants: writes.Tenants, Free: "no"}, refuse: "declares"},
		{name: "everybody", cell: "a", rows: enforced, cmd: mt.Command{Name: "x", Tenants: []cells.TenantID{"*"}}, refuse: "INVALID_TENANT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore(c.rows)
			s.held["t"], s.down, s.enforce = c.held, c.down, c.meanwhile
			var router mt.Router
			if c.router != nil {
				router = c.router
			}
			cfg := config(s, router)
			cfg.Cell = c.cell
			err := mt.CheckCommand(t.Context(), cfg, c.cmd)
			if (err != nil) != (c.refuse != "") || err != nil && (!errors.Is(err, mt.ErrCommandRefused) || !strings.Contains(err.Error(), c.refuse)) {
				t.Errorf("%v", err)
			}
			if n, _ := s.written(); n != c.writes || c.router != nil && c.router.places != 0 {
				t.Errorf("%d writes; placements %v", n, c.router)
			}
		})
	}
}
