// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
)

// placeMax bounds the calls that are placed in one transaction, and placeLinger how long
// one waits to become as full as the one before.
const (
	placeMax    = 64
	placeLinger = 1000 * time.Microsecond
)

// placing is one call of [deployments.Place] on its way.
type placing struct {
	call  deploy.Call
	audit api.AuditEntry

	won     deploy.Placement
	created bool
	err     error
}

// Place implements [deploy.Store]. Calls for one cell that come while others of it are
// under way share the next transaction: its lock on the cell's row is held through the
// commit, so that one after the other they would each wait for a disk.
func (d deployments) Place(ctx context.Context, call deploy.Call, audit api.AuditEntry) (deploy.Placement, bool, error) {
	if err := deploy.CheckTenant(call.Tenant); err != nil {
		return deploy.Placement{}, false, err
	}
	// Most calls are for tenants that are placed: those lock nothing.
	me := &placing{call: call, audit: audit}
	if err := d.s.lookups.do(ctx, struct{}{}, me); err != nil {
		return deploy.Placement{}, false, d.s.translate("place", err)
	}
	if me.err != nil || me.won.Tenant != "" {
		return me.won, false, me.err
	}
	if err := d.s.placings.do(ctx, call.Cell, me); err != nil {
		return deploy.Placement{}, false, d.s.translate("place", err)
	}
	return me.won, me.created && me.err == nil, me.err
}

// lookList finds the calls whose tenants are placed.
func (d deployments) lookList(_ struct{}, list []*placing) {
	ctx, cancel := d.s.bounded(context.Background())
	defer cancel()
	held, err := placementsIn(ctx, d.s.read, tenantsOfCalls(list))
	err = d.s.translate("place", err)
	for _, p := range list {
		p.won, p.err = held[p.call.Tenant], err
	}
}

// tenantsOfCalls are the tenants of the calls, each once, in order.
func tenantsOfCalls(list []*placing) []string {
	names := map[string]bool{}
	for _, p := range list {
		names[string(p.call.Tenant)] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// placeList places calls for one cell in one transaction. No call fails for another's
// sake: what one is refused for is known before anything is written. A statement that
// fails all the same takes them all with it, and each is then tried alone, unless the
// database is what failed.
func (d deployments) placeList(cell cells.CellID, list []*placing) {
	// Bounded by the store's own timeout: a caller that goes takes nobody with it.
	ctx := context.Background()
	tenants := tenantsOfCalls(list)
	err := d.s.beside(ctx, "place", tenants, func(tx *Tx) error { return d.placeIn(ctx, tx, cell, tenants, list) })
	if err == nil {
		return
	}
	if len(list) > 1 && !errors.Is(err, cells.ErrUnavailable) {
		for i := range list {
			list[i].won, list[i].created, list[i].err = deploy.Placement{}, false, nil
			d.placeList(cell, list[i:i+1])
		}
		return
	}
	for _, p := range list {
		p.err = err
	}
}

// placeIn decides about the calls, whose tenants are locked, in their order.
func (d deployments) placeIn(ctx context.Context, tx *Tx, cell cells.CellID, tenants []string, list []*placing) error {
	held, err := placementsIn(ctx, tx, tenants)
	if err != nil {
		return err
	}
	c, _, err := scanDeployment(tx.QueryRowContext(ctx, deploymentCells+` WHERE name = ?`+d.s.d.ForUpdate, cell))
	missing := errors.Is(err, sql.ErrNoRows)
	if err != nil && !missing {
		return err
	}
	first := map[cells.TenantID]*placing{} // who places a tenant that is held by nobody
	for _, p := range list {
		_, placed := held[p.call.Tenant]
		switch {
		case placed || first[p.call.Tenant] != nil:
		case missing:
			p.err = fmt.Errorf("%w: %s", deploy.ErrNoCell, cell)
		default:
			if p.err = deploy.Judge(&c, &p.call); p.err == nil {
				first[p.call.Tenant] = p
				c.Placements++
			}
		}
	}
	var fresh []placed
	for _, tenant := range slices.Sorted(maps.Keys(first)) { // an attach writes in this order, too
		call := first[tenant].call
		fresh = append(fresh, placed{deploy.Placement{Tenant: tenant, Cell: cell, DeploymentID: c.DeploymentID, By: call.By, Actor: call.Actor,
			At: fromMicros(micros(call.At))}, first[tenant].audit})
	}
	others, err := insertPlacements(ctx, tx, fresh) // there may be some of an attach, which locks no tenants
	if err != nil {
		return err
	}
	maps.Copy(held, others)
	for _, p := range fresh {
		if _, lost := others[p.Tenant]; !lost {
			held[p.Tenant], first[p.Tenant].created = p.Placement, true
		}
	}
	for _, p := range list {
		if won, ok := held[p.call.Tenant]; ok {
			p.won, p.err = won, nil
		}
	}
	return nil
}

// placed is a placement to write, with what its audit entry says of the caller.
type placed struct {
	deploy.Placement
	audit api.AuditEntry
}

// insertPlacements writes placements, in their order, and the audit entry of each. Of
// the tenants that are placed already it returns where.
func insertPlacements(ctx context.Context, tx *Tx, list []placed) (others map[cells.TenantID]deploy.Placement, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	var args []any
	for _, p := range list {
		args = append(args, p.Tenant, p.Cell, p.By, p.Actor, micros(p.At))
	}
	rows, err := tx.QueryContext(ctx, `INSERT INTO deployment_placements (tenant, cell, placed_by, actor, at, epoch, move) VALUES `+
		tuples(len(list), `(?, ?, ?, ?, ?, 0, '')`)+` ON CONFLICT (tenant) DO NOTHING RETURNING tenant`, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	created := map[cells.TenantID]bool{}
	for rows.Next() {
		var tenant cells.TenantID
		if err := rows.Scan(&tenant); err != nil {
			return nil, err
		}
		created[tenant] = true
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, err
	}
	var entries []api.AuditEntry
	var lost []string
	for _, p := range list {
		if !created[p.Tenant] {
			lost = append(lost, string(p.Tenant))
			continue
		}
		e := p.audit
		e.Action, e.Tenant, e.Cell = "placement", p.Tenant, p.Cell
		e.Detail = json.RawMessage(`{"by":"` + string(p.By) + `"}`)
		entries = append(entries, e)
	}
	if err := insertAudit(ctx, tx, entries...); err != nil || len(lost) == 0 {
		return nil, err
	}
	return placementsIn(ctx, tx, lost)
}

// placementsIn returns the placements of tenants by tenant.
func placementsIn(ctx context.Context, q rowsQuerier, tenants []string) (map[cells.TenantID]deploy.Placement, error) {
	args := make([]any, len(tenants))
	for i, t := range tenants {
		args[i] = t
	}
	rows, err := q.QueryContext(ctx, deploymentPlacements+` WHERE p.tenant IN (`+tuples(len(tenants), "?")+`)`, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	out := map[cells.TenantID]deploy.Placement{}
	for rows.Next() {
		p, err := scanPlacement(rows)
		if err != nil {
			return nil, err
		}
		out[p.Tenant] = p
	}
	return out, rows.Err()
}

type rowsQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// tuples repeats a part of a statement, with commas between.
func tuples(n int, part string) string { return strings.Repeat(part+", ", n-1) + part }
