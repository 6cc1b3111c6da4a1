// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/member/vitals"
)

// lockVitals is what changes of counts exclude each other by; they exclude nothing
// else where the database lets them.
var lockVitals = []string{"vitals"}

func putVitals(ctx context.Context, tx *Tx, r *directory.VitalsRow, at int64) error {
	doc, err := json.Marshal(r.Counts)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO vitals (measured, source, cell, version, requests, at, doc) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
		ON CONFLICT (measured, source, cell, version) DO UPDATE SET requests = excluded.requests, at = excluded.at, doc = excluded.doc
		WHERE excluded.requests >= vitals.requests`,
		r.Measured, r.Source, r.Cell, r.Version, r.Requests, at, string(doc))
	return err
}

// SaveVitals implements [directory.Store].
func (s *Store) SaveVitals(ctx context.Context, rows []directory.VitalsRow, at time.Time) error {
	if len(rows) == 0 {
		return nil
	}
	return s.beside(ctx, "save vitals", lockVitals, func(tx *Tx) error {
		for i := range rows {
			if rows[i].Source == "" {
				return fmt.Errorf("%w: counts of nobody", cells.ErrInvalid)
			}
			if err := putVitals(ctx, tx, &rows[i], micros(at)); err != nil {
				return err
			}
		}
		return nil
	})
}

type vitalsKey struct {
	measured, cell, version string
}

// sumVitals adds up the rows of a query for measured, cell, version and doc.
func sumVitals(ctx context.Context, c conn, query string, args ...any) (map[vitalsKey]vitals.Counts, error) {
	rows, err := c.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	sums := map[vitalsKey]vitals.Counts{}
	for rows.Next() {
		var k vitalsKey
		var doc string
		if err := rows.Scan(&k.measured, &k.cell, &k.version, &doc); err != nil {
			return nil, err
		}
		var n vitals.Counts
		if err := json.Unmarshal([]byte(doc), &n); err != nil {
			return nil, fmt.Errorf("%w: counts: %w", cells.ErrInvalid, err)
		}
		sums[k] = sums[k].Plus(n)
	}
	return sums, rows.Err()
}

// Vitals implements [directory.Store].
func (s *Store) Vitals(ctx context.Context) ([]directory.VitalsTotal, error) {
	sums, err := sumVitals(ctx, s.read, `SELECT measured, cell, version, doc FROM vitals`)
	if err != nil {
		return nil, s.translate("vitals", err)
	}
	out := make([]directory.VitalsTotal, 0, len(sums))
	for k, n := range sums {
		out = append(out, directory.VitalsTotal{Measured: k.measured, Row: vitals.Row{Cell: cells.CellID(k.cell), Version: k.version, Counts: n}})
	}
	slices.SortFunc(out, func(a, b directory.VitalsTotal) int {
		return cmp.Or(cmp.Compare(a.Measured, b.Measured), cmp.Compare(a.Cell, b.Cell), cmp.Compare(a.Version, b.Version))
	})
	return out, nil
}

// FoldVitals implements [directory.Store].
func (s *Store) FoldVitals(ctx context.Context, before time.Time) error {
	return s.beside(ctx, "fold vitals", lockVitals, func(tx *Tx) error {
		sums, err := sumVitals(ctx, tx.conn, `SELECT measured, cell, version, doc FROM vitals WHERE source <> '' AND at < ?`, micros(before))
		if err != nil || len(sums) == 0 {
			return err
		}
		kept, err := sumVitals(ctx, tx.conn, `SELECT measured, cell, version, doc FROM vitals WHERE source = ''`)
		if err != nil {
			return err
		}
		for k, n := range sums {
			r := directory.VitalsRow{Measured: k.measured, Row: vitals.Row{Cell: cells.CellID(k.cell), Version: k.version, Counts: n.Plus(kept[k])}}
			if err := putVitals(ctx, tx, &r, micros(before)); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM vitals WHERE source <> '' AND at < ?`, micros(before))
		return err
	})
}
