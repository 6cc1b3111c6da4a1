// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

const groupColumns = `tenant, id, name, external, attributes, version, created, changed`

func scanGroup(scan func(...any) error) (g signin.Group, err error) {
	var created, changed int64
	var attributes string
	err = scan(&g.Tenant, &g.ID, &g.Name, &g.External, &attributes, &g.Version, &created, &changed)
	g.Attributes, g.Created, g.Changed = []byte(attributes), at(created), at(changed)
	return g, err
}

func checkGroup(g *signin.Group) error {
	if err := g.Tenant.Validate(); err != nil {
		return err
	}
	if g.Name == "" || len(g.Attributes) == 0 {
		return fmt.Errorf("%w: a group needs a name and attributes", cells.ErrInvalid)
	}
	return nil
}

// CreateGroup implements [signin.Store].
func (s *Store) CreateGroup(ctx context.Context, g signin.Group) (signin.Group, error) {
	err := checkGroup(&g)
	if err == nil {
		g.ID, err = newID()
	}
	if err == nil {
		g.Version, g.Created = 1, now()
		g.Changed = g.Created
		_, err = s.exec(ctx, s.db, `INSERT INTO principal_groups (`+groupColumns+`, name_key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			g.Tenant, g.ID, g.Name, g.External, string(g.Attributes), g.Version, micros(g.Created), micros(g.Changed), strings.ToLower(g.Name))
	}
	if err != nil {
		return signin.Group{}, s.told("create group", err)
	}
	return g, nil
}

// UpdateGroup implements [signin.Store].
func (s *Store) UpdateGroup(ctx context.Context, g signin.Group) (signin.Group, error) {
	if err := checkGroup(&g); err != nil {
		return signin.Group{}, s.told("update group", err)
	}
	g.Changed = now()
	err := s.change(ctx, "update group", func(tx *sql.Tx) error {
		var created int64
		if err := tx.QueryRowContext(ctx, s.q(`SELECT created FROM principal_groups WHERE tenant = ? AND id = ?`), g.Tenant, g.ID).Scan(&created); err != nil {
			return err
		}
		g.Created = at(created)
		n, err := s.exec(ctx, tx, `UPDATE principal_groups SET name = ?, name_key = ?, external = ?, attributes = ?, version = version + 1, changed = ? WHERE tenant = ? AND id = ? AND version = ?`,
			g.Name, strings.ToLower(g.Name), g.External, string(g.Attributes), micros(g.Changed), g.Tenant, g.ID, g.Version)
		if err == nil && n == 0 {
			err = signin.ErrChanged
		}
		return err
	})
	if err != nil {
		return signin.Group{}, err
	}
	g.Version++
	return g, nil
}

// DeleteGroup implements [signin.Store].
func (s *Store) DeleteGroup(ctx context.Context, tenant cells.TenantID, id string) error {
	n, err := s.exec(ctx, s.db, `DELETE FROM principal_groups WHERE tenant = ? AND id = ?`, tenant, id)
	if err == nil && n == 0 {
		err = cells.ErrNotFound
	}
	return s.told("delete group", err)
}

// Group implements [signin.Store].
func (s *Store) Group(ctx context.Context, tenant cells.TenantID, id string) (signin.Group, error) {
	g, err := scanGroup(s.db.QueryRowContext(ctx, s.q(`SELECT `+groupColumns+` FROM principal_groups WHERE tenant = ? AND id = ?`), tenant, id).Scan)
	if err != nil {
		return signin.Group{}, s.told("group", err)
	}
	return g, nil
}

// Groups implements [signin.Store].
func (s *Store) Groups(ctx context.Context, tenant cells.TenantID, after string, limit int) (out []signin.Group, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		g, err := scanGroup(scan)
		out = append(out, g)
		return err
	}, `SELECT `+groupColumns+` FROM principal_groups WHERE tenant = ? AND id > ? ORDER BY id LIMIT ?`, tenant, after, pageSize(limit))
	return out, s.told("groups", err)
}
