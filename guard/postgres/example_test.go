// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// renameHandler is a whole handler on pgx: the admission comes from the request's
// context, the transaction has passed the fence, the event is in the outbox.
func renameHandler(g *postgres.Guard) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.FormValue("name")
		err := g.Write(r.Context(), func(ctx context.Context, tx *postgres.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO accounts VALUES ($1, $2) ON CONFLICT (tenant) DO UPDATE SET name = excluded.name`, tx.Tenant, name); err != nil {
				return err
			}
			return tx.Emit(ctx, "account.renamed", map[string]string{"name": name})
		})
		answer(w, r, err)
	}
}

// renameSQLHandler is the same on database/sql.
func renameSQLHandler(g *postgres.SQL) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.FormValue("name")
		err := g.Write(r.Context(), func(ctx context.Context, tx *postgres.SQLTx) error {
			if _, err := tx.ExecContext(ctx, `INSERT INTO accounts VALUES ($1, $2) ON CONFLICT (tenant) DO UPDATE SET name = excluded.name`, tx.Tenant, name); err != nil {
				return err
			}
			return tx.Emit(ctx, "account.renamed", map[string]string{"name": name})
		})
		answer(w, r, err)
	}
}

func answer(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case guard.Refused(w, r, err): // edges ask again where the tenant is served now
	case err != nil:
		http.Error(w, "failed", http.StatusInternalServerError)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// The handlers of the examples, called as a gate calls them.
func TestShortForms(t *testing.T) {
	url := pgtest.DB(t)
	pool, g := installed(t, url)
	exec1(t, pool, `CREATE TABLE accounts (tenant text PRIMARY KEY, name text NOT NULL)`)
	if err := g.Install(t.Context(), []guard.Table{{Name: "accounts", TenantColumn: "tenant"}}); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	gs, err := postgres.NewSQL(db)
	if err != nil {
		t.Fatal(err)
	}
	defer gs.Close()
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "acme", Epoch: 3, Floor: 3}); err != nil {
		t.Fatal(err)
	}
	call := func(h http.Handler, name string, a *guard.Admission) (int, cells.Code) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/rename?name="+name, nil)
		if a != nil {
			r = r.WithContext(guard.ContextWith(r.Context(), *a))
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		var p struct{ Code cells.Code }
		_ = json.Unmarshal(w.Body.Bytes(), &p)
		return w.Code, p.Code
	}
	for i, h := range []http.Handler{renameHandler(g), renameSQLHandler(gs)} {
		name := fmt.Sprint("name", i)
		if code, _ := call(h, name, &guard.Admission{Tenant: "acme", Epoch: 3, Cell: "a"}); code != 204 {
			t.Errorf("driver %d: admitted: %d", i, code)
		}
		if code, c := call(h, "stale", &guard.Admission{Tenant: "acme", Epoch: 2}); code != 409 || c != cells.CodeStaleRoute {
			t.Errorf("driver %d: stale: %d %s", i, code, c)
		}
		if code, c := call(h, "none", nil); code != 503 || c != cells.CodeTenancyRefused {
			t.Errorf("driver %d: no admission: %d %s", i, code, c)
		}
		// Reads have one snapshot and the same check.
		var got string
		read := func(ctx context.Context) error {
			if i == 0 {
				return g.Read(ctx, func(ctx context.Context, tx *postgres.Tx) error {
					return tx.QueryRow(ctx, `SELECT name FROM accounts WHERE tenant = $1`, tx.Tenant).Scan(&got)
				})
			}
			return gs.Read(ctx, func(ctx context.Context, tx *postgres.SQLTx) error {
				return tx.QueryRowContext(ctx, `SELECT name FROM accounts WHERE tenant = $1`, tx.Tenant).Scan(&got)
			})
		}
		if err := read(as3(t.Context(), 3)); err != nil || got != name {
			t.Errorf("driver %d: read %q, %v", i, got, err)
		}
		refused(t, read(as3(t.Context(), 2)), "a read of another epoch")
	}
	events, err := g.Events(t.Context(), "acme", 0, 10)
	if err != nil || len(events) != 2 || events[0].Seq != 1 || events[1].Seq != 2 || events[1].Cell != "a" {
		t.Errorf("events %+v, %v", events, err)
	}
}

func as3(ctx context.Context, epoch cells.Epoch) context.Context {
	return guard.ContextWith(ctx, guard.Admission{Tenant: "acme", Epoch: epoch})
}

// Begin is for callers that end their transactions by themselves.
func TestBegin(t *testing.T) {
	url := pgtest.DB(t)
	_, g := installed(t, url)
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	gs, err := postgres.NewSQL(db)
	if err != nil {
		t.Fatal(err)
	}
	defer gs.Close()
	if err := g.OpenFence(t.Context(), cells.FenceOrder{Tenant: "acme", Epoch: 3, Floor: 3}); err != nil {
		t.Fatal(err)
	}
	_, err = gs.Begin(as3(t.Context(), 2), nil)
	refused(t, err, "begin at another epoch")
	tx, err := gs.Begin(as3(t.Context(), 3), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Emit(t.Context(), "e", nil); err != nil || tx.Seq != 1 || tx.Tenant != "acme" {
		t.Errorf("emit: %v, %d for %s", err, tx.Seq, tx.Tenant)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err == nil || !strings.Contains(err.Error(), sql.ErrTxDone.Error()) {
		t.Errorf("a second commit: %v", err)
	}
	// The end of the context rolls back what was not committed.
	ctx, cancel := context.WithCancel(as3(t.Context(), 3))
	tx, err = gs.Begin(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Emit(ctx, "e", nil); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := tx.Commit(); !guard.NothingWritten(err) {
		t.Errorf("commit after the end of the context: %v", err)
	}
	bare, err := gs.BeginUnadmitted(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, bare.Emit(t.Context(), "e", nil), "emit without an admission")
	_ = bare.Rollback()
	if events, err := g.Events(t.Context(), "acme", 0, 10); err != nil || len(events) != 1 {
		t.Errorf("%d events, %v", len(events), err)
	}
	err = gs.Write(as3(t.Context(), 3), func(_ context.Context, tx *postgres.SQLTx) error { return tx.Commit() })
	if err == nil {
		t.Errorf("a function committed its transaction")
	}
}

// A handler needs four lines for the transaction: admitted from the request's
// context, behind the fence, with its event.
func ExampleGuard_Write() {
	var pool *pgxpool.Pool // of the cell's database
	g, err := postgres.New(pool, postgres.WithCell("cell-a"))
	if err != nil {
		panic(err)
	}
	http.HandleFunc("POST /rename", func(w http.ResponseWriter, r *http.Request) {
		err := g.Write(r.Context(), func(ctx context.Context, tx *postgres.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE accounts SET name = $2 WHERE tenant = $1`, tx.Tenant, r.FormValue("name")); err != nil {
				return err
			}
			return tx.Emit(ctx, "account.renamed", nil)
		})
		if guard.Refused(w, r, err) {
			return
		}
		if err != nil {
			http.Error(w, "failed", http.StatusInternalServerError)
		}
	})
}

// The same on database/sql.
func ExampleSQL_Write() {
	var db *sql.DB // of the cell's database
	g, err := postgres.NewSQL(db, postgres.WithCell("cell-a"))
	if err != nil {
		panic(err)
	}
	http.HandleFunc("POST /rename-sql", func(w http.ResponseWriter, r *http.Request) {
		err := g.Write(r.Context(), func(ctx context.Context, tx *postgres.SQLTx) error {
			if _, err := tx.ExecContext(ctx, `UPDATE accounts SET name = $2 WHERE tenant = $1`, tx.Tenant, r.FormValue("name")); err != nil {
				return err
			}
			return tx.Emit(ctx, "account.renamed", nil)
		})
		if guard.Refused(w, r, err) {
			return
		}
		if err != nil {
			http.Error(w, "failed", http.StatusInternalServerError)
		}
	})
}

// The rights that docs/guards.md names are enough for a service's role that owns
// nothing, and the triggers hold for it.
func TestRightsOfAService(t *testing.T) {
	pool, g := installed(t, pgtest.DB(t))
	ctx := t.Context()
	if err := g.OpenFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 3, Floor: 3}); err != nil {
		t.Fatal(err)
	}
	role := fmt.Sprint("app", schemas.Add(1))
	exec1(t, pool, "CREATE ROLE "+role)
	exec1(t, pool, "GRANT SELECT, INSERT, UPDATE, DELETE ON guardtest_rows TO "+role)
	doc, err := os.ReadFile("../../docs/guards.md")
	if err != nil {
		t.Fatal(err)
	}
	grants := 0
	for line := range strings.Lines(string(doc)) {
		if stmt, _, ok := strings.Cut(strings.TrimSpace(line), ";"); ok && strings.HasPrefix(stmt, "GRANT ") {
			exec1(t, pool, strings.ReplaceAll(stmt, "TO app", "TO "+role))
			grants++
		}
	}
	if grants != 5 {
		t.Fatalf("%d grants in docs/guards.md", grants)
	}
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, tenant := range []cells.TenantID{"acme", cells.TenantID("new-" + strings.ReplaceAll(string(iso), " ", "-"))} {
			epoch := map[bool]cells.Epoch{true: 3}[tenant == "acme"]
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: iso})
			if err != nil {
				t.Fatal(err)
			}
			for _, stmt := range []string{
				"SET LOCAL ROLE " + role, "SELECT version FROM cell.meta", fmt.Sprintf("SELECT cell.admit('%s', %d, 'a')", tenant, epoch),
				fmt.Sprintf("INSERT INTO guardtest_rows VALUES ('%s', 'k %s', 'v')", tenant, iso), "SELECT cell.emit('e', '{}')",
			} {
				if _, err := tx.Exec(ctx, stmt); err != nil {
					t.Fatalf("%s at %s: %v", stmt, iso, err)
				}
			}
			if err := tx.Commit(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, stmt := range []string{"INSERT INTO guardtest_rows VALUES ('acme', 'bare', 'v')", "SELECT cell.admit('acme', 2)"} {
		tx, err := pool.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(ctx, "SET LOCAL ROLE "+role); err != nil {
			t.Fatal(err)
		}
		_, err = tx.Exec(ctx, stmt)
		refused(t, err, stmt)
		_ = tx.Rollback(ctx)
	}
}
