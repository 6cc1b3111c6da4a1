// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// usesFor is how far back uses of bots are named.
const usesFor = 7 * 24 * time.Hour

func botChecks() []Check {
	return []Check{
		{ID: "cell-bots", Scope: ScopeDeployments, Worst: Warning, run: checkBots,
			Looks: "Each bot that the directory records for a cell is in the cell's database, enabled and with that key. Names the bots that have proved themselves in the last 7 days.",
			Fix:   "cell bot create with the key that the operator holds, then cell attach or cell prepare with its thumbprint; cell bot audit tells what a bot did"},
	}
}

func checkBots(ctx context.Context, x *exam) ([]Finding, error) {
	return x.eachCell(ctx, func(c deploy.Cell, _ tenancy.Store) (out []Finding, _ error) {
		o, err := x.store(ctx, c.Name)
		if err != nil {
			return nil, err
		}
		var there bool
		if err := o.db.QueryRowContext(ctx, "SELECT to_regclass('cell_signin.bots') IS NOT NULL").Scan(&there); err != nil {
			return nil, err
		}
		for _, b := range c.Bots {
			err, thumb, disabled := sql.ErrNoRows, "", 0
			if there {
				err = o.db.QueryRowContext(ctx, "SELECT thumbprint, disabled FROM cell_signin.bots WHERE name = $1", b.Name).Scan(&thumb, &disabled)
			}
			switch {
			case errors.Is(err, sql.ErrNoRows):
				out = append(out, Finding{Message: fmt.Sprintf("its database has no bot %s, which the directory records", b.Name)})
			case err != nil:
				return out, err
			case thumb != b.Thumbprint:
				out = append(out, Finding{Message: fmt.Sprintf("bot %s has another key than the directory records", b.Name)})
			case disabled != 0:
				out = append(out, Finding{Message: fmt.Sprintf("bot %s is disabled", b.Name)})
			}
		}
		if !there {
			return out, nil
		}
		rows, err := o.db.QueryContext(ctx, "SELECT actor, count(*), max(at) FROM cell_signin.audit WHERE action = 'bot.token' AND at > $1 GROUP BY actor ORDER BY actor", time.Now().Add(-usesFor).UnixMicro())
		if err != nil {
			return out, err
		}
		defer rows.Close()
		for rows.Next() {
			var actor string
			var n, last int64
			if err := rows.Scan(&actor, &n, &last); err != nil {
				return out, err
			}
			out = append(out, Finding{Severity: Note, Message: fmt.Sprintf("%s has proved itself %d times in the last 7 days, last at %s", actor, n, time.UnixMicro(last).UTC().Format(time.RFC3339))})
		}
		return out, rows.Err()
	})
}
