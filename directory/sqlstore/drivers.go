// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"fmt"

	"github.com/cloister-dev/cloister/directory"
)

// driven is a table whose rows have a driver, which shows that it lives by their
// beat. active is the column that says that a row still needs one.
type driven struct{ table, active string }

var (
	drivenMoves     = driven{table: "moves", active: "unfinished"}
	drivenCampaigns = driven{table: "campaigns", active: "driven"}
	drivenRollouts  = driven{table: "rollouts", active: "driven"}
)

// drivenBeats lists the rows that need a driver, in order of creation.
func drivenBeats[ID ~string](ctx context.Context, s *Store, d driven, what string) ([]directory.Beat[ID], error) {
	rows, err := s.read.QueryContext(ctx, fmt.Sprintf("SELECT id, driver, beat FROM %s WHERE %s = 1 ORDER BY seq", d.table, d.active))
	if err != nil {
		return nil, s.translate(what, err)
	}
	defer func() { _ = rows.Close() }()
	var out []directory.Beat[ID]
	for rows.Next() {
		var b directory.Beat[ID]
		if err := rows.Scan(&b.ID, &b.Driver, &b.Beat); err != nil {
			return nil, s.translate(what, err)
		}
		out = append(out, b)
	}
	return out, s.translate(what, rows.Err())
}

// beat raises the beats of the rows that driver drives.
func (s *Store) beat(ctx context.Context, d driven, what, driver string) error {
	return s.tx(ctx, what, func(tx *Tx) error {
		_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET beat = beat + 1 WHERE %s = 1 AND driver = ?", d.table, d.active), driver)
		return err
	})
}

// take gives the row to driver if it still has the driver and the beat that were seen.
func take[ID ~string](ctx context.Context, s *Store, d driven, what string, seen directory.Beat[ID], driver string) (bool, error) {
	var n int64
	err := s.tx(ctx, what, func(tx *Tx) error {
		res, err := tx.ExecContext(ctx, fmt.Sprintf(`UPDATE %s SET driver = ?, beat = beat + 1, version = version + 1
			WHERE id = ? AND driver = ? AND beat = ? AND %s = 1`, d.table, d.active), driver, seen.ID, seen.Driver, seen.Beat)
		if err != nil {
			return err
		}
		n, err = res.RowsAffected()
		return err
	})
	return n == 1, err
}
