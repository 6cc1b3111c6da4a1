// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
)

// Deployments is the [deploy.Store] of the same database.
func (s *Store) Deployments() deploy.Store { return deployments{s} }

type deployments struct{ s *Store }

// deploymentCells selects cells: the document has what is not in columns.
const deploymentCells = `SELECT doc, name, first, placements, revision FROM deployment_cells`

func scanDeployment(row interface{ Scan(...any) error }) (c deploy.Cell, doc []byte, err error) {
	var text string
	var name cells.CellID
	var first bool
	var placements, revision int64
	if err := row.Scan(&text, &name, &first, &placements, &revision); err != nil {
		return c, nil, err
	}
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return c, nil, fmt.Errorf("%w: cell %s: %w", cells.ErrInvalid, name, err)
	}
	c.Name, c.First, c.Placements, c.Revision = name, first, placements, revision
	return c, []byte(text), nil
}

// viewIn reads all cells; docs are their documents.
func viewIn(ctx context.Context, tx *Tx) (v deploy.View, docs map[cells.CellID][]byte, err error) {
	v.Kind, docs = deploy.Pinned, map[cells.CellID][]byte{}
	var movable int64
	err = tx.QueryRowContext(ctx, `SELECT coalesce(max(CASE name WHEN 'deployments_movable' THEN value END), 0),
		coalesce(max(CASE name WHEN 'deployments_revision' THEN value END), 0) FROM meta`).Scan(&movable, &v.Revision)
	if err != nil {
		return v, nil, err
	}
	if movable == 1 {
		v.Kind = deploy.Movable
	}
	rows, err := tx.QueryContext(ctx, deploymentCells+` ORDER BY name`)
	if err != nil {
		return v, nil, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		c, doc, err := scanDeployment(rows)
		if err != nil {
			return v, nil, err
		}
		v.Cells, docs[c.Name] = append(v.Cells, c), doc
	}
	return v, docs, rows.Err()
}

// Read implements [deploy.Store].
func (d deployments) Read(ctx context.Context) (v deploy.View, err error) {
	err = d.s.snapshot(ctx, "deployments", func(tx *Tx) error {
		v, _, err = viewIn(ctx, tx)
		return err
	})
	return v, err
}

// Settle implements [deploy.Store].
func (d deployments) Settle(ctx context.Context, kind deploy.Kind, audit api.AuditEntry) error {
	if kind != deploy.Pinned && kind != deploy.Movable {
		return fmt.Errorf("%w: a directory is %s or %s, not %q", cells.ErrInvalid, deploy.Pinned, deploy.Movable, kind)
	}
	return d.s.tx(ctx, "settle deployments", func(tx *Tx) error {
		res, err := tx.ExecContext(ctx, `INSERT INTO meta (name, value) VALUES ('deployments_movable', ?) ON CONFLICT (name) DO NOTHING`, kind == deploy.Movable)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 1 {
			return errors.Join(err, insertAudit(ctx, tx, audit))
		}
		var movable bool
		if err := tx.QueryRowContext(ctx, `SELECT value FROM meta WHERE name = 'deployments_movable'`).Scan(&movable); err != nil {
			return err
		}
		if movable != (kind == deploy.Movable) {
			return fmt.Errorf("%w: the directory was settled as another kind than %s", cells.ErrConflict, kind)
		}
		return nil
	})
}

// Change implements [deploy.Store].
func (d deployments) Change(ctx context.Context, name cells.CellID, rule deploy.Rule, audit api.AuditEntry) (out deploy.Cell, err error) {
	err = d.s.tx(ctx, "change of a deployment", func(tx *Tx) error {
		v, docs, err := viewIn(ctx, tx)
		if err != nil {
			return err
		}
		ch, err := deploy.Apply(&v, name, audit.At, rule)
		if err != nil {
			return err
		}
		var before deploy.Cell
		if old := v.Cell(name); old != nil {
			before = *old
		}
		if !reflect.DeepEqual(plain(before), plain(ch.Cell)) {
			audit.Cell = name
			if err := d.put(ctx, tx, &ch, docs[name]); err != nil {
				return err
			}
			if err := insertAudit(ctx, tx, audit); err != nil {
				return err
			}
		}
		if err := d.placeAll(ctx, tx, &ch, audit); err != nil {
			return err
		}
		out, _, err = scanDeployment(tx.QueryRowContext(ctx, deploymentCells+` WHERE name = ?`, name))
		return err
	})
	return out, err
}

// plain is a cell as it is compared: through its document.
func plain(c deploy.Cell) string {
	c.Placements, c.Revision, c.UpdatedAt = 0, 0, time.Time{}
	b, err := json.Marshal(c)
	if err != nil {
		return err.Error() // our own types always marshal
	}
	return string(b)
}

// put writes a cell with its names. What a newer build keeps in the document stays.
func (d deployments) put(ctx context.Context, tx *Tx, ch *deploy.Change, old []byte) error {
	c := ch.Cell
	c.UpdatedAt = ch.At
	doc, err := mergeDoc(old, c)
	if err != nil {
		return err
	}
	var revision int64
	err = tx.QueryRowContext(ctx, `INSERT INTO meta (name, value) VALUES ('deployments_revision', 1)
		ON CONFLICT (name) DO UPDATE SET value = meta.value + 1 RETURNING value`).Scan(&revision)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO deployment_cells (name, first, deployment_id, placements, revision, doc) VALUES (?, ?, ?, 0, ?, ?)
		ON CONFLICT (name) DO UPDATE SET revision = excluded.revision, doc = excluded.doc`,
		c.Name, c.First, c.DeploymentID, revision, doc)
	if err != nil {
		return err
	}
	for _, t := range []struct {
		table, column string
		values        []string
	}{{"deployment_hosts", "host", c.Hosts()}, {"deployment_credentials", "sha256", c.Hashes()}} {
		if _, err := tx.ExecContext(ctx, `DELETE FROM `+t.table+` WHERE cell = ?`, c.Name); err != nil {
			return err
		}
		for _, v := range t.values {
			if _, err := tx.ExecContext(ctx, `INSERT INTO `+t.table+` (`+t.column+`, cell) VALUES (?, ?)`, v, c.Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// mergeDoc is the cell's document, with the members of the old one that this build
// does not know.
func mergeDoc(old []byte, c deploy.Cell) (string, error) {
	c.Placements, c.Revision = 0, 0
	b, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	if old == nil {
		return string(b), nil
	}
	was, next := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	if err := errors.Join(json.Unmarshal(old, &was), json.Unmarshal(b, &next)); err != nil {
		return "", fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	for k, v := range was {
		if !knownMembers[k] {
			next[k] = v
		}
	}
	b, err = json.Marshal(next)
	return string(b), err
}

// knownMembers are the JSON names of a cell's fields.
var knownMembers = membersOf(reflect.TypeFor[deploy.Cell]())

func membersOf(t reflect.Type) map[string]bool {
	out := map[string]bool{}
	for f := range fieldsOf(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		out[name] = true
	}
	return out
}

func fieldsOf(t reflect.Type) func(yield func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for _, f := range reflect.VisibleFields(t) {
			if !f.Anonymous && !yield(f) {
				return
			}
		}
	}
}

// placeAll places the tenants of a change. The cell's row is locked first; nobody who
// waits for it has written a placement yet, and a placement of the same tenant that is
// under way in another cell is waited for: the row's key decides.
func (d deployments) placeAll(ctx context.Context, tx *Tx, ch *deploy.Change, audit api.AuditEntry) error {
	if len(ch.Place) == 0 {
		return nil
	}
	claims := slices.Clone(ch.Place)
	slices.SortFunc(claims, func(a, b deploy.Claim) int { return strings.Compare(string(a.Tenant), string(b.Tenant)) })
	claims = slices.CompactFunc(claims, func(a, b deploy.Claim) bool { return a.Tenant == b.Tenant })
	c, _, err := scanDeployment(tx.QueryRowContext(ctx, deploymentCells+` WHERE name = ?`+d.s.d.ForUpdate, ch.Cell.Name))
	if err != nil {
		return err
	}
	created := int64(0)
	for part := range slices.Chunk(claims, placeMax) {
		list := make([]placed, len(part))
		for i, claim := range part {
			list[i] = placed{deploy.Placement{Tenant: claim.Tenant, Cell: c.Name, By: deploy.ByAttach, Actor: audit.Actor, At: audit.At}, audit}
		}
		others, err := insertPlacements(ctx, tx, list)
		if err != nil {
			return err
		}
		for _, claim := range part {
			other, there := others[claim.Tenant]
			switch {
			case there && other.Cell != c.Name:
				return fmt.Errorf("%w: %s in cell %s", deploy.ErrPlacedElsewhere, claim.Tenant, other.Cell)
			case there:
				continue
			}
			created++
			if err := deploy.Room(&c, created); err != nil && claim.Bound {
				return fmt.Errorf("%w (tenant %s)", err, claim.Tenant)
			}
		}
	}
	return nil
}

const deploymentPlacements = `SELECT p.tenant, p.cell, c.deployment_id, p.placed_by, p.actor, p.at, p.epoch, p.move, p.moving_to, p.moving_by
	FROM deployment_placements p JOIN deployment_cells c ON c.name = p.cell`

func scanPlacement(row interface{ Scan(...any) error }) (p deploy.Placement, err error) {
	var at int64
	err = row.Scan(&p.Tenant, &p.Cell, &p.DeploymentID, &p.By, &p.Actor, &at, &p.Epoch, &p.Move, &p.MovingTo, &p.MovingBy)
	p.At = fromMicros(at)
	return p, err
}

func placementIn(ctx context.Context, q queryRower, tenant cells.TenantID) (deploy.Placement, error) {
	return scanPlacement(q.QueryRowContext(ctx, deploymentPlacements+` WHERE p.tenant = ?`, tenant))
}

type queryRower interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Placement implements [deploy.Store].
func (d deployments) Placement(ctx context.Context, tenant cells.TenantID) (deploy.Placement, error) {
	p, err := placementIn(ctx, d.s.read, tenant)
	return p, d.s.translate("placement", err)
}

// Placements implements [deploy.Store].
func (d deployments) Placements(ctx context.Context, f deploy.PlacementFilter) ([]deploy.Placement, error) {
	query, args := deploymentPlacements+` WHERE p.tenant > ?`, []any{f.After}
	if f.Cell != "" {
		query, args = query+` AND p.cell = ?`, append(args, f.Cell)
	}
	rows, err := d.s.read.QueryContext(ctx, query+` ORDER BY p.tenant LIMIT ?`, append(args, pageLimit(f.Limit))...)
	if err != nil {
		return nil, d.s.translate("placements", err)
	}
	defer func() { _ = rows.Close() }()
	var out []deploy.Placement
	for rows.Next() {
		p, err := scanPlacement(rows)
		if err != nil {
			return nil, d.s.translate("placements", err)
		}
		out = append(out, p)
	}
	return out, d.s.translate("placements", rows.Err())
}
