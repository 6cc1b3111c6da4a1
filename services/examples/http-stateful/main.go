// SPDX-License-Identifier: Apache-2.0

// Command http-stateful is a service with rows: a counter for each name. A move
// carries the tenant's rows to the other cell's database while it is counting; every
// count that was acknowledged is there afterwards.
//
// What a service does for that is in count and get: its transactions begin with
// guard.Write and guard.Read, and what they return goes to guard.Refused first.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/services/examples/local"
)

// The tenant is part of the primary key; otherwise a table is what it was before.
const schema = `CREATE TABLE IF NOT EXISTS counters (tenant TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (tenant, name))`

var tables = []guard.Table{{Name: "counters", TenantColumn: "tenant"}}

type counter struct {
	Name string       `json:"name"`
	N    int64        `json:"n"`
	Cell cells.CellID `json:"cell"`
}

func service(c *local.Cell) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /counters/{name}", func(w http.ResponseWriter, r *http.Request) { count(w, r, c.Guard) })
	mux.HandleFunc("GET /counters/{name}", func(w http.ResponseWriter, r *http.Request) { get(w, r, c.Guard) })
	return mux
}

func count(w http.ResponseWriter, r *http.Request, g *sqlite.Guard) {
	out := counter{Name: r.PathValue("name")}
	err := g.Write(r.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		out.Cell = tx.Admission.Cell
		err := tx.QueryRowContext(ctx, `INSERT INTO counters VALUES (?, ?, 1) ON CONFLICT (tenant, name) DO UPDATE SET n = n + 1 RETURNING n`,
			string(tx.Tenant), out.Name).Scan(&out.N)
		if err != nil {
			return err
		}
		return tx.Emit(ctx, "counter.counted", out)
	})
	answer(w, r, out, err)
}

func get(w http.ResponseWriter, r *http.Request, g *sqlite.Guard) {
	out := counter{Name: r.PathValue("name")}
	err := g.Read(r.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		out.Cell = tx.Admission.Cell
		err := tx.QueryRowContext(ctx, `SELECT n FROM counters WHERE tenant = ? AND name = ?`, string(tx.Tenant), out.Name).Scan(&out.N)
		if errors.Is(err, sql.ErrNoRows) {
			return nil // nobody has counted yet
		}
		return err
	})
	answer(w, r, out, err)
}

func answer(w http.ResponseWriter, r *http.Request, v any, err error) {
	if guard.Refused(w, r, err) {
		return // the edge asks again, in the tenant's cell
	}
	if err != nil {
		http.Error(w, "the counter cannot be reached", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func run(ctx context.Context, out io.Writer) error {
	f, err := local.Start(ctx, local.Options{HTTP: service, Schema: schema, Tables: tables})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Place(ctx, "acme", "cell-a"); err != nil {
		return err
	}
	for _, to := range []cells.CellID{"cell-b", "cell-a", ""} {
		for range 2 {
			c, err := ask(ctx, f.URL, http.MethodPost, "visits")
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%s: %s is %d\n", c.Cell, c.Name, c.N)
		}
		if to == "" {
			break
		}
		if _, err := f.Move(ctx, "acme", to); err != nil {
			return err
		}
	}
	return nil
}

// ask is a client: it sends one request through the edge.
func ask(ctx context.Context, url, method, name string) (c counter, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url+"/counters/"+name, nil)
	if err != nil {
		return c, err
	}
	req.Header.Set("X-Tenant", "acme")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return c, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return c, fmt.Errorf("%s: %s", resp.Status, body)
	}
	return c, json.NewDecoder(resp.Body).Decode(&c)
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
