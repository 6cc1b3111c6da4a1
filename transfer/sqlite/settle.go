// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

func (i *imp) Digests(ctx context.Context, sets []transfer.KeySet) (out []transfer.Digest, err error) {
	err = i.s.reading(ctx, func(tx *sql.Tx) error {
		out, err = digests(ctx, tx, i.tables, i.m.Tenant, sets)
		return err
	})
	return out, i.explain(ctx, err)
}

func (i *imp) Touched(ctx context.Context, perSet int) (out []transfer.KeySet, err error) {
	err = i.s.reading(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, "SELECT tbl, key FROM cell_transfer_touched WHERE move = ? ORDER BY tbl, key", i.m.ID)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var name string
			var key []byte
			if err := rows.Scan(&name, &key); err != nil {
				return err
			}
			n := len(out) - 1
			if n < 0 || out[n].Table != name || out[n].Count >= int64(perSet) {
				out = append(out, transfer.KeySet{Table: name})
				n++
			}
			out[n].Data = append(out[n].Data, key...)
			out[n].Count++
		}
		return rows.Err()
	})
	return out, err
}

func (i *imp) Settle(ctx context.Context, sets []transfer.KeySet, compared []cells.Comparison) error {
	return i.tx(ctx, func(tx *sql.Tx, st *transfer.State) error {
		st.Compared = compared
		stmt, err := tx.PrepareContext(ctx, "DELETE FROM cell_transfer_touched WHERE move = ? AND tbl = ? AND key = ?")
		if err != nil {
			return err
		}
		defer stmt.Close()
		for _, set := range sets {
			t := i.tables[set.Table]
			if t == nil {
				return unknown(set.Table)
			}
			data := set.Data
			for range set.Count {
				_, rest, err := readValues(data, len(t.keys))
				if err != nil {
					return err
				}
				if _, err := stmt.ExecContext(ctx, string(i.m.ID), t.Name, data[:len(data)-len(rest)]); err != nil {
					return err
				}
				data = rest
			}
			if len(data) > 0 {
				return errShort
			}
		}
		return nil
	})
}
