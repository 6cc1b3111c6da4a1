// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/guard/guardtest"
)

func TestMutantsOfTheProcess(t *testing.T) {
	literals := guardtest.Literals{True: "true", False: "false"}
	for _, m := range guardtest.Mutants(literals, "read-committed") {
		m.Check(t, harness(t, false, nil))
	}
}

// edit is a change of what Install has made in a database.
type edit struct {
	// function, and the text in it that is replaced. "@s" is the schema.
	function, from, to string
	// sql is run as it is.
	sql string
}

// functions returns schema.sql's, by name.
func functions(t testing.TB) map[string]string {
	script, err := os.ReadFile("schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`(?s)CREATE OR REPLACE FUNCTION @s\.(\w+)\(.*?\n\$\$;`).FindAllStringSubmatch(string(script), -1) {
		out[m[1]] = m[0]
	}
	return out
}

func apply(t testing.TB, edits []edit) func(context.Context, *pgxpool.Pool, string) error {
	return func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
		fns := functions(t)
		for _, e := range edits {
			stmt := e.sql
			if e.function != "" {
				def := fns[e.function]
				if strings.Count(def, e.from) != 1 {
					t.Errorf("function %s does not have this once: %s", e.function, e.from)
				}
				stmt = strings.Replace(def, e.from, e.to, 1)
				fns[e.function] = stmt
			}
			if _, err := pool.Exec(ctx, strings.ReplaceAll(stmt, "@s", schema)); err != nil {
				return err
			}
		}
		return nil
	}
}

const (
	advisory  = `PERFORM pg_advisory_xact_lock_shared(@s.fence_key(p_tenant));`
	onlyAbove = `IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
	   AND current_setting('transaction_read_only') = 'off' THEN`
)

// TestMutantsOfTheLocking has the ways to lock that are not safe at every
// isolation level (see docs/decisions/0002-fence-locking.md), among others.
func TestMutantsOfTheLocking(t *testing.T) {
	for _, m := range []struct {
		guardtest.Mutant
		edits []edit
	}{
		{guardtest.Mutant{Name: "no lock", Only: []string{"in-flight", "paused-writer"}}, []edit{
			{function: "locked_fence", from: advisory},
			{function: "locked_fence", from: "FOR SHARE"},
		}},
		{guardtest.Mutant{Name: "row lock above read committed only", Only: []string{"in-flight", "paused-writer"}}, []edit{
			{function: "locked_fence", from: advisory},
		}},
		{guardtest.Mutant{Name: "advisory lock and an ordinary read", Only: []string{"old-snapshot"}}, []edit{
			{function: "locked_fence", from: "FOR SHARE"},
		}},
		{guardtest.Mutant{Name: "advisory lock and an ordinary read, at random", Only: []string{"interleavings"}}, []edit{
			{function: "locked_fence", from: "FOR SHARE"},
		}},
		{guardtest.Mutant{Name: "advisory lock after the read", Only: []string{"late-writer", "busy", "interleavings"}}, []edit{
			{function: "locked_fence", from: advisory},
			{function: "locked_fence", from: "RETURN f;", to: advisory + " RETURN f;"},
		}},
		{guardtest.Mutant{Name: "key share lock", Only: []string{"in-flight", "paused-writer"}}, []edit{
			{function: "locked_fence", from: advisory},
			{function: "locked_fence", from: onlyAbove, to: "IF true THEN"},
			{function: "locked_fence", from: "FOR SHARE", to: "FOR KEY SHARE"},
		}},
		{guardtest.Mutant{Name: "lock of the session", Only: []string{"in-flight", "paused-writer"}}, []edit{
			{function: "locked_fence", from: "pg_advisory_xact_lock_shared", to: "pg_advisory_lock_shared"},
		}},
		{guardtest.Mutant{Name: "check at commit by an ordinary read", Only: []string{"in-flight", "old-snapshot", "paused-writer"}}, checkAtCommit("")},
		{guardtest.Mutant{Name: "check at commit by a locking read", Only: []string{"in-flight"}}, checkAtCommit("FOR SHARE")},
		{guardtest.Mutant{Name: "floor ignored", Only: []string{"admit"}}, []edit{{function: "admit", from: "OR p_epoch < f.floor"}}},
		{guardtest.Mutant{Name: "higher epochs admitted", Only: []string{"admit"}}, []edit{{function: "admit", from: "OR p_epoch > f.epoch"}}},
		{guardtest.Mutant{Name: "closed fences admit", Only: []string{"admit"}}, []edit{{function: "admit", from: "OR NOT f.is_open"}}},
		{guardtest.Mutant{Name: "import by any move", Only: []string{"imports"}}, []edit{{function: "admit_closed", from: "OR f.move <> coalesce(p_move, f.move)"}}},
		{guardtest.Mutant{Name: "import at any epoch", Only: []string{"imports"}}, []edit{{function: "admit_closed", from: "OR f.epoch IS DISTINCT FROM p_epoch"}}},
		{guardtest.Mutant{Name: "import while open", Only: []string{"imports"}}, []edit{{function: "admit_closed", from: "OR f.is_open"}}},
		{guardtest.Mutant{Name: "import without a lock", Only: []string{"imports"}}, []edit{
			{function: "admit_closed", from: ":= @s.locked_fence(p_tenant)"},
			{function: "admit_closed", from: "BEGIN", to: "BEGIN SELECT * INTO f FROM @s.fence WHERE tenant = p_tenant;"},
		}},
		{guardtest.Mutant{Name: "import that may emit", Only: []string{"imports"}}, []edit{{function: "admit_closed", from: "set_config('@s.admission', ''", to: "set_config('@s.admission', '1 '"}}},
		{guardtest.Mutant{Name: "numbers of a sequence", Only: []string{"gapless"}}, []edit{
			{sql: `CREATE SEQUENCE @s.mutant`},
			{function: "emit", from: "UPDATE @s.outbox_head SET seq = seq + 1 WHERE tenant = v_tenant RETURNING seq INTO v_seq;", to: "v_seq := nextval('@s.mutant');"},
			{function: "emit", from: "IF NOT FOUND THEN", to: "IF false THEN"},
		}},
		{guardtest.Mutant{Name: "numbers without a lock", Only: []string{"gapless"}}, []edit{
			{function: "emit", from: "UPDATE @s.outbox_head SET seq = seq + 1 WHERE tenant = v_tenant RETURNING seq INTO v_seq;", to: "v_seq := @s.last_seq(v_tenant) + 1;"},
			{function: "emit", from: "IF NOT FOUND THEN", to: "IF false THEN"},
		}},
		{guardtest.Mutant{Name: "no trigger on updates", Only: []string{"protected"}}, []edit{{sql: `DROP TRIGGER zz_cell_guard_update ON guardtest_rows`}}},
		{guardtest.Mutant{Name: "trigger for the new row only", Only: []string{"protected"}}, []edit{
			{sql: `DROP TRIGGER zz_cell_guard_update ON guardtest_rows`},
			{sql: `CREATE TRIGGER zz_cell_guard_update AFTER UPDATE ON guardtest_rows FOR EACH ROW
				WHEN ((pg_current_xact_id()::text || ' ') || NEW.tenant IS DISTINCT FROM current_setting('@s.admitted', true)) EXECUTE FUNCTION @s.refuse('tenant')`},
		}},
		{guardtest.Mutant{Name: "trigger for the old row only", Only: []string{"protected"}}, []edit{
			{sql: `DROP TRIGGER zz_cell_guard_update ON guardtest_rows`},
			{sql: `CREATE TRIGGER zz_cell_guard_update AFTER UPDATE ON guardtest_rows FOR EACH ROW
				WHEN ((pg_current_xact_id()::text || ' ') || OLD.tenant IS DISTINCT FROM current_setting('@s.admitted', true)) EXECUTE FUNCTION @s.refuse('tenant')`},
		}},
		{guardtest.Mutant{Name: "no trigger on truncate", Only: []string{"protected"}}, []edit{{sql: `DROP TRIGGER zz_cell_guard_truncate ON guardtest_rows`}}},
		{guardtest.Mutant{Name: "no trigger on the outbox", Only: []string{"protected"}}, []edit{{sql: `DROP TRIGGER zz_cell_guard_delete ON @s.outbox`}}},
		{guardtest.Mutant{Name: "admission of the session", Only: []string{"pooled"}}, []edit{
			{function: "admit", from: "pg_current_xact_id()::text || ' ' || p_tenant, true", to: "'all ' || p_tenant, false"},
			{sql: `DROP TRIGGER zz_cell_guard_insert ON guardtest_rows`},
			{sql: `DROP TRIGGER zz_cell_guard_update ON guardtest_rows`},
			{sql: `CREATE TRIGGER zz_cell_guard_write AFTER INSERT OR UPDATE ON guardtest_rows FOR EACH ROW
				WHEN ('all ' || NEW.tenant IS DISTINCT FROM current_setting('@s.admitted', true)) EXECUTE FUNCTION @s.refuse('tenant')`},
		}},
	} {
		h := harness(t, false, apply(t, m.edits))
		h.Interleavings = 400
		m.Check(t, h)
	}
}

// checkAtCommit admits whatever comes and looks at the fence in a deferred
// constraint trigger, for which the epoch travels in a setting.
func checkAtCommit(lock string) []edit {
	return []edit{
		{function: "admit", from: `f := @s.locked_fence(p_tenant);
	IF`, to: `PERFORM set_config('@s.admitted', pg_current_xact_id()::text || ' ' || p_tenant, true),
			set_config('@s.admission', p_epoch::text || ' ' || coalesce(p_cell, ''), true);
		RETURN;
	IF`},
		{sql: `CREATE FUNCTION @s.at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
			DECLARE f @s.fence; e bigint := split_part(current_setting('@s.admission'), ' ', 1)::bigint;
			BEGIN
				SELECT * INTO f FROM @s.fence WHERE tenant = NEW.tenant ` + lock + `;
				IF NOT f.is_open OR e < f.floor OR e > f.epoch THEN RAISE EXCEPTION 'fenced' USING ERRCODE = 'LT001'; END IF;
				RETURN NULL;
			END $$`},
		{sql: `CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT OR UPDATE ON guardtest_rows DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION @s.at_commit()`},
	}
}
