// SPDX-License-Identifier: Apache-2.0

package attach_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/pgtest"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

func TestPrepareRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	_, err := one.prepare(func(p *attach.Preparation) { p.CredentialSHA256 = one.token })
	w.refused(err, "cell credential new")
	_, err = one.prepare(func(p *attach.Preparation) { p.ProbeURL = one.probe })
	w.refused(err, "the router's own configuration")
	if one.row("one").Name != "" || one.state().State() != tenancy.StateOpen {
		t.Error("a refused prepare left something")
	}
	_, err = one.prepare()
	w.must(err, "prepare")
	first := one.state()

	// A rerun writes the row that is missing, from the directory.
	one.sql(`DELETE FROM cell.own_mode`)
	if s := one.state().State(); s != tenancy.StatePartial {
		t.Fatalf("without a mode row: %s", s)
	}
	_, err = one.prepare()
	w.must(err, "prepare again")
	if s := one.state(); s.State() != tenancy.StateRecording || s.Mode != first.Mode {
		t.Errorf("the rerun left %+v", s)
	}
	_, hash := credential.Router.New()
	other := hash.String()
	_, err = one.prepare(func(p *attach.Preparation) { p.CredentialSHA256 = other })
	w.refused(err, "none of cell one's")
	one.sql(`UPDATE cell.own_mode SET mode = 'enforced'`)
	_, err = one.prepare()
	w.refused(err, "enforced and the directory recording")
	_, err = one.attach()
	w.refused(err, "no attach of cell one has raised it")
	one.sql(`UPDATE cell.own_mode SET mode = 'recording'`)

	// The wrong name on the right stores, and the other way round.
	_, err = one.cell(func(c *attach.Cell) { c.Name = "uno" }).Prepare(t.Context(), attach.Preparation{Host: "uno.example.com", CredentialSHA256: other, ProbeURL: one.probe})
	w.refused(err, "carry the state of cell one")
	two := w.deployment("two", "two.example.com")
	_, err = two.cell(func(c *attach.Cell) { c.Name = "one" }).Prepare(t.Context(), attach.Preparation{Host: shared, CredentialSHA256: one.sum})
	w.refused(err, "cell one is deployment")
	// Processes of a later cell that run without CELL, or as another.
	_, stop := two.process("bare", func(c *checks.Config) { c.Cell = "" })
	_, err = two.prepare()
	w.refused(err, "bare (CELL is not set)")
	stop()
	_, stop = two.process("wrong", func(c *checks.Config) { c.Cell = "one" })
	_, err = two.prepare()
	w.refused(err, "wrong (CELL is one)")
	stop()
	two.config.Issuer = "https://elsewhere.example.com"
	_, err = two.prepare()
	w.refused(err, "elsewhere.example.com", "is not cell two's")
	two.config.Issuer = ""
	if two.row("two").Name != "" {
		t.Error("a refused prepare registered the cell")
	}
	// Two configurations at once.
	_, stop = two.process("a")
	two.config.BearerIssuers = []string{"iss-other"}
	_, stop2 := two.process("b")
	_, err = two.prepare()
	w.refused(err, "two configurations")
	stop2()
	stop()
	_, err = two.prepare(func(p *attach.Preparation) { p.CredentialSHA256 = one.sum })
	w.refused(err, "router credential is cell one's")
	_, err = two.prepare()
	w.must(err, "prepare two")
	two.sql(`UPDATE cell.own_mode SET mode = 'recording'`)
	_, err = two.prepare()
	w.refused(err, "the first cell's alone")
}

func TestAttachRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.first("acme")
	two := w.deployment("two", "two.example.com")
	_, err := two.attach()
	w.refused(err, "run cell prepare")
	_, err = two.prepare()
	w.must(err, "prepare two")
	_, err = two.rows.EnsureTriggers(t.Context())
	w.must(err, "triggers")
	peers := func(c *attach.Cell) { c.Peers = []attach.Peer{{Cell: "one", Rows: one.rows, Stores: one.stores.Set}} }
	try := func(what string, parts []string, adjust ...func(*attach.Cell)) {
		t.Helper()
		_, err := two.attach(append([]func(*attach.Cell){peers}, adjust...)...)
		if err == nil {
			t.Fatalf("%s: attached", what)
		}
		w.refused(err, parts...)
		if !two.row("two").AttachStartedAt.IsZero() {
			t.Fatalf("%s: a refused attach has begun", what)
		}
	}
	try("nobody runs", []string{"no live process"})
	_, stop := two.process("bare", func(c *checks.Config) { c.Cell = "" })
	try("a process without CELL", []string{"bare (CELL is not set)"})
	stop()
	two.process("two-1")
	old := two.config
	two.config.BearerIssuers = []string{"iss-else"}
	_, stop = two.process("drifted")
	two.config = old
	try("a process with another configuration", []string{"drifted (issuers)"})
	stop()
	_, err = two.cell(peers).Attach(t.Context(), attach.Attachment{Upstream: two.main})
	w.refused(err, "synchronous_standby_names is empty")
	_, err = two.cell(peers).Attach(t.Context(), attach.Attachment{AllowAsynchronous: true})
	w.refused(err, "--upstream")
	_, err = two.cell(peers).Attach(t.Context(), attach.Attachment{Upstream: one.main, AllowAsynchronous: true})
	w.refused(err, "the cell's own address", string(one.id))
	_, err = two.cell(peers).Attach(t.Context(), attach.Attachment{Upstream: two.main, AllowAsynchronous: true, KeysFP: "keys-one"})
	w.refused(err, "root secret is cell one's")
	try("one's stores, given for another cell", []string{"lead to deployment"}, func(c *attach.Cell) {
		c.Peers = []attach.Peer{{Cell: "one", Rows: two.rows, Stores: two.stores.Set}}
	})
	// What the own row accepts, and another cell accepts as well.
	f := two.fingerprint()
	for field, parts := range map[tenancy.Field][]string{tenancy.FieldIssuers: {"issuer \"iss-one\" is cell one's"}, tenancy.FieldHosts: {shared}} {
		next := f
		next.Fields = map[tenancy.Field][]string{}
		for k, v := range f.Fields {
			next.Fields[k] = v
		}
		next.Fields[field] = append([]string{map[tenancy.Field]string{tenancy.FieldIssuers: "iss-one", tenancy.FieldHosts: shared}[field]}, f.Fields[field]...)
		w.must(two.rows.SetSelf(t.Context(), tenancy.Self{Current: &f, Next: &next}), "own row")
		try("an overlap in next: "+field, parts)
	}
	w.must(two.rows.SetSelf(t.Context(), tenancy.Self{Current: &f}), "own row")
	// SCIM without anybody who could look at the accounts.
	scim := f
	scim.Fields = map[tenancy.Field][]string{}
	for k, v := range f.Fields {
		scim.Fields[k] = v
	}
	scim.Fields[tenancy.FieldSCIM] = []string{"on"}
	w.must(two.rows.SetSelf(t.Context(), tenancy.Self{Current: &f, Next: &scim}), "own row")
	try("SCIM", []string{"cannot look at its accounts"})
	people := &people{tokens: []string{"a token names no cell"}}
	with := func(c *attach.Cell) { c.People = people }
	try("a SCIM token", []string{"a token names no cell"}, with)
	// Data.
	people.tokens = nil
	two.sql(`ALTER TABLE items DISABLE TRIGGER ALL`)
	two.sql(`INSERT INTO items VALUES ('squatter', 1)`)
	try("a disabled trigger", []string{"items", "disabled"}, with)
	two.sql(`ALTER TABLE items ENABLE TRIGGER ALL`)
	try("data", []string{"holds data", "squatter"}, with)
	two.sql(`DELETE FROM items`)
	// Another cell's process has drifted.
	drift := one.fingerprint()
	drift.Fields[tenancy.FieldIssuers] = []string{"iss-x"}
	w.must(one.rows.Beat(t.Context(), tenancy.Heartbeat{Instance: "drift", Cell: "one", Fingerprint: &drift}), "a heartbeat")
	try("another cell has drifted", []string{"cell one", "drift"}, with)
	w.must(one.rows.Leave(t.Context(), "drift"), "its end")
	// One attach at a time.
	w.change("two", deploy.Limit(new(bool), nil))
	people.list = []attach.Account{{ID: "eve", Why: "no active row"}}
	_, err = two.attach(peers, with)
	w.refused(err, "eve (no active row)", "--revoke-unprovisioned")
	if two.row("two").State != deploy.Attaching || two.row("two").AttachStartedAt.IsZero() {
		t.Error("the SCIM precondition comes after the directory's transaction")
	}
	three := w.deployment("three", "three.example.com")
	_, err = three.prepare()
	w.must(err, "prepare three")
	three.process("three-1")
	_, err = three.rows.EnsureTriggers(t.Context())
	w.must(err, "triggers")
	_, err = three.attach(func(c *attach.Cell) {
		c.Peers = []attach.Peer{{Cell: "one", Rows: one.rows, Stores: one.stores.Set}, {Cell: "two", Rows: two.rows, Stores: two.stores.Set}}
	})
	w.refused(err, "cell two is being attached")
	_, err = two.cell(peers, with).Attach(t.Context(), attach.Attachment{Upstream: two.main, KeysFP: "keys-two", AllowAsynchronous: true, RevokeUnprovisioned: true})
	w.must(err, "attach two")
	if len(people.revoked) != 1 || people.before.After(time.Now()) || !people.before.Equal(two.row("two").AttachStartedAt) {
		t.Errorf("revoked %v before %s", people.revoked, people.before)
	}
}

// people is a sign-in.
type people struct {
	tokens  []string
	list    []attach.Account
	revoked []attach.Account
	before  time.Time
}

func (p *people) Tokens(context.Context, bool, bool) ([]string, error)    { return p.tokens, nil }
func (p *people) Unprovisioned(context.Context) ([]attach.Account, error) { return p.list, nil }
func (p *people) Revoke(_ context.Context, l []attach.Account, b time.Time) error {
	p.revoked, p.before, p.list = l, b, nil
	return nil
}

// Two cells on one database are refused, whatever they are called.
func TestSharedStores(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dsn := pgtest.DB(t)
	one := w.deploymentAt("one", shared, dsn)
	w.router(one)
	_, err := one.prepare()
	w.must(err, "prepare")
	two := w.deploymentAt("two", "two.example.com", dsn)
	_, err = two.prepare()
	w.refused(err, "carry the state of cell one")
}

// The configuration changes in two steps, each of which may be the last of a run.
func TestUpdate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.first("acme")
	w.must(one.rows.Leave(t.Context(), "nobody"), "nothing")
	old := one.config
	next := old
	next.BearerIssuers, next.Tenants = []string{"iss-one", "iss-new"}, []cells.TenantID{"code"}
	update := func(adjust ...func(*attach.Cell)) error {
		c := one.cell(adjust...)
		c.Config = next
		_, err := c.Next(t.Context())
		return err
	}
	if err := update(killedAt(attach.StepNext)); !errors.Is(err, errKilled) {
		t.Fatalf("killed: %v", err)
	}
	if one.row("one").Next == nil || one.state().Self.Next != nil {
		t.Error("the directory reserves before a process accepts")
	}
	other := one.cell()
	other.Config = old
	other.Config.BearerIssuers = []string{"third"}
	_, err := other.Next(t.Context())
	w.refused(err, "another next configuration")
	w.must(update(), "the same again")
	if one.where("code") != "one" || one.state().Self.Next == nil {
		t.Errorf("code is in %q, own row %+v", one.where("code"), one.state().Self)
	}
	soon := func(c *attach.Cell) { c.Wait = 300 * time.Millisecond }
	_, err = one.cell(soon).Finish(t.Context(), false)
	w.refused(err, "one-1", "both configurations stay")
	// A process on the next one: both serve, and it cannot be reverted.
	one.config = next
	p, stop := one.process("one-2")
	if ok, why := p.Ready(); !ok {
		t.Errorf("a process on next is not ready: %s", why)
	}
	_, err = one.cell(soon).Revert(t.Context())
	w.refused(err, "one-2", "both configurations stay")
	stop()
	_, err = one.cell().Revert(t.Context())
	w.must(err, "revert")
	if one.row("one").Next != nil || one.state().Self.Next != nil || one.where("code") != "one" {
		t.Error("the revert left next, or took a placement")
	}
	_, err = one.cell().Revert(t.Context())
	w.refused(err, "no next configuration")
	_, err = one.cell().Finish(t.Context(), false)
	w.refused(err, "no next configuration")
	// Finished by a run that died between the own row and the directory, and another one.
	w.must(update(), "update again")
	f := one.fingerprint() // of next
	w.must(one.rows.Beat(t.Context(), tenancy.Heartbeat{Instance: "only", Cell: "one", Mode: tenancy.Enforced, Fingerprint: &f}), "a heartbeat")
	only := func(c *attach.Cell) { c.Rows = onlyRows{one.rows} }
	if _, err := one.cell(only, killedAt(attach.StepSelf)).Finish(t.Context(), false); !errors.Is(err, errKilled) {
		t.Fatalf("killed: %v", err)
	}
	// The first own-row write of a finish is of both values; die at the second one.
	n := 0
	second := func(c *attach.Cell) {
		c.Done = func(_ context.Context, s attach.Step) error {
			if s == attach.StepSelf {
				if n++; n == 2 {
					return errKilled
				}
			}
			return nil
		}
	}
	if _, err := one.cell(only, second).Finish(t.Context(), false); !errors.Is(err, errKilled) {
		t.Fatalf("killed: %v", err)
	}
	if s := one.state().Self; s.Next != nil || !s.Current.Equal(f) || one.row("one").Next == nil {
		t.Errorf("own row %+v", s)
	}
	_, err = one.cell().Revert(t.Context())
	w.refused(err, "is being finished")
	_, err = one.cell(only).Finish(t.Context(), false)
	w.must(err, "finish")
	if row := one.row("one"); row.Next != nil || !row.Current.Equal(f) {
		t.Errorf("the directory has %+v", row)
	}
	moved := one.cell()
	moved.Config = next
	_, err = moved.Addresses(t.Context(), one.probe)
	w.refused(err, "the router's own configuration")
	_, err = moved.Addresses(t.Context(), "")
	w.must(err, "addresses")
}

// onlyRows sees the heartbeat of one process.
type onlyRows struct{ tenancy.Store }

func (o onlyRows) Heartbeats(ctx context.Context, within time.Duration) (out []tenancy.Heartbeat, err error) {
	list, err := o.Store.Heartbeats(ctx, time.Minute)
	for _, h := range list {
		if h.Instance == "only" {
			out = append(out, h)
		}
	}
	return out, err
}

// What a restore of the cell's database takes comes back.
func TestRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.first("acme", "beta")
	_, err := one.cell().Restore(t.Context())
	w.refused(err, "one-1", "stop them")
	w.must(one.rows.Leave(t.Context(), "one-1"), "its end")
	stopped := func(c *attach.Cell) { c.Rows = onlyRows{one.rows} } // the process of the test goes on
	for what, take := range map[string][]string{
		"before enforced": {`UPDATE cell.own_mode SET mode = 'recording'`, `DELETE FROM cell.tenancy WHERE tenant = 'beta'`},
		"the mode row":    {`DELETE FROM cell.own_mode`},
		"the own row":     {`DELETE FROM cell.own_self`, `DELETE FROM cell.tenancy`},
		"before prepare": {`ALTER TABLE cell.own_first DISABLE TRIGGER ALL`, `DELETE FROM cell.own_first`, `ALTER TABLE cell.own_first ENABLE ALWAYS TRIGGER own_first_row`,
			`ALTER TABLE cell.own_first ENABLE ALWAYS TRIGGER own_first_truncate`, `DELETE FROM cell.own_mode`, `DELETE FROM cell.own_self`, `DELETE FROM cell.tenancy`},
	} {
		for _, q := range take {
			one.sql(q)
		}
		_, err := one.attach()
		w.refused(err, "cell restore")
		out, err := one.cell(stopped).Restore(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if s := one.state(); s.State() != tenancy.StateEnforced || s.Mode != tenancy.Enforced || one.held() != "[acme beta]" || out.Tenants != 2 || out.Prepare {
			t.Errorf("%s: %+v, held %s", what, s, one.held())
		}
		w.refused(one.try(`INSERT INTO items VALUES ('x', 1)`), tenancy.SQLState)
	}
	// Another cell's stores.
	two := w.deployment("two", "two.example.com")
	_, err = two.cell(func(c *attach.Cell) { c.Name = "one" }).Restore(t.Context())
	w.refused(err, "cell one is deployment")
	// A prepared cell keeps its own row.
	_, err = two.prepare()
	w.must(err, "prepare two")
	two.sql(`DELETE FROM cell.own_mode`)
	out, err := two.cell().Restore(t.Context())
	if err != nil || out.Prepare || two.state().State() != tenancy.StateEnforced || out.Before.State() != tenancy.StatePartial {
		t.Errorf("restored %+v, %v", out, err)
	}
	two.sql(`DELETE FROM cell.own_self`)
	if out, err = two.cell().Restore(t.Context()); err != nil || !out.Prepare {
		t.Errorf("without an own row: %+v, %v", out, err)
	}
}

// fences remember orders; a stale one is refused as a guard refuses it.
type fences struct {
	got  []string
	next attach.Fences // the real ones, if not nil
}

func (f *fences) OpenFence(ctx context.Context, o cells.FenceOrder) error {
	f.got = append(f.got, fmt.Sprintf("open %s %d in %s", o.Tenant, o.Epoch, o.Cell))
	if f.next != nil {
		return f.next.OpenFence(ctx, o)
	}
	return nil
}

func (f *fences) CloseFence(ctx context.Context, o cells.FenceOrder) error {
	if o.Tenant == "newer" {
		return cells.ErrStaleOrder
	}
	f.got = append(f.got, fmt.Sprintf("close %s %d in %s by %s", o.Tenant, o.Epoch, o.Cell, o.Move))
	if f.next != nil {
		return f.next.CloseFence(ctx, o)
	}
	return nil
}

// In a movable directory a restore raises the fences before anything else is written.
func TestRestoreRaisesFences(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	w.must(w.store.Settle(t.Context(), deploy.Movable, api.AuditEntry{At: time.Now(), Action: "test"}), "settle")
	for _, tenant := range []string{"stays", "left", "back", "newer"} {
		one.sql(`INSERT INTO items VALUES ($1, 1)`, tenant)
	}
	_, err := one.prepare()
	w.must(err, "prepare")
	_, stop := one.process("one-1")
	_, err = one.attach()
	w.must(err, "attach")
	two := w.deployment("two", "two.example.com")
	_, err = two.prepare()
	w.must(err, "prepare two")
	two.process("two-1")
	_, err = two.rows.EnsureTriggers(t.Context())
	w.must(err, "triggers")
	_, err = two.attach(func(c *attach.Cell) { c.Peers = []attach.Peer{{Cell: "one", Rows: one.rows, Stores: one.stores.Set}} })
	w.must(err, "attach two")
	move := func(tenant cells.TenantID, from, to cells.CellID, epoch cells.Epoch, id cells.MoveID) {
		t.Helper()
		_, err := w.store.Repoint(t.Context(), deploy.Repoint{Tenant: tenant, From: from, To: to, Epoch: epoch, Move: id, At: time.Now()}, api.AuditEntry{At: time.Now(), Action: "test"})
		w.must(err, "a move")
	}
	move("left", "one", "two", 3, "m-1")
	move("newer", "one", "two", 3, "m-2")
	move("back", "one", "two", 3, "m-3")
	move("back", "two", "one", 5, "m-4")
	stop()
	_, err = one.cell().Restore(t.Context())
	w.refused(err, "has no fences")
	f := &fences{}
	_, err = one.cell(func(c *attach.Cell) { c.Fences = f }, killedAt(attach.StepFences)).Restore(t.Context())
	if !errors.Is(err, errKilled) {
		t.Fatalf("killed: %v", err)
	}
	if got := strings.Join(f.got, ", "); got != "open back 5 in one, close left 2 in one by m-1" {
		t.Errorf("fences: %s", got)
	}
	pool, err := pgxpool.New(t.Context(), one.dsn)
	w.must(err, "the database")
	t.Cleanup(pool.Close)
	g, err := postgres.New(pool)
	w.must(err, "the fences")
	w.must(g.Install(t.Context(), nil), "the fences")
	f.next = g
	out, err := one.cell(func(c *attach.Cell) { c.Fences = f }).Restore(t.Context())
	w.must(err, "restore")
	// What has left is not held; of what has a newer fence the directory knows too little.
	if out.Tenants != 2 || out.Fences != 2 || out.Left != 1 || one.held() != "[back newer stays]" {
		t.Errorf("restored %+v, held %s", out, one.held())
	}
}
