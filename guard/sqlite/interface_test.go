// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"os"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// documented are the statements of docs/guards.md for services in other languages,
// in order: the check, the number, the event.
func documented(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile("../../docs/guards.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, ok := strings.Cut(string(b), "## Other languages on SQLite\n")
	part, _, ok2 := strings.Cut(part, "\n## ")
	if !ok || !ok2 {
		t.Fatal("docs/guards.md has no such section")
	}
	var code strings.Builder
	for line := range strings.Lines(part) {
		if strings.HasPrefix(line, "    ") {
			code.WriteString(line)
		}
	}
	var out []string
	for _, s := range strings.Split(code.String(), ";") {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	if len(out) != 3 {
		t.Fatalf("%d statements: %q", len(out), out)
	}
	return out
}

// What the documentation tells services in other languages does what the guard does.
func TestDocumentedStatements(t *testing.T) {
	sqls := documented(t)
	db, g := installed(t, "")
	ctx := t.Context()
	for _, tenant := range []cells.TenantID{"a", "moved"} {
		for _, epoch := range []cells.Epoch{2, 3} {
			if err := g.OpenFence(ctx, cells.FenceOrder{Tenant: tenant, Epoch: epoch, Floor: 2}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := g.CloseFence(ctx, cells.FenceOrder{Tenant: "closed", Epoch: 4, Move: "m"}); err != nil {
		t.Fatal(err)
	}
	admitted := func(tx *sql.Tx, tenant string, epoch int) bool {
		t.Helper()
		var n int
		if err := tx.QueryRow(sqls[0], tenant, epoch).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 1
	}
	emit := func(tenant string, epoch int, payload string) (seq int64) {
		t.Helper()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if !admitted(tx, tenant, epoch) {
			t.Fatalf("%s is not admitted at %d", tenant, epoch)
		}
		if err := tx.QueryRow(sqls[1], tenant).Scan(&seq); err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(sqls[2], tenant, seq, epoch, "here", "put", payload); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		return seq
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		tenant string
		epoch  int
		want   bool
	}{{"a", 1, false}, {"a", 2, true}, {"a", 3, true}, {"a", 4, false}, {"closed", 4, false}, {"closed", 3, false}, {"none", 1, false}} {
		if got := admitted(tx, c.tenant, c.epoch); got != c.want {
			t.Errorf("%s at %d: %t", c.tenant, c.epoch, got)
		}
	}
	_ = tx.Rollback()

	// The numbers go on with those of the guard, in either order.
	if seq := emit("a", 3, `{"n":1}`); seq != 1 {
		t.Errorf("the first event is %d", seq)
	}
	err = g.InTx(as(ctx, 3), nil, func(ctx context.Context, tx *sql.Tx) error {
		seq, err := g.Emit(ctx, tx, "put", 2)
		if seq != 2 {
			t.Errorf("the guard's event behind it is %d", seq)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if seq := emit("a", 3, `3`); seq != 3 {
		t.Errorf("the third event is %d", seq)
	}
	events, err := g.Events(ctx, "a", 0, 10)
	if err != nil || len(events) != 3 || events[0].ID == "" || events[0].ID == events[2].ID || events[0].At.IsZero() || string(events[0].Payload) != `{"n":1}` || events[2].Cell != "here" || events[2].Epoch != 3 {
		t.Errorf("events %+v, %v", events, err)
	}
	// A tenant that has come with events and no head.
	if _, err := db.Exec(`INSERT INTO cell_outbox_published VALUES ('moved', 7)`); err != nil {
		t.Fatal(err)
	}
	if seq := emit("moved", 3, `1`); seq != 8 {
		t.Errorf("behind seven events comes %d", seq)
	}
}
