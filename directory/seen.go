// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// unite makes one account of what the clients of several edges saw. The span is the
// whole of it, from the first refusal of any edge to the last of any: between two
// refusals at two edges nobody knows that the tenant was served, and a budget is
// charged for doubt.
func unite(rows []SeenRow) receipt.Seen {
	out := receipt.Seen{Edges: len(rows)}
	var first, last time.Time
	for _, r := range rows {
		if r.Refused == 0 {
			continue
		}
		out.Refused += r.Refused
		if first.IsZero() || r.First.Before(first) {
			first = r.First
		}
		if r.Last.After(last) {
			last = r.Last
		}
	}
	out.Span = last.Sub(first)
	return out
}

// postSeen takes what the clients of an edge saw of moves. The same report again
// changes nothing; one that is newer replaces what the process has said before.
func (s *Server) postSeen(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var rep api.SeenReport
	if err := decodeJSON(w, r, &rep, false); err != nil { // a newer edge may say more
		return 0, nil, err
	}
	now := time.Now().UTC()
	if err := rep.Normalize(); err != nil {
		return 0, nil, err
	}
	id, _ := channel.PeerFrom(r)
	for i := range rep.Moves {
		x := &rep.Moves[i]
		m, err := s.moveSeen(r.Context(), x)
		if errors.Is(err, cells.ErrNotFound) {
			s.log.Info("an edge reports about a move that is not known", "edge", id.Name, "tenant", x.Tenant, "move", x.Move, "base", x.Base)
			continue
		}
		if err != nil {
			return 0, nil, err
		}
		row := SeenRow{Move: m.ID, Edge: id.Name, Instance: rep.Instance, Seq: x.Seq, Refused: x.Refused}
		if x.Refused > 0 {
			row.First, row.Last = now.Add(-x.FirstAgo), now.Add(-x.LastAgo)
		}
		if err := s.seen(r.Context(), m, row); err != nil {
			return 0, nil, err
		}
	}
	return http.StatusOK, struct{}{}, nil
}

// moveSeen finds the move that an edge has seen, by its id or by the epoch that it
// began from: one epoch has one move.
func (s *Server) moveSeen(ctx context.Context, x *api.SeenMove) (*api.Move, error) {
	if x.Move != "" {
		m, err := s.store.Move(ctx, x.Move)
		if err == nil && m.Tenant != x.Tenant {
			return nil, bad("move %s is not one of tenant %s", x.Move, x.Tenant)
		}
		return &m, err
	}
	list, err := s.store.Moves(ctx, MoveFilter{Tenant: x.Tenant, Limit: 64})
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Base == x.Base && list[i].State != api.MoveRefused {
			return &list[i], nil
		}
	}
	return nil, cells.ErrNotFound
}

// seen saves a report and brings the budget, the record and the receipt up to it. All
// of that is done again when the report is repeated after a failure.
func (s *Server) seen(ctx context.Context, m *api.Move, row SeenRow) error {
	if _, err := s.store.SaveSeen(ctx, row); err != nil {
		return err
	}
	rows, err := s.store.Seen(ctx, m.ID)
	if err != nil {
		return err
	}
	span := unite(rows).Span
	if s.cfg.Budget != nil {
		if _, err := s.cfg.Budget.ChargeSeen(ctx, m.Tenant, m.ID, span); err != nil {
			return err
		}
	}
	if m.Seen == nil || *m.Seen != span {
		rec, err := s.store.UpdateMove(ctx, m.ID, func(m *api.Move) error { m.Seen = &span; return nil }, nil)
		if err != nil {
			return err
		}
		*m = rec
	}
	return s.attestClients(ctx, m)
}
