// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// lateStore lets something happen between a write and the answer to it.
type lateStore struct {
	Store
	rec   api.Move
	after func()
}

func (s *lateStore) UpdateMove(_ context.Context, _ cells.MoveID, fn func(*api.Move) error, _ *api.AuditEntry) (api.Move, error) {
	if err := fn(&s.rec); err != nil {
		return api.Move{}, err
	}
	read := s.rec
	s.after()
	return read, nil
}

// A rollback is asked for while the driver writes its own progress: the driver
// must not take the record that it has just written for the whole truth.
func TestRollbackAskedDuringAWriteIsKept(t *testing.T) {
	s := &lateStore{rec: api.Move{ID: "mv-1", State: api.MovePreparing}}
	tr := newTracker(s, s.rec, "d")
	s.after = func() {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		// As askBack does for a move that this process drives.
		tr.rec.Cancel, tr.rec.Reason = true, "asked for"
	}
	tr.apply(func(m *api.Move) { m.Step = "begin" })
	if err := tr.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := tr.snapshot(); !m.Cancel || m.Reason != "asked for" || m.Step != "begin" {
		t.Fatalf("after the write the record is %+v", m)
	}
}

// The row may say that nothing is left before the step that removed it is told: a
// move that is over is not at the step before.
func TestDoneIsAtItsLastStep(t *testing.T) {
	m := api.Move{State: api.MoveCleaning, Step: string(cells.StepDiscard), Residue: []cells.Residue{{Cell: "a", Epoch: 2, Move: "m"}}}
	takeResidue(&m, m.Residue, time.Now())
	if m.Step != string(cells.StepDiscard) || m.State != api.MoveCleaning {
		t.Fatalf("rows are left: %s at %s", m.State, m.Step)
	}
	takeResidue(&m, nil, time.Now())
	if m.Step != string(cells.StepRemoved) || m.State != api.MoveDone {
		t.Fatalf("nothing is left: %s at %s", m.State, m.Step)
	}
}
