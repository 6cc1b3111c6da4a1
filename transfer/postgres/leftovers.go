// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// moveObject is the name of a move's slot and publication in a database.
func moveObject(database string, move cells.MoveID) string {
	sum := sha256.Sum256([]byte(database + "\x00" + string(move)))
	return "cell_move_" + hex.EncodeToString(sum[:10])
}

// Leftovers reads what a database keeps for moves; schema is the guard's. A database
// that no move has touched keeps nothing. Slots that the server drops by itself with
// their connection are not listed. Errors are the driver's.
func Leftovers(ctx context.Context, db *sql.DB, schema string) (transfer.Leftovers, error) {
	var out transfer.Leftovers
	var database string
	var there bool
	at := pgx.Identifier{schema}.Sanitize()
	if err := db.QueryRowContext(ctx, "SELECT current_database(), to_regclass($1) IS NOT NULL AND to_regclass($2) IS NOT NULL",
		at+".transfer_key", at+".transfer_group").Scan(&database, &there); err != nil {
		return out, err
	}
	known := map[string]bool{}
	if there {
		rows, err := db.QueryContext(ctx, strings.ReplaceAll(`SELECT c.move, c.tenant, false, c.ended, c.at, c.objects, coalesce(g.name, '')
				FROM @s.transfer_capture c LEFT JOIN @s.transfer_group g ON g.id = c.grp WHERE NOT c.released
			UNION ALL SELECT move, tenant, true, '', at, '', '' FROM @s.transfer_import ORDER BY 1, 3`, "@s", at))
		if err != nil {
			return out, err
		}
		defer rows.Close()
		for rows.Next() {
			var k transfer.Kept
			var objects, group string
			if err := rows.Scan(&k.Move, &k.Tenant, &k.Import, &k.Ended, &k.At, &objects, &group); err != nil {
				return out, err
			}
			out.Kept = append(out.Kept, k)
			if !k.Import {
				known[moveObject(database, k.Move)], known[objects], known[group] = true, true, true
			}
		}
		if err := rows.Err(); err != nil {
			return out, err
		}
	}
	slots, err := db.QueryContext(ctx, `SELECT slot_name, active, coalesce(pg_wal_lsn_diff(
			CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn), 0)::bigint
		FROM pg_replication_slots WHERE database = current_database() AND NOT temporary AND slot_name ~ '^cell_(move|group)_[0-9a-f]{20}$' ORDER BY 1`)
	if err != nil {
		return out, err
	}
	defer slots.Close()
	for slots.Next() {
		var s transfer.Slot
		if err := slots.Scan(&s.Name, &s.Active, &s.Retained); err != nil {
			return out, err
		}
		if !known[s.Name] {
			out.Slots = append(out.Slots, s)
		}
	}
	if err := slots.Err(); err != nil {
		return out, err
	}
	pubs, err := db.QueryContext(ctx, "SELECT pubname FROM pg_publication WHERE pubname ~ '^cell_(move|group)_[0-9a-f]{20}$' ORDER BY 1")
	if err != nil {
		return out, err
	}
	defer pubs.Close()
	for pubs.Next() {
		var name string
		if err := pubs.Scan(&name); err != nil {
			return out, err
		}
		if !known[name] {
			out.Publications = append(out.Publications, name)
		}
	}
	return out, pubs.Err()
}
