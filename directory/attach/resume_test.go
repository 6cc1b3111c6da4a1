// SPDX-License-Identifier: Apache-2.0

package attach_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

var errKilled = errors.New("killed")

// killedAt ends a command when a step is persisted, as a crash does.
func killedAt(step attach.Step) func(*attach.Cell) {
	return func(c *attach.Cell) {
		c.Done = func(_ context.Context, s attach.Step) error {
			if s == step {
				return errKilled
			}
			return nil
		}
	}
}

// Every run of the first attach is ended at another step; each resumes, and what comes
// in between is placed.
func TestFirstAttachResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	one.sql(`INSERT INTO items VALUES ('before', 1)`)
	for _, step := range []attach.Step{attach.StepChecked, attach.StepNonces, attach.StepRegistered} {
		_, err := one.cell(killedAt(step)).Prepare(t.Context(), attach.Preparation{Host: shared, CredentialSHA256: one.sum})
		if !errors.Is(err, errKilled) {
			t.Fatalf("prepare at %s: %v", step, err)
		}
		if n, err := one.stores.ReadNonces(t.Context()); err != nil || len(n) > 0 {
			t.Errorf("nonces are left: %v, %v", n, err)
		}
	}
	if s := one.state().State(); s != tenancy.StateOpen {
		t.Errorf("a prepare that stopped before its rows left %s", s)
	}
	_, err := one.prepare()
	w.must(err, "prepare")
	p, _ := one.process("one-1")
	for i, step := range []attach.Step{attach.StepChecked, attach.StepDirectory, attach.StepHeld, attach.StepRecorded, attach.StepEnforced, attach.StepReported,
		attach.StepPeople, attach.StepTriggers, attach.StepQuiet, attach.StepPlaced} {
		tenant := cells.TenantID(fmt.Sprintf("at-%d", i))
		mode := one.state().Mode
		if mode == tenancy.Recording {
			if _, err := one.rows.EnsureTriggers(t.Context()); err != nil {
				t.Fatal(err)
			}
			one.sql(`INSERT INTO items VALUES ($1, 1)`, string(tenant))
		}
		_, err := one.attach(killedAt(step))
		if !errors.Is(err, errKilled) {
			t.Fatalf("attach at %s: %v", step, err)
		}
		row := one.row("one")
		if started := !row.AttachStartedAt.IsZero(); started != (i > 0) {
			t.Errorf("at %s the attach has begun: %t", step, started)
		}
		if (row.Mode == tenancy.Enforced) != (i >= 3) || (one.state().Mode == tenancy.Enforced) != (i >= 4) || row.State != deploy.Attaching {
			t.Errorf("at %s: %s with the directory, %s in the cell, %s", step, row.Mode, one.state().Mode, row.State)
		}
		if ok, why := p.Ready(); !ok {
			t.Errorf("at %s the process is not ready: %s", step, why)
		}
		if one.where("before") != "one" && i > 0 {
			t.Errorf("at %s: before is in %q", step, one.where("before"))
		}
	}
	// What a writer that does not know of the check left without a trigger.
	one.sql(`ALTER TABLE items DISABLE TRIGGER ALL`)
	one.sql(`INSERT INTO items VALUES ('script', 1)`)
	_, err = one.attach()
	w.must(err, "the last attach")
	for _, tenant := range []cells.TenantID{"before", "at-0", "at-1", "at-2", "at-3", "at-4", "script"} {
		if one.where(tenant) != "one" || !strings.Contains(one.held(), string(tenant)) {
			t.Errorf("%s is in %q, held %s", tenant, one.where(tenant), one.held())
		}
	}
	w.refused(one.try(`INSERT INTO items VALUES ('later', 1)`), tenancy.SQLState)
}

// soon is a short wait. The mode is written all the same: a try may take longer than
// that, and would not be begun.
func (d *deployment) soon() func(*attach.Cell) {
	r := &rows{Store: d.rows, set: func(m tenancy.Mode, _ tenancy.ModeWrite) (tenancy.Mode, error) {
		return d.rows.SetMode(d.Context(), m, tenancy.ModeWrite{})
	}}
	return func(c *attach.Cell) { c.Rows, c.Wait, c.Alive = r, 4*time.Second, time.Minute }
}

// Processes that do not follow bring recording back.
func TestFirstAttachWaitsForProcesses(t *testing.T) {
	t.Parallel()
	w, one := prepared(t)
	// A process that stands still: its heartbeat is fresh and says recording.
	f := one.fingerprint()
	stuck := func(mode tenancy.Mode) {
		t.Helper()
		w.must(one.rows.Beat(t.Context(), tenancy.Heartbeat{Instance: "stuck", Cell: "one", Mode: mode, Fingerprint: &f}), "a heartbeat")
	}
	stuck(tenancy.Recording)
	soon := one.soon()
	_, err := one.attach(soon)
	w.refused(err, "stuck (recording)", "the mode is recording again")
	if m := one.state().Mode; m != tenancy.Recording || one.row("one").Mode != tenancy.Enforced {
		t.Errorf("after a refused wait: %s, with the directory %s", m, one.row("one").Mode)
	}
	w.must(one.rows.Leave(t.Context(), "stuck"), "its end")
	_, err = one.attach()
	w.must(err, "attach")
}

// A transaction that outlasts the wait leaves enforced, and holds the rerun, too.
func TestFirstAttachWaitsForTransactions(t *testing.T) {
	t.Parallel()
	w, one := prepared(t)
	soon := one.soon()
	conn, err := pgx.Connect(t.Context(), one.dsn)
	w.must(err, "a session")
	defer conn.Close(context.Background())
	tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	w.must(err, "a transaction")
	var mode string
	w.must(tx.QueryRow(t.Context(), `SELECT mode FROM cell.own_mode`).Scan(&mode), "its first statement")
	if mode != "recording" {
		t.Fatalf("the transaction reads %s", mode)
	}
	for range 2 { // the rerun is held as well
		_, err = one.attach(soon)
		w.refused(err, "transactions that may have read recording are open", fmt.Sprintf("pid %d", conn.PgConn().PID()), "stays enforced")
		if m := one.state().Mode; m != tenancy.Enforced || one.row("one").State != deploy.Attaching {
			t.Errorf("after a refused wait: %s, %s", m, one.row("one").State)
		}
	}
	// Its write passes by its snapshot where it has one of recording, and is placed.
	if _, err := tx.Exec(t.Context(), `INSERT INTO items VALUES ('old', 1)`); err != nil {
		t.Logf("its write: %v", err)
		w.must(tx.Rollback(t.Context()), "rollback")
	} else {
		w.must(tx.Commit(t.Context()), "commit")
	}
	_, err = one.attach()
	w.must(err, "attach")
	if one.where("old") != "one" {
		t.Errorf("what the old transaction wrote is in %q", one.where("old"))
	}
}

// A tenant that a request records between the directory's transaction and enforced is
// placed, beyond a quota and in a closed cell.
func TestFirstAttachPlacesWhatIsRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.deployment("one", shared)
	w.router(one)
	one.sql(`INSERT INTO items VALUES ('a', 1), ('b', 1)`)
	_, err := one.prepare()
	w.must(err, "prepare")
	yes, max := true, int64(1)
	w.change("one", deploy.Limit(&yes, &max))
	p, _ := one.process("one-1")
	_, err = one.attach(func(c *attach.Cell) {
		c.Done = func(ctx context.Context, s attach.Step) error {
			if s == attach.StepDirectory {
				return p.EnsureHeld(ctx, "recorded", checks.Principal{Tenant: "recorded"})
			}
			return nil
		}
	})
	w.must(err, "attach")
	if one.held() != "[a b recorded]" || one.where("recorded") != "one" || one.row("one").Placements != 3 {
		t.Errorf("held %s, %d placed", one.held(), one.row("one").Placements)
	}
	if err := p.EnsureHeld(t.Context(), "new", checks.Principal{Tenant: "new"}); err == nil {
		t.Error("a closed cell took a tenant")
	}
}

// Each step of a later attach is the last of a run; the next one goes on.
func TestLaterAttachResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one := w.first("acme")
	two := w.deployment("two", "two.example.com")
	two.config.Tenants = []cells.TenantID{"plans"}
	_, err := two.prepare()
	w.must(err, "prepare two")
	two.process("two-1")
	_, err = two.rows.EnsureTriggers(t.Context())
	w.must(err, "its start")
	peers := func(c *attach.Cell) { c.Peers = []attach.Peer{{Cell: "one", Rows: one.rows, Stores: one.stores.Set}} }
	for i, step := range []attach.Step{attach.StepChecked, attach.StepDirectory, attach.StepHeld, attach.StepSelf, attach.StepPeople} {
		_, err := two.attach(peers, killedAt(step))
		if !errors.Is(err, errKilled) {
			t.Fatalf("at %s: %v", step, err)
		}
		row := two.row("two")
		if row.AttachStartedAt.IsZero() != (i == 0) || row.State != deploy.Attaching || slices.Contains(row.Issuers(), "iss-two") != (i > 0) {
			t.Errorf("at %s: %+v", step, row)
		}
	}
	_, err = two.attach(peers)
	w.must(err, "attach two")
	if two.held() != "[plans]" || two.row("two").State != deploy.Serving {
		t.Errorf("held %s, %s", two.held(), two.row("two").State)
	}
}

// What a process says about how long it uses what it has read counts, where it is longer
// than what the command was told.
func TestAttachWaitsForTheLongestCache(t *testing.T) {
	t.Parallel()
	w, one := prepared(t)
	one.process("slow", func(c *checks.Config) { c.CacheFor = 700 * time.Millisecond })
	var told []string
	began := time.Now()
	_, err := one.attach(func(c *attach.Cell) {
		c.Tell = func(_ attach.Step, detail string) { told = append(told, detail) }
	})
	w.must(err, "attach")
	if all := strings.Join(told, "\n"); !strings.Contains(all, "process slow uses what it has read for 700ms") || !strings.Contains(all, "waiting 760ms") || time.Since(began) < 760*time.Millisecond {
		t.Errorf("it did not wait for the slow one:\n%s", all)
	}
}
