// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"context"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

// TB is the part of [testing.TB] that the suite uses. Fatalf must not return.
type TB interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// Harness gives one case its store.
type Harness struct {
	// Open opens the case's store; each call is another handle on the same records.
	// The suite closes what it opens.
	Open func(ctx context.Context) (directory.Store, error)
}

// Case is one requirement.
type Case struct {
	Name string
	Run  func(t TB, h Harness)
}

// Run runs all cases; newHarness is called once for each of them.
func Run(t *testing.T, newHarness func(t *testing.T) Harness) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			c.Run(t, newHarness(t))
		})
	}
}

// Cases returns the suite.
func Cases() []Case {
	return []Case{
		{"CellsRoundTrip", cellsRoundTrip},
		{"CellNamesAreUnique", cellNamesAreUnique},
		{"CellDefaultIsOne", cellDefaultIsOne},
		{"CellRevisionGuards", cellRevisionGuards},
		{"ReserveRefusals", reserveRefusals},
		{"ReserveJoins", reserveJoins},
		{"ReserveChoosesEmptiest", reserveChoosesEmptiest},
		{"ReserveQuotaUnderConcurrency", reserveQuotaUnderConcurrency},
		{"ReserveOneWinner", reserveOneWinner},
		{"SettleOnlyForward", settleOnlyForward},
		{"SettleFreesAndOvertakes", settleFreesAndOvertakes},
		{"ReleaseOnlyItsOwn", releaseOnlyItsOwn},
		{"AnswersAreFirst", answersAreFirst},
		{"MoveLifecycle", moveLifecycle},
		{"MoveRefusals", moveRefusals},
		{"MoveCountsAtTarget", moveCountsAtTarget},
		{"RoomIsKept", roomIsKept},
		{"RoomOfUndos", roomOfUndos},
		{"RoomUnderConcurrency", roomUnderConcurrency},
		{"MoveUpdatesAreNotLost", moveUpdatesAreNotLost},
		{"MoveTakeover", moveTakeover},
		{"MovePages", movePages},
		{"MembersBeat", membersBeat},
		{"BudgetsAreAtomic", budgetsAreAtomic},
		{"BudgetLimits", budgetLimits},
		{"BudgetIsNotSpentTwice", budgetIsNotSpentTwice},
		{"SeenKeepsTheNewest", seenKeepsTheNewest},
		{"ReceiptsOnlyGrow", receiptsOnlyGrow},
		{"ReceiptsEnd", receiptsEnd},
		{"AuditFollowsChanges", auditFollowsChanges},
		{"CampaignLifecycle", campaignLifecycle},
		{"CampaignItemsAreTakenOnce", campaignItemsAreTakenOnce},
		{"CampaignMovesOnce", campaignMovesOnce},
		{"CampaignEdits", campaignEdits},
		{"CampaignTakeover", campaignTakeover},
		{"RolloutLifecycle", rolloutLifecycle},
		{"RolloutUnits", rolloutUnits},
		{"RolloutHoldsCells", rolloutHoldsCells},
		{"RolloutTakeover", rolloutTakeover},
		{"VitalsOnlyGrow", vitalsOnlyGrow},
		{"FactsOfTenants", factsOfTenants},
		{"SurvivesReopen", survivesReopen},
		{"ClosedStoreIsUnavailable", closedStoreIsUnavailable},
	}
}

var epoch = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// env is one case's view of its store.
type env struct {
	TB
	ctx context.Context
	h   Harness
	s   directory.Store
}

func start(t TB, h Harness) *env {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	e := &env{TB: t, ctx: ctx, h: h}
	e.s = e.open()
	return e
}

func (e *env) open() directory.Store {
	e.Helper()
	s, err := e.h.Open(e.ctx)
	if err != nil {
		e.Fatalf("open: %v", err)
	}
	e.Cleanup(func() { _ = s.Close() })
	return s
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatalf("unexpected error: %v", err)
	}
}

func audit(action string, tenant cells.TenantID) api.AuditEntry {
	return api.AuditEntry{At: epoch, Peer: "operator", Actor: "alice", RequestID: "r-" + action, Action: action, Tenant: tenant}
}

func limit(n int64) *int64 { return &n }

func (e *env) cell(id cells.CellID, spec api.CellSpec) api.Cell {
	e.Helper()
	e.must(spec.Normalize())
	c, err := e.s.PutCell(e.ctx, id, spec, audit("cell.put", ""))
	e.must(err)
	return c
}

func reservation(tenant cells.TenantID, cell cells.CellID, op string, seen cells.Revision) directory.Reservation {
	return directory.Reservation{
		Tenant: tenant, Cell: cell, Actor: "alice", Seen: seen, At: epoch,
		Operation: directory.Operation{ID: op, Kind: directory.OperationPlacement, Tenant: tenant, Cell: cell},
	}
}

func (e *env) reserve(r directory.Reservation) (directory.LedgerRow, bool, error) {
	return e.s.Reserve(e.ctx, r, audit("placement.reserve", r.Tenant))
}

func (e *env) mustReserve(r directory.Reservation) directory.LedgerRow {
	e.Helper()
	row, joined, err := e.reserve(r)
	e.must(err)
	if joined {
		e.Fatalf("tenant %s joined a reservation, want a new one", r.Tenant)
	}
	return row
}

func (e *env) settle(tenant cells.TenantID, cell cells.CellID, rev cells.Revision) {
	e.Helper()
	e.must(e.s.Settle(e.ctx, []directory.Settlement{{Tenant: tenant, Cell: cell, Revision: rev, Exists: cell != "", At: epoch}}))
}

func (e *env) tenants(id cells.CellID) int64 {
	e.Helper()
	list, _, err := e.s.Cells(e.ctx)
	e.must(err)
	for _, c := range list {
		if c.ID == id {
			return c.Tenants
		}
	}
	e.Fatalf("cell %s is not listed", id)
	return 0
}

func (e *env) wantTenants(id cells.CellID, want int64) {
	e.Helper()
	if got := e.tenants(id); got != want {
		e.Errorf("cell %s counts %d tenants, want %d", id, got, want)
	}
}

func (e *env) auditCount(tenant cells.TenantID) int {
	e.Helper()
	list, err := e.s.Audit(e.ctx, directory.AuditFilter{Tenant: tenant, Limit: 1000})
	e.must(err)
	return len(list)
}
