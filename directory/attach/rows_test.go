// SPDX-License-Identifier: Apache-2.0

package attach_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// What takes the rows of a cell; the first row only to who takes its triggers first.
var (
	takeFirst = []string{`ALTER TABLE cell.own_first DISABLE TRIGGER ALL`, `DELETE FROM cell.own_first`, `ALTER TABLE cell.own_first ENABLE ALWAYS TRIGGER own_first_row`,
		`ALTER TABLE cell.own_first ENABLE ALWAYS TRIGGER own_first_truncate`}
	takeMode    = []string{`DELETE FROM cell.own_mode`}
	takeSelf    = []string{`DELETE FROM cell.own_self`}
	takeTenancy = []string{`DELETE FROM cell.tenancy`}
)

func (d *deployment) take(rows ...[]string) {
	d.Helper()
	for _, list := range rows {
		for _, q := range list {
			d.sql(q)
		}
	}
}

// follows waits until a process serves, or is gated for a reason.
func (w *world) follows(what string, p *checks.Process, reason string) {
	w.Helper()
	w.eventually(what+": "+reason, func() bool { return p.Reason().Code == reason })
}

// A row of the state that is removed from an attached cell, in each combination: every
// process is gated, the stores refuse what the cell does not hold, and prepare, run again
// beside the gated processes, writes the rows back.
func TestRemovedRows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	one.sql(`INSERT INTO items VALUES ('acme', 1)`)
	_, err := one.prepare()
	w.must(err, "prepare")
	p, _ := one.process("one-1")
	_, err = one.attach()
	w.must(err, "attach")
	bare, stop := one.process("bare", func(c *checks.Config) { c.Cell, c.Fingerprint = "", tenancy.Fingerprint{} })
	w.follows("without CELL", bare, tenancy.ReasonNoCell)
	for what, rows := range map[string][][]string{
		"the mode row":                    {takeMode},
		"the first row":                   {takeFirst},
		"the own row":                     {takeSelf},
		"both, beside the own row":        {takeFirst, takeMode, takeTenancy},
		"both, beside a tenancy row":      {takeFirst, takeMode, takeSelf},
		"all but the first row, and held": {takeMode, takeSelf, takeTenancy},
	} {
		one.take(rows...)
		if s := one.state(); s.State() != tenancy.StatePartial {
			t.Fatalf("%s: %s", what, s.State())
		}
		w.follows(what, p, tenancy.ReasonPartial)
		w.follows(what+", without CELL", bare, tenancy.ReasonPartial)
		w.refused(one.try(`INSERT INTO items VALUES ('stranger', 1)`), tenancy.SQLState)
		if err := p.EnsureHeld(t.Context(), "acme", checks.Principal{Tenant: "acme", Subject: "s"}); cells.AnswerOf(err) == nil || cells.AnswerOf(err).Code != cells.CodeAuthUnavailable {
			t.Errorf("%s: a held tenant is answered %v", what, err)
		}
		stop() // as a process of a cell that does not run as one, it would be refused
		if _, err := one.prepare(); err != nil {
			t.Fatalf("%s: prepare again: %v", what, err)
		}
		if s := one.state(); s.State() != tenancy.StateEnforced || s.First == nil || !s.First.First || s.First.Cell != "one" {
			t.Errorf("%s: prepare left %+v", what, s)
		}
		w.follows(what+", prepared again", p, "")
		// A tenancy row that is gone comes back with the next request, from the directory.
		w.must(p.EnsureHeld(t.Context(), "acme", checks.Principal{Tenant: "acme", Subject: "s"}), what+": a placed tenant")
		if one.held() != "[acme]" {
			t.Errorf("%s: held %s", what, one.held())
		}
		bare, stop = one.process("bare", func(c *checks.Config) { c.Cell, c.Fingerprint = "", tenancy.Fingerprint{} })
		w.follows(what+", prepared again, without CELL", bare, tenancy.ReasonNoCell)
	}

	// No row at all: as a deployment that was never prepared, whatever the directory says.
	one.take(takeFirst, takeMode, takeSelf, takeTenancy)
	w.follows("no row", p, tenancy.ReasonUnprepared)
	w.follows("no row, without CELL", bare, "")
	w.must(one.try(`INSERT INTO items VALUES ('stranger', 1)`), "a row of whomever, in an open deployment")
	stop()
	_, err = one.prepare()
	w.must(err, "prepare again")
	w.follows("prepared again", p, "")
	bare, _ = one.process("bare", func(c *checks.Config) { c.Cell, c.Fingerprint = "", tenancy.Fingerprint{} })
	w.follows("prepared again, without CELL", bare, tenancy.ReasonNoCell)
	if one.held() != "[]" {
		t.Errorf("prepare wrote tenancy rows: %s", one.held())
	}
	w.must(p.EnsureHeld(t.Context(), "acme", checks.Principal{Tenant: "acme", Subject: "s"}), "a placed tenant")
	if one.held() != "[acme]" {
		t.Errorf("held %s", one.held())
	}
	unheld, err := one.rows.Unheld(t.Context())
	if err != nil || len(unheld) != 1 || unheld[0].Tenant != "stranger" {
		t.Errorf("what was written meanwhile: %+v, %v", unheld, err)
	}
}

// A first cell that was prepared and not attached, restored to before that: its processes
// serve nothing until prepare has run again, which a restore says.
func TestRestoredBeforePrepare(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	_, err := one.prepare()
	w.must(err, "prepare")
	p, stop := one.process("one-1")
	w.must(p.EnsureHeld(t.Context(), "acme", checks.Principal{Tenant: "acme", Subject: "s"}), "a new tenant, recorded")
	stop()
	one.take(takeFirst, takeMode, takeSelf, takeTenancy)
	out, err := one.cell().Restore(t.Context())
	if err != nil || !out.Prepare || out.Tenants != 0 {
		t.Fatalf("restored %+v, %v", out, err)
	}
	p, _ = one.process("one-2")
	if r := p.Reason(); r.Code != tenancy.ReasonPartial || !strings.Contains(r.Text, "cell prepare") {
		t.Errorf("restored and started: %+v", r)
	}
	_, err = one.attach()
	w.refused(err, "run cell prepare again")
	if err := p.EnsureHeld(t.Context(), "acme", checks.Principal{Tenant: "acme", Subject: "s"}); cells.AnswerOf(err) == nil {
		t.Errorf("it serves: %v", err)
	}
	_, err = one.prepare()
	w.must(err, "prepare again")
	w.follows("prepared again", p, "")
	w.must(p.EnsureHeld(t.Context(), "acme", checks.Principal{Tenant: "acme", Subject: "s"}), "a tenant, recorded again")
	if s := one.state(); s.State() != tenancy.StateRecording || one.held() != "[acme]" {
		t.Errorf("%+v, held %s", s, one.held())
	}
	_, err = one.attach()
	w.must(err, "attach")
}

// The insert of a new tenant that is held open keeps attach from setting the mode: it
// gives up in time and says what the mode is. Another run goes on, and places the tenant.
func TestHeldInsert(t *testing.T) {
	t.Parallel()
	w, one := prepared(t)
	conn, err := pgx.Connect(t.Context(), one.dsn)
	w.must(err, "a session")
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	w.must(err, "a transaction")
	_, err = tx.Exec(t.Context(), `INSERT INTO cell.tenancy (tenant) SELECT 'slow' FROM cell.own_mode WHERE mode = 'recording' FOR SHARE`)
	w.must(err, "the insert")
	for range 2 {
		_, err = one.attach(func(c *attach.Cell) { c.Wait = 4 * time.Second })
		w.refused(err, "the mode was not set within --wait and is recording now")
		if row := one.row("one"); one.state().Mode != tenancy.Recording || row.State != deploy.Attaching || row.Mode != tenancy.Enforced {
			t.Errorf("%s; with the directory %s, %s", one.state().Mode, row.State, row.Mode)
		}
	}
	w.must(tx.Commit(t.Context()), "its end")
	_, err = one.attach()
	w.must(err, "attach")
	if one.where("slow") != "one" || one.held() != "[slow]" || one.state().Mode != tenancy.Enforced {
		t.Errorf("slow is in %q; held %s, %s", one.where("slow"), one.held(), one.state().Mode)
	}
}
