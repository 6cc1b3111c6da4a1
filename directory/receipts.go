// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// maxStatements bounds the statements of one receipt: past it, late reports of edges
// change the budget and the record only.
const maxStatements = 64

// state signs what build makes of the statements so far and adds it to the move's
// receipt; build may return nil to add nothing.
func (s *Server) state(ctx context.Context, m *api.Move, build func(said []receipt.Statement) (*receipt.Statement, error)) error {
	if s.cfg.ReceiptKey == nil {
		return nil
	}
	return s.store.AppendReceipt(ctx, m.ID, func(entries [][]byte) (ReceiptChange, error) {
		said, err := statementsOf(m.ID, entries)
		if err != nil {
			return ReceiptChange{}, err
		}
		next, err := build(said)
		if err != nil || next == nil {
			return ReceiptChange{}, err
		}
		next.Move, next.Tenant = m.ID, m.Tenant
		entry, err := s.sign(entries, next)
		return ReceiptChange{Entry: entry, EndAt: s.endAt(append(said, *next))}, err
	})
}

func statementsOf(id cells.MoveID, entries [][]byte) ([]receipt.Statement, error) {
	r, err := receipt.New(id, entries)
	if err != nil {
		return nil, err
	}
	return r.Statements()
}

func (s *Server) sign(entries [][]byte, next *receipt.Statement) ([]byte, error) {
	next.At, next.By = time.Now().UTC(), s.instance
	return receipt.Append(s.cfg.ReceiptKey, entries, *next)
}

// endAt is when a receipt that says so is to be ended: once all that remained is told
// about, and edges have had time to report.
func (s *Server) endAt(said []receipt.Statement) *time.Time {
	if unsaid(said) != nil {
		return new(time.Time)
	}
	at := time.Now().Add(s.cfg.ReceiptGrace)
	return &at
}

// endBatch is how many receipts are ended in one change, endBatches how many changes in
// a row: what else is swept must not wait for all receipts of an older build.
const (
	endBatch   = 64
	endBatches = 4
)

// endReceipts ends the receipts that are due. A directory that has just started gives
// edges that could not report the same time again.
func (e *executor) endReceipts(ctx context.Context) error {
	s := e.s
	if s.cfg.ReceiptKey == nil || time.Since(s.started) < s.cfg.ReceiptGrace {
		return nil
	}
	for range endBatches {
		n, err := s.store.EndReceipts(ctx, time.Now(), endBatch, s.ended)
		if err != nil || n < endBatch {
			return err
		}
	}
	return nil
}

// ended is what becomes of a receipt whose end is due.
func (s *Server) ended(id cells.MoveID, entries [][]byte) (ReceiptChange, error) {
	never := new(time.Time)
	said, err := statementsOf(id, entries)
	if err != nil { // it must not stop the others; a newer build may read it
		s.log.Error("receipt not ended; it is tried again in an hour", "move", id, "err", err)
		later := time.Now().Add(time.Hour)
		return ReceiptChange{EndAt: &later}, nil
	}
	if len(said) == 0 || receipt.Ended(said) || unsaid(said) != nil {
		return ReceiptChange{EndAt: never}, nil
	}
	next := &receipt.Statement{Kind: receipt.KindEnd, Move: id, Tenant: said[0].Tenant, End: &receipt.End{Statements: len(said) + 1}}
	entry, err := s.sign(entries, next)
	return ReceiptChange{Entry: entry, EndAt: never}, err
}

// attest writes the outcome of a move, unless it is written. It is done before the
// record says that the move is over.
func (e *executor) attest(ctx context.Context, t *tracker, state api.MoveState, row *cells.TenantRoute, reason string) error {
	m := t.snapshot()
	if state == api.MoveRefused || m.StartedAt.IsZero() || m.Base == 0 || !begun(&m, row) {
		return nil
	}
	return e.insist(ctx, "receipt not written", m.ID, func() error {
		return e.s.state(ctx, &m, func(said []receipt.Statement) (*receipt.Statement, error) {
			if len(said) > 0 {
				return nil, nil
			}
			o := outcomeOf(&m, state, row, reason)
			var err error
			var driver time.Duration
			if o.Clients, o.Budget, driver, err = e.s.cost(ctx, &m); err != nil {
				return nil, err
			}
			if o.Pause == 0 { // the steps were lost with an earlier driver
				o.Pause = driver
			}
			return &receipt.Statement{Kind: receipt.KindOutcome, Outcome: o}, nil
		})
	})
}

func outcomeOf(m *api.Move, state api.MoveState, row *cells.TenantRoute, reason string) *receipt.Outcome {
	ref := cells.MoveRef{ID: m.ID, Tenant: m.Tenant, Source: m.From, Target: m.To, Base: m.Base}
	o := &receipt.Outcome{
		Verdict: receipt.Committed, Source: m.From, Target: m.To, Base: m.Base, Closed: ref.CloseEpoch(), Opened: ref.OpenEpoch(),
		EventMark: m.EventMark, DataMark: m.DataMark, Tables: []receipt.Table{}, Rows: m.Rows, Bytes: m.Bytes,
		Actor: m.Actor, Forced: m.Force, Operation: m.OperationID, Request: m.RequestID, Driver: m.Driver,
		Predicted: m.Predicted, Bound: m.Bound, Pause: max(measured(m), 0),
		Created: m.CreatedAt, Started: m.StartedAt, Served: m.ServedAt, Remains: residueOf(row, m.ID),
	}
	if row.Epoch == ref.OpenEpoch() && row.CellID == m.To && o.DataMark == "" {
		o.EventMark, o.DataMark = row.EventMark, row.DataMark
	}
	if state == api.MoveRolledBack {
		o.Verdict, o.Reason, o.EventMark, o.DataMark = receipt.RolledBack, orDefault(reason, m.Reason), 0, ""
	}
	for _, c := range m.Compared {
		d := receipt.Digest{Rows: c.Rows, Sum: c.Sum}
		o.Tables = append(o.Tables, receipt.Table{Table: c.Table, Position: c.Position, Whole: c.Whole, Keys: c.Keys, Source: d, Target: d})
	}
	finished := false
	for _, s := range m.Steps {
		switch cells.Step(s.Step) {
		case cells.StepQuiesce:
			o.Cut = s.At
		case cells.StepFinish:
			finished = true
		case cells.StepCommit, cells.StepRollback:
			o.Decided = s.At
		}
	}
	o.ComparedUnknown = o.Verdict == receipt.Committed && o.DataMark != "" && !finished
	return o
}

// cost is what clients saw of the move, what it did to the budget, and the pause that
// its driver has charged.
func (s *Server) cost(ctx context.Context, m *api.Move) (seen *receipt.Seen, b *receipt.Budget, driver time.Duration, _ error) {
	rows, err := s.store.Seen(ctx, m.ID)
	if err != nil {
		return nil, nil, 0, err
	}
	if len(rows) > 0 {
		all := unite(rows)
		seen = &all
	}
	if s.cfg.Budget == nil {
		return seen, nil, 0, nil
	}
	a, err := s.cfg.Budget.Account(ctx, m.Tenant)
	if err != nil {
		return nil, nil, 0, err
	}
	b = &receipt.Budget{Limit: a.Limit.Pause, Window: a.Window, Before: a.Without(m.ID), After: a.Left}
	if e, ok := a.Entry(m.ID); ok {
		b.Charged, driver = e.Pause, e.Driver
	}
	return seen, b, driver, nil
}

// attestRemoval writes what became of the rows that the outcome said remained.
func (e *executor) attestRemoval(ctx context.Context, m *api.Move) error {
	if e.s.cfg.ReceiptKey == nil {
		return nil
	}
	return e.insist(ctx, "receipt not amended", m.ID, func() error {
		row, err := e.s.table.Get(ctx, m.Tenant)
		if err != nil {
			return err
		}
		for {
			added := false
			err := e.s.state(ctx, m, func(said []receipt.Statement) (*receipt.Statement, error) {
				r := unsaid(said)
				if r == nil {
					return nil, nil
				}
				added = true
				holds := row.Exists() && (row.CellID == r.Cell || row.TargetCell == r.Cell)
				return &receipt.Statement{Kind: receipt.KindRemoval, Removal: &receipt.Removal{Cell: r.Cell, Epoch: r.Epoch, Gone: !holds}}, nil
			})
			if err != nil || !added {
				return err
			}
		}
	})
}

// amend says in the receipt of a move, if it has one, that nothing of it remains.
func (e *executor) amend(ctx context.Context, id cells.MoveID) {
	if m, err := e.s.store.Move(ctx, id); err == nil {
		_ = e.attestRemoval(ctx, &m) // fails only when the server closes
	}
}

// unsaid returns what the outcome said remained and no later statement is about.
func unsaid(said []receipt.Statement) *cells.Residue {
	if len(said) == 0 {
		return nil
	}
	for _, r := range said[0].Outcome.Remains {
		if !slices.ContainsFunc(said, func(s receipt.Statement) bool {
			return s.Removal != nil && s.Removal.Cell == r.Cell && s.Removal.Epoch == r.Epoch
		}) {
			return &r
		}
	}
	return nil
}

// attestClients amends the receipt by what edges have reported since it was written.
func (s *Server) attestClients(ctx context.Context, m *api.Move) error {
	return s.state(ctx, m, func(said []receipt.Statement) (*receipt.Statement, error) {
		if len(said) == 0 || len(said) >= maxStatements || receipt.Ended(said) {
			return nil, nil
		}
		last := said[0].Outcome.Clients
		for _, x := range said {
			if x.Clients != nil {
				last = &x.Clients.Seen
			}
		}
		seen, budget, _, err := s.cost(ctx, m)
		if err != nil || seen == nil || last != nil && *last == *seen {
			return nil, err
		}
		return &receipt.Statement{Kind: receipt.KindClients, Clients: &receipt.Clients{Seen: *seen, Budget: budget}}, nil
	})
}

func (s *Server) getReceipt(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := moveOf(r)
	if err != nil {
		return 0, nil, err
	}
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	if _, err := s.store.Move(r.Context(), id); err != nil {
		return 0, nil, unknownMove(id, err)
	}
	entries, err := s.store.Receipt(r.Context(), id)
	if err != nil {
		return 0, nil, err
	}
	if len(entries) == 0 {
		detail := "move " + string(id) + " has no receipt: it is not over, or never began"
		if s.cfg.ReceiptKey == nil {
			detail = "move " + string(id) + " has no receipt: this directory has no key to sign one"
		}
		return 0, nil, &cells.Answer{Code: cells.CodeNotFound, Detail: detail}
	}
	out, err := receipt.New(id, entries)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, out, nil
}
