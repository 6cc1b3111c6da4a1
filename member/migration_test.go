// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// A migration that comes into a move, at either cell, rolls it back: the source goes on
// serving, nothing is left at the target, and once both cells are migrated the tenant
// moves.
func TestMigrationEndsAMove(t *testing.T) {
	p := newPlane(t)
	dir := t.TempDir()
	files := map[cells.CellID]string{"a": filepath.Join(dir, "a.db"), "b": filepath.Join(dir, "b.db")}
	services := map[cells.CellID]*service{"a": p.serve(t, "a", files["a"]), "b": p.serve(t, "b", files["b"])}
	alter := func(cell cells.CellID, column string) error {
		_, err := services[cell].db.ExecContext(t.Context(), "ALTER TABLE items ADD COLUMN "+column+" TEXT")
		return err
	}
	var at cells.Step
	var migrate func() error
	ctrl := p.controller(t, cells.WithDrainDeadline(10*time.Second), cells.WithStepHook(func(_ context.Context, ev cells.StepEvent) error {
		if ev.Step != at {
			return nil
		}
		at = ""
		return migrate()
	}))
	if err := ctrl.Assign(t.Context(), "mover", "a", "test"); err != nil {
		t.Fatal(err)
	}
	f := newFront(t, p)
	stop := f.hammer("mover")
	defer stop()
	eventually(t, "some writes", func() bool { return f.count("mover") > 50 })
	for _, c := range []struct {
		at           cells.Step
		first, after cells.CellID
		column       string
	}{{cells.StepPrepare, "b", "a", "one"}, {cells.StepPrepare, "a", "b", "two"}, {cells.StepFence, "b", "a", "three"}, {cells.StepQuiesce, "a", "b", "four"}} {
		before := f.count("mover")
		at, migrate = c.at, func() error { return alter(c.first, c.column) }
		res, err := ctrl.Run(t.Context(), cells.MovePlan{TenantID: "mover", ToCell: "b", Actor: "test"})
		if !errors.Is(err, cells.ErrRolledBack) || !res.RolledBack || res.Route.CellID != "a" || !strings.Contains(err.Error(), "table items of cell "+string(c.first)+" was altered") {
			t.Fatalf("migration of cell %s at %s: %+v, %v", c.first, c.at, res, err)
		}
		eventually(t, "writes after the rollback", func() bool { return f.count("mover") > before+20 })
		if keys, events := rowsOf(t, files["b"], "mover"); len(keys)+len(events) != 0 {
			t.Errorf("the target still holds %d rows and %d events", len(keys), len(events))
		}
		if err := alter(c.after, c.column); err != nil {
			t.Fatal(err)
		}
	}
	res, err := ctrl.Run(t.Context(), cells.MovePlan{TenantID: "mover", ToCell: "b", Actor: "test"})
	if err != nil || res.Route.CellID != "b" {
		t.Fatalf("the move after the migrations: %+v, %v", res, err)
	}
	stop()
	f.check(files["b"], "mover")
}
