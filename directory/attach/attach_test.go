// SPDX-License-Identifier: Apache-2.0

package attach_test

import (
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// A deployment becomes the first cell and a second one is attached beside it.
func TestTwoCells(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	one.config.Tenants = []cells.TenantID{"code"}
	w.router(one)
	one.sql(`INSERT INTO items VALUES ('acme', 1), ('acme', 2), ('beta', 1), ('*', 1), ('-', 1), ('', 1)`)

	two := w.deployment("two", "two.example.com")
	two.config.Tenants = []cells.TenantID{"plans"}
	_, err := two.prepare()
	w.refused(err, "no cell is registered before the first one")

	p, err := one.prepare()
	w.must(err, "prepare one")
	if !p.Cell.First || p.Cell.State != deploy.Attaching || p.Rows.State() != tenancy.StateRecording || p.Cell.Upstream != one.main {
		t.Fatalf("prepared %+v %+v", p.Cell, p.Rows)
	}
	_, err = one.attach()
	w.refused(err, "no live process")
	p1, _ := one.process("one-1")
	if ok, why := p1.Ready(); !ok {
		t.Fatalf("not ready between prepare and attach: %s", why)
	}
	_, err = one.prepare() // a rerun, with processes
	w.must(err, "prepare one again")
	_, err = two.prepare(func(p *attach.Preparation) { p.ProbeURL = one.probe })
	w.refused(err, "it is deployment")
	_, err = two.prepare()
	w.must(err, "prepare two")
	if s := two.state(); s.State() != tenancy.StateEnforced {
		t.Errorf("a later cell is %s", s.State())
	}
	two.process("two-1")
	_, err = two.attach()
	w.refused(err, "the first cell does not serve yet")

	var steps []attach.Step
	c, err := one.attach(func(c *attach.Cell) {
		c.Tell = func(s attach.Step, d string) { steps = append(steps, s); t.Logf("%s: %s", s, d) }
	})
	w.must(err, "attach one")
	if c.State != deploy.Serving || c.Mode != tenancy.Enforced || c.Placements != 3 || one.state().Mode != tenancy.Enforced {
		t.Errorf("attached %+v, %v", c, steps)
	}
	if got := one.held(); got != "[acme beta code]" {
		t.Errorf("held: %s", got)
	}
	w.refused(one.try(`INSERT INTO items VALUES ('stranger', 1)`), tenancy.SQLState)
	w.must(one.try(`INSERT INTO items VALUES ('acme', 3)`), "a script's row of a held tenant")

	_, err = two.attach()
	w.refused(err, "triggers are not in order", "items")
	_, err = two.rows.EnsureTriggers(t.Context())
	w.must(err, "a start of two")
	_, err = two.attach()
	w.refused(err, "cell one cannot be looked at")
	peers := func(c *attach.Cell) { c.Peers = []attach.Peer{{Cell: "one", Rows: one.rows, Stores: one.stores.Set}} }
	c, err = two.attach(peers)
	w.must(err, "attach two")
	if c.State != deploy.Serving || c.Upstream != two.main || w.where("plans") != "two" || two.held() != "[plans]" {
		t.Errorf("attached %+v, held %s", c, two.held())
	}
	_, err = two.attach(peers) // again
	w.must(err, "attach two again")

	won, err := two.cell().Place(t.Context(), "gamma")
	w.must(err, "place")
	if !won.Created || two.held() != "[gamma plans]" || w.where("gamma") != "two" {
		t.Errorf("placed %+v, held %s", won, two.held())
	}
	_, err = two.cell().Place(t.Context(), "acme")
	w.refused(err, "WRONG_CELL", "it is in one already")
	if two.held() != "[gamma plans]" {
		t.Errorf("a tenant of another cell: held %s", two.held())
	}
}
