// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgschema"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrate creates the schema and brings it up to date, one process at a time.
func migrate(ctx context.Context, conn *pgx.ConnConfig, schema string) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	err = pgschema.Migrate(ctx, conn, pgschema.Config{Schema: schema, Lock: "cloister routes", Versions: "routes_version", Files: sub})
	var newer *pgschema.Newer
	switch {
	case err == nil:
		return nil
	case errors.As(err, &newer):
		return fmt.Errorf("%w: the table was %w", cells.ErrInvalid, err)
	case errors.Is(err, pgschema.ErrBroken):
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	return translate(ctx, "preparing the schema", err)
}
