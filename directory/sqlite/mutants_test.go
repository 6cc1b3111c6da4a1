// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/directory/sqlite"
	"github.com/cloister-dev/cloister/member"
)

// recorder is a directorytest.TB that remembers failures.
type recorder struct {
	mu       sync.Mutex // guards all below
	failures []string
	cleanups []func()
}

func (r *recorder) Helper()             {}
func (r *recorder) Logf(string, ...any) {}
func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func (r *recorder) run(c directorytest.Case, h directorytest.Harness) []string {
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.Run(r, h)
	}()
	<-done
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
	return r.failures
}

type mutant struct {
	folded bool // counts were folded
	directory.Store
	name string
}

func (m *mutant) is(name string) bool { return m.name == name }

func (m *mutant) Reserve(ctx context.Context, r directory.Reservation, a api.AuditEntry) (directory.LedgerRow, bool, error) {
	switch {
	case m.is("quota is read before the transaction"):
		list, _, err := m.Cells(ctx)
		if err != nil {
			return directory.LedgerRow{}, false, err
		}
		for i := range list {
			if list[i].ID == r.Cell && list[i].Full() {
				return directory.LedgerRow{}, false, directory.ErrCellClosed
			}
		}
		return m.unbounded(ctx, r, a)
	case m.is("quota is ignored"):
		return m.unbounded(ctx, r, a)
	case m.is("joins are refused"):
		row, joined, err := m.Store.Reserve(ctx, r, a)
		if joined {
			err = cells.ErrConflict
		}
		return row, joined, err
	case m.is("overtaken rows stay"):
		r.Seen = 0
	case m.is("joins are audited"):
		row, joined, err := m.Store.Reserve(ctx, r, a)
		if joined {
			err = errors.Join(err, m.AppendAudit(ctx, a))
		}
		return row, joined, err
	}
	return m.Store.Reserve(ctx, r, a)
}

// unbounded reserves with the cell's quota lifted.
func (m *mutant) unbounded(ctx context.Context, r directory.Reservation, a api.AuditEntry) (directory.LedgerRow, bool, error) {
	list, _, err := m.Cells(ctx)
	if err != nil {
		return directory.LedgerRow{}, false, err
	}
	for _, c := range list {
		if c.PlacementsMax != nil && c.ID == r.Cell {
			spec := c.CellSpec
			spec.PlacementsMax, spec.Revision = nil, 0
			if _, err := m.Store.PutCell(ctx, c.ID, spec, a); err != nil {
				return directory.LedgerRow{}, false, err
			}
		}
	}
	return m.Store.Reserve(ctx, r, a)
}

// roomy creates a move with the limits of its target changed for that while.
func (m *mutant) roomy(ctx context.Context, mv api.Move, a api.AuditEntry, change func(*api.CellSpec)) (api.Move, bool, error) {
	list, _, err := m.Cells(ctx)
	if err != nil {
		return mv, false, err
	}
	for _, c := range list {
		if c.ID != mv.To {
			continue
		}
		spec := c.CellSpec
		spec.Revision = 0
		change(&spec)
		if _, err := m.Store.PutCell(ctx, c.ID, spec, a); err != nil {
			return mv, false, err
		}
		defer func() {
			c.CellSpec.Revision = 0
			_, _ = m.Store.PutCell(ctx, c.ID, c.CellSpec, a)
		}()
	}
	return m.Store.CreateMove(ctx, mv, a)
}

func (m *mutant) PutCell(ctx context.Context, id cells.CellID, spec api.CellSpec, a api.AuditEntry) (api.Cell, error) {
	switch {
	case m.is("cell revisions are ignored"):
		spec.Revision = 0
	case m.is("issuers are not unique"):
		spec.Issuers = nil
	case m.is("cells keep old fields"):
		list, _, err := m.Cells(ctx)
		if err != nil {
			return api.Cell{}, err
		}
		for _, c := range list {
			if c.ID == id && spec.Host == "" {
				spec.Host = c.Host
			}
		}
	}
	return m.Store.PutCell(ctx, id, spec, a)
}

func (m *mutant) Settle(ctx context.Context, list []directory.Settlement) error {
	switch {
	case m.is("settlements go back"):
		for i := range list {
			list[i].Revision += cells.Revision(1000 * time.Now().UnixMicro())
		}
	case m.is("tombstones free nothing"):
		var keep []directory.Settlement
		for _, x := range list {
			if x.Exists {
				keep = append(keep, x)
			}
		}
		list = keep
	}
	return m.Store.Settle(ctx, list)
}

func (m *mutant) Release(ctx context.Context, t cells.TenantID, seen cells.Revision) error {
	if m.is("release takes any row") {
		return m.Store.Settle(ctx, []directory.Settlement{{Tenant: t, Revision: 1 << 40}})
	}
	return m.Store.Release(ctx, t, seen)
}

func (m *mutant) SaveAnswer(ctx context.Context, op directory.Operation, b []byte, at time.Time) ([]byte, error) {
	if m.is("answers are the last") {
		_, err := m.Store.SaveAnswer(ctx, op, b, at)
		return b, err
	}
	return m.Store.SaveAnswer(ctx, op, b, at)
}

func (m *mutant) CreateMove(ctx context.Context, mv api.Move, a api.AuditEntry) (api.Move, bool, error) {
	switch {
	case m.is("moves are no operations"):
		mv.OperationID = ""
	case m.is("moves look at no items"):
		mv.Campaign = ""
	case m.is("limits are of tenants only"):
		return m.roomy(ctx, mv, a, func(s *api.CellSpec) { s.RowsMax, s.BytesMax = nil, nil })
	case m.is("room is looked at before"):
		r, err := m.Room(ctx, mv.To, mv.Tenant)
		if err == nil {
			err = r.Refuse()
		}
		if err != nil && !directory.Waived(&mv, err) {
			return mv, false, err
		}
		runtime.Gosched()
		return m.roomy(ctx, mv, a, func(s *api.CellSpec) { s.RowsMax, s.BytesMax = nil, nil })
	case m.is("jurisdictions are for plans only"):
		if _, err := m.SetAttributes(ctx, mv.Tenant, "", "", a); err != nil {
			return mv, false, err
		}
	case m.is("undos may go anywhere"):
		if mv.Undoes != "" {
			if _, err := m.SetAttributes(ctx, mv.Tenant, "", "", a); err != nil {
				return mv, false, err
			}
		}
	case m.is("undos find their cell full"):
		mv.Undoes = ""
	case m.is("moves count at once"):
		rec, created, err := m.Store.CreateMove(ctx, mv, a)
		if err == nil && created {
			_, err = m.Store.UpdateMove(ctx, rec.ID, func(r *api.Move) error { r.State = api.MoveCleaning; return nil }, nil)
		}
		return rec, created, err
	}
	return m.Store.CreateMove(ctx, mv, a)
}

func (m *mutant) UpdateMove(ctx context.Context, id cells.MoveID, fn func(*api.Move) error, a *api.AuditEntry) (api.Move, error) {
	if m.is("updates are lost") {
		rec, err := m.Store.Move(ctx, id)
		if err != nil {
			return rec, err
		}
		if err := fn(&rec); err != nil {
			return rec, err
		}
		runtime.Gosched()
		return m.Store.UpdateMove(ctx, id, func(r *api.Move) error { *r = rec; return nil }, a)
	}
	if m.is("updates are not audited") {
		a = nil
	}
	return m.Store.UpdateMove(ctx, id, fn, a)
}

func (m *mutant) TakeMove(ctx context.Context, seen directory.MoveBeat, driver string) (bool, error) {
	if m.is("moves are taken from the living") {
		list, err := m.MoveBeats(ctx)
		if err != nil {
			return false, err
		}
		for _, b := range list {
			if b.ID == seen.ID {
				seen = b
			}
		}
	}
	return m.Store.TakeMove(ctx, seen, driver)
}

func (m *mutant) Beat(ctx context.Context, driver string) error {
	if m.is("beats are forgotten") {
		return nil
	}
	return m.Store.Beat(ctx, driver)
}

func (m *mutant) SaveMembers(ctx context.Context, list []member.Heartbeat, at time.Time) error {
	if m.is("members beat once") {
		known, err := m.Members(ctx)
		if err != nil {
			return err
		}
		if len(known) > 0 {
			return nil
		}
	}
	return m.Store.SaveMembers(ctx, list, at)
}

type lossyBudgets struct{ cells.BudgetStore }

func (l lossyBudgets) Update(ctx context.Context, t cells.TenantID, change func([]cells.BudgetEntry) ([]cells.BudgetEntry, error)) error {
	old, err := l.Entries(ctx, t)
	if err != nil {
		return err
	}
	next, err := change(old)
	if err != nil {
		return err
	}
	runtime.Gosched()
	return l.BudgetStore.Update(ctx, t, func([]cells.BudgetEntry) ([]cells.BudgetEntry, error) { return next, nil })
}

func (m *mutant) Budgets() cells.BudgetStore {
	if m.is("limits are everybody's") {
		return struct{ cells.BudgetStore }{m.Store.Budgets()}
	}
	if m.is("budgets are lost") || m.is("budgets are spent twice") {
		return lossyBudgets{m.Store.Budgets()}
	}
	return m.Store.Budgets()
}

func (m *mutant) SaveSeen(ctx context.Context, r directory.SeenRow) (bool, error) {
	if m.is("reports are taken as they come") {
		old, err := m.Seen(ctx, r.Move)
		if err != nil {
			return false, err
		}
		for _, o := range old {
			r.Seq = max(r.Seq, o.Seq+1)
		}
	}
	return m.Store.SaveSeen(ctx, r)
}

func (m *mutant) AppendReceipt(ctx context.Context, id cells.MoveID, build func([][]byte) (directory.ReceiptChange, error)) error {
	if m.is("receipts keep their first end") {
		old, err := m.Receipt(ctx, id)
		if err != nil {
			return err
		}
		if first := build; len(old) > 0 {
			build = func(b [][]byte) (directory.ReceiptChange, error) {
				c, err := first(b)
				c.EndAt = nil
				return c, err
			}
		}
	}
	if m.is("receipts are built outside") {
		old, err := m.Receipt(ctx, id)
		if err != nil {
			return err
		}
		next, err := build(old)
		if err != nil {
			return err
		}
		build = func([][]byte) (directory.ReceiptChange, error) { return next, nil }
	}
	return m.Store.AppendReceipt(ctx, id, build)
}

// TestSuiteKillsMutants runs the suite against stores that are wrong in one way
// each: the named case, at least, must fail.
func TestSuiteKillsMutants(t *testing.T) {
	byName := map[string]directorytest.Case{}
	for _, c := range directorytest.Cases() {
		byName[c.Name] = c
	}
	for name, killer := range map[string]string{
		"quota is read before the transaction": "ReserveQuotaUnderConcurrency",
		"quota is ignored":                     "ReserveRefusals",
		"joins are refused":                    "ReserveJoins",
		"joins are audited":                    "ReserveOneWinner",
		"overtaken rows stay":                  "SettleFreesAndOvertakes",
		"cell revisions are ignored":           "CellRevisionGuards",
		"issuers are not unique":               "CellNamesAreUnique",
		"cells keep old fields":                "CellsRoundTrip",
		"settlements go back":                  "SettleOnlyForward",
		"tombstones free nothing":              "SettleFreesAndOvertakes",
		"release takes any row":                "ReleaseOnlyItsOwn",
		"answers are the last":                 "AnswersAreFirst",
		"moves are no operations":              "MoveLifecycle",
		"moves count at once":                  "MoveRefusals",
		"limits are of tenants only":           "RoomIsKept",
		"jurisdictions are for plans only":     "RoomIsKept",
		"undos may go anywhere":                "RoomOfUndos",
		"undos find their cell full":           "RoomOfUndos",
		"room is looked at before":             "RoomUnderConcurrency",
		"updates are lost":                     "MoveUpdatesAreNotLost",
		"updates are not audited":              "AuditFollowsChanges",
		"moves are taken from the living":      "MoveTakeover",
		"beats are forgotten":                  "MoveTakeover",
		"campaigns are made again":             "CampaignLifecycle",
		"items are read before":                "CampaignItemsAreTakenOnce",
		"moves look at no items":               "CampaignMovesOnce",
		"results look at no moves":             "CampaignMovesOnce",
		"edits keep what was planned":          "CampaignEdits",
		"campaigns are taken from the living":  "CampaignTakeover",
		"rollouts are made again":              "RolloutLifecycle",
		"rollouts hold no cells":               "RolloutHoldsCells",
		"units become anything":                "RolloutUnits",
		"newcomers come twice":                 "RolloutUnits",
		"rollouts are taken from the living":   "RolloutTakeover",
		"counts are added up":                  "VitalsOnlyGrow",
		"folding forgets":                      "VitalsOnlyGrow",
		"measures are the last":                "FactsOfTenants",
		"members beat once":                    "MembersBeat",
		"budgets are lost":                     "BudgetsAreAtomic",
		"budgets are spent twice":              "BudgetIsNotSpentTwice",
		"limits are everybody's":               "BudgetLimits",
		"reports are taken as they come":       "SeenKeepsTheNewest",
		"receipts are built outside":           "ReceiptsOnlyGrow",
		"receipts keep their first end":        "ReceiptsEnd",
	} {
		t.Run(name, func(t *testing.T) {
			c, ok := byName[killer]
			if !ok {
				t.Fatalf("there is no case %s", killer)
			}
			// A race needs not be lost at the first attempt.
			for range 10 {
				path := filepath.Join(t.TempDir(), "directory.db")
				failures := new(recorder).run(c, directorytest.Harness{Open: func(ctx context.Context) (directory.Store, error) {
					s, err := sqlite.Open(ctx, path)
					if err != nil {
						return nil, err
					}
					return &mutant{Store: s, name: name}, nil
				}})
				if len(failures) > 0 {
					t.Logf("killed: %s", failures[0])
					return
				}
			}
			t.Errorf("%s passes a store in which %s", killer, name)
		})
	}
}
