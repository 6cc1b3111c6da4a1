// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"errors"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// A role that is called like the guard's schema has it on its search path: its
// unqualified tables would be made a second time, empty, at the next start.
func TestSchemaOnTheSearchPathIsRefused(t *testing.T) {
	ctx := t.Context()
	dsn := pgtest.DB(t)
	admin, err := pgxpool.New(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	if _, err := admin.Exec(ctx, "CREATE ROLE searchpath_twin LOGIN SUPERUSER PASSWORD 'twin'"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("searchpath_twin", "twin")
	twin, err := pgxpool.New(ctx, u.String())
	if err != nil {
		t.Fatal(err)
	}
	defer twin.Close()
	for name, c := range map[string]struct {
		pool   *pgxpool.Pool
		schema string
		want   error
	}{
		"role of the schema's name": {twin, "searchpath_twin", cells.ErrInvalid},
		"public":                    {admin, "public", cells.ErrInvalid},
		"another name":              {twin, "cell", nil},
	} {
		g, err := postgres.New(c.pool, postgres.WithSchema(c.schema))
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Install(ctx, nil); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		g.Close()
	}
	var there bool
	if err := admin.QueryRow(ctx, "SELECT to_regnamespace('searchpath_twin') IS NOT NULL").Scan(&there); err != nil || there {
		t.Errorf("a refused schema was made: %v, %v", there, err)
	}
}
