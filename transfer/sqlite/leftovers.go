// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"

	"github.com/cloister-dev/cloister/transfer"
)

// Leftovers reads what the file keeps for moves. A file that no move has touched keeps
// nothing. Errors are the driver's.
func Leftovers(ctx context.Context, db *sql.DB) (transfer.Leftovers, error) {
	var out transfer.Leftovers
	var there bool
	if err := db.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'cell_transfer_import')").Scan(&there); err != nil || !there {
		return out, err
	}
	rows, err := db.QueryContext(ctx, `SELECT move, tenant, 0, ended FROM cell_transfer_capture WHERE released = 0
		UNION ALL SELECT move, tenant, 1, '' FROM cell_transfer_import ORDER BY 1, 3`)
	if err != nil {
		return out, err
	}
	defer rows.Close()
	for rows.Next() {
		var k transfer.Kept
		if err := rows.Scan(&k.Move, &k.Tenant, &k.Import, &k.Ended); err != nil {
			return out, err
		}
		out.Kept = append(out.Kept, k)
	}
	return out, rows.Err()
}
