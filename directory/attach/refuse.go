// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// Attachment is what Attach is told.
type Attachment struct {
	// Upstream is where the router reaches a later cell, http(s)://host[:port].
	Upstream string
	// KeysFP is the fingerprint of the cell's root secret; "" for a service without.
	KeysFP string
	Bots   []deploy.Bot
	// RevokeUnprovisioned ends the tokens of those that SCIM would refuse, instead of
	// refusing the attach.
	RevokeUnprovisioned bool
	// AllowAsynchronous attaches a cell whose database has no synchronous standby.
	AllowAsynchronous bool
}

// Durable is implemented by stores of rows that can say whether what they commit
// survives the loss of their server.
type Durable interface {
	// Durable is nil when a synchronous standby takes part in every commit.
	Durable(ctx context.Context) error
}

// run is one run of an attach.
type run struct {
	*Cell
	a    Attachment
	view deploy.View
	row  deploy.Cell
	self tenancy.Self
}

// refusals are checked on every run. They write nothing but probes.
func (r *run) refusals(ctx context.Context) error {
	live, err := r.live(ctx)
	if err != nil {
		return err
	}
	if len(live) == 0 {
		return refuse("no live process of cell %s reports itself; start it with CELL=%s", r.Name, r.Name)
	}
	if err := r.named(live); err != nil {
		return err
	}
	r.remember(live)
	if err := matching(live, &r.self, "a live process of cell "+string(r.Name)); err != nil {
		return err
	}
	if d, ok := r.Rows.(Durable); ok && !r.a.AllowAsynchronous {
		if err := d.Durable(ctx); err != nil {
			return refuse("the database of cell %s: %v", r.Name, err)
		}
	}
	if r.row.First {
		if err := r.Rows.WaitAbility(ctx); err != nil {
			return refuse("the end of open transactions cannot be judged: %s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	if err := r.answers(ctx); err != nil {
		return err
	}
	if err := r.overlaps(); err != nil {
		return err
	}
	if err := r.triggers(ctx, r.row.First); err != nil {
		return err
	}
	if err := r.apart(ctx); err != nil {
		return err
	}
	return r.tokens(ctx)
}

// answers: the probe address and what the router will send the cell's host to are the
// deployment that the stores are.
func (r *run) answers(ctx context.Context) error {
	if r.Prober == nil {
		return fmt.Errorf("%w: attach: no prober", cells.ErrInvalid)
	}
	upstream := r.row.Upstream
	if !r.row.First {
		if r.a.Upstream == "" && upstream == "" {
			return refuse("say where the router reaches cell %s (--upstream)", r.Name)
		}
		if r.a.Upstream == "" {
			r.a.Upstream = upstream
		}
		var err error
		if upstream, err = deploy.NormalUpstream(r.a.Upstream); err != nil {
			return err
		}
	}
	for _, at := range []struct{ what, address string }{{"the probe address", r.row.ProbeURL}, {"the cell's own address", upstream}} {
		var got stores.DeploymentID
		err := probe.Wait(ctx, r.Wait, func(ctx context.Context) (err error) {
			got, err = r.Prober.DeploymentID(ctx, at.address)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s %s: %w", at.what, at.address, err)
		}
		if string(got) != r.row.DeploymentID {
			return refuse("%s, %s, is deployment %s, not cell %s's %s", at.what, at.address, got, r.Name, r.row.DeploymentID)
		}
	}
	return nil
}

// overlaps is what the directory's transaction checks again.
func (r *run) overlaps() error {
	mine := r.row
	mine.Current, mine.Next, mine.KeysFP = r.self.Current, r.self.Next, r.a.KeysFP
	for _, f := range mine.Values() {
		for _, h := range f.Get(tenancy.FieldHosts) {
			if !slices.Contains(mine.Hosts(), h) {
				return refuse("the configuration's host %s is not cell %s's: %v", h, r.Name, mine.Hosts())
			}
		}
	}
	for i := range r.view.Cells {
		if o := &r.view.Cells[i]; o.Name != r.Name {
			if err := deploy.Overlap(&mine, o); err != nil {
				return refuse("%v", err)
			}
		}
	}
	return nil
}

// triggers refuses defects. Before a first cell is enforced only those of the first row
// count: attach makes and repairs the others itself, then.
func (r *run) triggers(ctx context.Context, firstRow bool) error {
	defects, err := r.Rows.TriggerDefects(ctx)
	if err != nil {
		return err
	}
	var bad []string
	for _, d := range defects {
		switch {
		case firstRow && !strings.HasSuffix(d.Table, "own_first"):
		case d.What == tenancy.DefectUnsupported:
			r.tell(StepTriggers, "table %s gets no trigger of its own: it is partitioned or foreign", d.Table)
		default:
			bad = append(bad, strings.TrimSpace(d.Table+" "+d.Trigger)+": "+d.What)
		}
	}
	if bad != nil {
		return refuse("triggers are not in order: %s; restart a process of cell %s, which makes and repairs them, or look who locks or owns the tables", strings.Join(bad, "; "), r.Name)
	}
	return nil
}

// apart: the cell's stores are no other cell's, and the other cells run what their rows
// say. One that is only prepared is looked at from its own attach.
func (r *run) apart(ctx context.Context) error {
	for i := range r.view.Cells {
		o := &r.view.Cells[i]
		if o.Name == r.Name || o.AttachStartedAt.IsZero() {
			continue
		}
		var peer *Peer
		for j := range r.Peers {
			if r.Peers[j].Cell == o.Name {
				peer = &r.Peers[j]
			}
		}
		if peer == nil {
			return refuse("cell %s cannot be looked at: give its settings to this command (--cells)", o.Name)
		}
		if err := r.peer(ctx, o, peer); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) peer(ctx context.Context, o *deploy.Cell, p *Peer) error {
	id, err := p.Stores.Deployment(ctx)
	if err != nil {
		return fmt.Errorf("the stores of cell %s: %w", o.Name, err)
	}
	if string(id) != o.DeploymentID {
		return refuse("the settings given for cell %s lead to deployment %s, not %s", o.Name, id, o.DeploymentID)
	}
	if err := stores.Isolated(ctx, r.Stores, p.Stores); err != nil {
		if errors.Is(err, stores.ErrShared) {
			return refuse("cells %s and %s: %v", r.Name, o.Name, err)
		}
		return fmt.Errorf("the stores of cells %s and %s: %w", r.Name, o.Name, err)
	}
	live, err := p.Rows.Heartbeats(ctx, r.Alive)
	if err != nil {
		return fmt.Errorf("the processes of cell %s: %w", o.Name, err)
	}
	var bare []string
	for _, h := range live {
		if h.Cell != o.Name || h.Fingerprint == nil {
			bare = append(bare, h.Instance)
		}
	}
	if bare != nil {
		return refuse("live processes of cell %s do not run with CELL=%s: %s", o.Name, o.Name, strings.Join(bare, ", "))
	}
	return matching(live, &tenancy.Self{Current: o.Current, Next: o.Next}, "a live process of cell "+string(o.Name))
}

// scim reports whether either value has it on.
func (r *run) scim() bool {
	for _, f := range []*tenancy.Fingerprint{r.self.Current, r.self.Next} {
		if f != nil && f.Value(tenancy.FieldSCIM) == "on" {
			return true
		}
	}
	return false
}

func (r *run) tokens(ctx context.Context) error {
	if !r.scim() {
		return nil
	}
	if r.People == nil {
		return refuse("cell %s has SCIM on, and this command cannot look at its accounts; use the service's own", r.Name)
	}
	problems, err := r.People.Tokens(ctx, r.row.First, !r.row.First && r.row.AttachStartedAt.IsZero())
	if err != nil {
		return err
	}
	if problems != nil {
		return refuse("SCIM of cell %s: %s", r.Name, strings.Join(problems, "; "))
	}
	return nil
}

// empty refuses a later cell that holds anything.
func (r *run) empty(ctx context.Context) error {
	names, err := r.Rows.TenantsOfEveryTable(ctx)
	if err != nil {
		return err
	}
	if len(names) > 0 {
		return refuse("cell %s holds data of %d tenants (%s ...); only the first cell is attached with what it holds", r.Name, len(names), names[0])
	}
	empty, holds, err := r.Stores.Empty(ctx)
	if err != nil {
		return err
	}
	if !empty {
		return refuse("cell %s holds data: %s; only the first cell is attached with what it holds", r.Name, holds)
	}
	return nil
}
