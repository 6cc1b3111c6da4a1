// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"errors"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

const factColumns = `tenant, grp, jurisdiction, rows_n, bytes_n, measured_at`

func scanFacts(row interface{ Scan(...any) error }) (api.TenantFacts, error) {
	var f api.TenantFacts
	var at int64
	err := row.Scan(&f.Tenant, &f.Group, &f.Jurisdiction, &f.Rows, &f.Bytes, &at)
	if at != 0 {
		f.MeasuredAt = fromMicros(at)
	}
	return f, err
}

// Facts implements [directory.Store].
func (s *Store) Facts(ctx context.Context, after cells.TenantID, limit int) ([]api.TenantFacts, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+factColumns+` FROM tenant_facts WHERE tenant > ? ORDER BY tenant LIMIT ?`, after, limit)
	if err != nil {
		return nil, s.translate("facts", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.TenantFacts
	for rows.Next() {
		f, err := scanFacts(rows)
		if err != nil {
			return nil, s.translate("facts", err)
		}
		out = append(out, f)
	}
	return out, s.translate("facts", rows.Err())
}

// TenantFacts implements [directory.Store].
func (s *Store) TenantFacts(ctx context.Context, t cells.TenantID) (api.TenantFacts, error) {
	f, err := scanFacts(s.read.QueryRowContext(ctx, `SELECT `+factColumns+` FROM tenant_facts WHERE tenant = ?`, t))
	if errors.Is(err, sql.ErrNoRows) {
		return api.TenantFacts{Tenant: t}, nil
	}
	return f, s.translate("facts", err)
}

// SetAttributes implements [directory.Store].
func (s *Store) SetAttributes(ctx context.Context, t cells.TenantID, group, jurisdiction string, audit api.AuditEntry) (api.TenantFacts, error) {
	var out api.TenantFacts
	err := s.tx(ctx, "set attributes", func(tx *Tx) error {
		var err error
		out, err = scanFacts(tx.QueryRowContext(ctx, `INSERT INTO tenant_facts (tenant, grp, jurisdiction) VALUES (?, ?, ?)
			ON CONFLICT (tenant) DO UPDATE SET grp = excluded.grp, jurisdiction = excluded.jurisdiction RETURNING `+factColumns, t, group, jurisdiction))
		if err != nil {
			return err
		}
		return insertAudit(ctx, tx, audit)
	})
	return out, err
}

// SaveMeasures implements [directory.Store].
func (s *Store) SaveMeasures(ctx context.Context, list []directory.Measurement) error {
	return s.tx(ctx, "save measures", func(tx *Tx) error {
		for _, m := range list {
			_, err := tx.ExecContext(ctx, `INSERT INTO tenant_facts (tenant, rows_n, bytes_n, measured_at) VALUES (?, ?, ?, ?)
				ON CONFLICT (tenant) DO UPDATE SET rows_n = excluded.rows_n, bytes_n = excluded.bytes_n, measured_at = excluded.measured_at
				WHERE excluded.measured_at >= tenant_facts.measured_at`, m.Tenant, m.Rows, m.Bytes, micros(m.At))
			if err != nil {
				return err
			}
		}
		return nil
	})
}
