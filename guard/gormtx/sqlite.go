// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
)

// triggerMessage is what SQLite's temporary triggers refuse with.
const triggerMessage = "cell: a row of another tenant than the admitted one"

// The expected tenant is a row of a temporary table: it belongs to the connection,
// is rolled back with the transaction and deleted before its commit. While there is
// none (transactions of others on the same pool) the triggers let everything pass.
const (
	armedTable = `cell_gormtx_admitted`
	disarmSQL  = `DELETE FROM temp.` + armedTable
)

// armSQLite makes the triggers of the connection, if they are missing, and tells
// them the tenant.
func (p *Plugin) armSQLite(ctx context.Context, tx *sql.Tx, tenant string) error {
	var there bool
	if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM temp.sqlite_master WHERE type = 'table' AND name = ?)`, armedTable).Scan(&there); err != nil {
		return err
	}
	if !there {
		if _, err := tx.ExecContext(ctx, `CREATE TEMP TABLE `+armedTable+` (one INTEGER PRIMARY KEY CHECK (one = 1), tenant TEXT NOT NULL)`); err != nil {
			return err
		}
		for table, column := range p.columns {
			for _, stmt := range sqliteTriggers(table, column) {
				if _, err := tx.ExecContext(ctx, stmt); err != nil {
					return fmt.Errorf("gormtx: triggers of %s: %w", table, err)
				}
			}
		}
	}
	_, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO temp.`+armedTable+` VALUES (1, ?)`, tenant)
	return err
}

func sqliteTriggers(table, column string) []string {
	quote := func(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }
	col := quote(column)
	other := func(rows ...string) string {
		var conds []string
		for _, r := range rows {
			conds = append(conds, `a.tenant IS NOT `+r+`.`+col)
		}
		return `EXISTS (SELECT 1 FROM temp.` + armedTable + ` a WHERE ` + strings.Join(conds, " OR ") + `)`
	}
	var out []string
	for op, cond := range map[string]string{"INSERT": other("NEW"), "UPDATE": other("NEW", "OLD"), "DELETE": other("OLD")} {
		out = append(out, `CREATE TEMP TRIGGER `+quote("cell_gormtx_"+strings.ToLower(op)+"_"+table)+` AFTER `+op+` ON main.`+quote(table)+
			` WHEN `+cond+` BEGIN SELECT RAISE(ABORT, '`+triggerMessage+`'); END`)
	}
	return out
}
