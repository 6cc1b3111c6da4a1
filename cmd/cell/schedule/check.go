// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"bytes"
	"context"
	"slices"

	"github.com/cloister-dev/cloister/cells"
)

// check compares what the clients know with what the cells hold.
func (s *schedule) check(ctx context.Context) {
	w := s.w
	if _, err := cells.CheckTrace(bytes.NewReader(w.trace.Bytes())); err != nil {
		s.wrong("the trace is no behaviour of the protocol: %v", err)
	}
	for _, c := range w.cells {
		if c.process() == nil {
			s.restart(ctx, c)
		}
	}
	for _, b := range s.books {
		r, err := w.table.Get(ctx, b.tenant)
		if err != nil {
			s.wrong("route of %s: %v", b.tenant, err)
			continue
		}
		for _, id := range w.names {
			if err := w.cells[id].call(ctx, func(ctx context.Context, p *process) error { return s.checkIn(ctx, b, &r, p) }); err != nil {
				s.wrong("%s in %s: %v", b.tenant, id, err)
			}
		}
		s.res.Acked += len(b.acked)
		if len(b.failed) > 0 {
			s.wrong("%s saw %d failures, the first: %s", b.tenant, len(b.failed), b.failed[0])
		}
	}
}

// checkIn looks at one tenant in one cell.
func (s *schedule) checkIn(ctx context.Context, b *books, r *cells.TenantRoute, p *process) error {
	found := map[string]bool{}
	rows, err := p.db.QueryContext(ctx, "SELECT k FROM items WHERE tenant = ?1", string(b.tenant))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var k string
		if err := rows.Scan(&k); err != nil {
			return err
		}
		found[k] = true
	}
	if err := rows.Err(); err != nil {
		return err
	}
	var total int
	if err := p.db.QueryRowContext(ctx, "SELECT coalesce(sum(n), 0) FROM totals WHERE tenant = ?1", string(b.tenant)).Scan(&total); err != nil {
		return err
	}
	events, err := p.guard.Events(ctx, b.tenant, 0, 1<<20)
	if err != nil {
		return err
	}
	fence, err := p.guard.Fence(ctx, b.tenant)
	open := err == nil && fence.Open
	if p.c.id != r.CellID {
		if len(found) > 0 || total > 0 || len(events) > 0 || open {
			s.wrong("%s is in %s; %s has %d rows, a total of %d, %d events, fence %+v", b.tenant, r.CellID, p.c.id, len(found), total, len(events), fence)
		}
		return nil
	}
	if !open || fence.Epoch != r.Epoch {
		s.wrong("%s is in %s at %d; the fence there is %+v", b.tenant, r.CellID, r.Epoch, fence)
	}
	for _, k := range b.acked {
		if !found[k] {
			s.wrong("%s: the acknowledged write %s is lost", b.tenant, k)
		}
	}
	for k := range found {
		if !slices.Contains(b.acked, k) && !slices.Contains(b.unknown, k) {
			s.wrong("%s: %s was refused and is there", b.tenant, k)
		}
	}
	if total != len(found) {
		s.wrong("%s: %d rows and a total of %d", b.tenant, len(found), total)
	}
	if len(events) != len(found) {
		s.wrong("%s: %d rows and %d events", b.tenant, len(found), len(events))
	}
	for i, e := range events {
		if e.Seq != cells.EventSeq(i+1) {
			s.wrong("%s: event %d where %d belongs", b.tenant, e.Seq, i+1)
			break
		}
	}
	return nil
}
