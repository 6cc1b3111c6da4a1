// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/internal/web"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/member/vitals"
)

const (
	// vitalsReport is how often edges report.
	vitalsReport = time.Second
	// vitalsEvery is how often counts are written to the store.
	vitalsEvery = time.Second
	// vitalsKeep is how long the counts of a process are kept apart that is not heard
	// any more.
	vitalsKeep = 24 * time.Hour
)

type vitalsSource struct {
	measured, source, version string
	cell                      cells.CellID
}

// vitalsBook has what processes have reported since it was last written. All of it
// is in their next reports, too.
type vitalsBook struct {
	mu   sync.Mutex
	news map[vitalsSource]vitals.Counts // guarded by mu
}

func (b *vitalsBook) note(measured, source string, row *vitals.Row) {
	k := vitalsSource{measured: measured, source: source, version: row.Version, cell: row.Cell}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.news == nil {
		b.news = map[vitalsSource]vitals.Counts{}
	}
	if old, ok := b.news[k]; !ok || row.Requests >= old.Requests {
		b.news[k] = row.Counts
	}
}

// heartbeat takes what a process of a cell has counted out of its heartbeat.
func (b *vitalsBook) heartbeat(h *member.Heartbeat) {
	c := h.Vitals
	h.Vitals = nil // the members' records do without
	if c != nil && c.Validate() == nil {
		b.note(api.MeasuredByCell, string(h.Cell)+"/"+h.Instance, &vitals.Row{Cell: h.Cell, Version: h.Version, Counts: *c})
	}
}

// flush writes the news.
func (b *vitalsBook) flush(ctx context.Context, s Store) error {
	b.mu.Lock()
	news := b.news
	b.news = nil
	b.mu.Unlock()
	rows := make([]VitalsRow, 0, len(news))
	for k, c := range news {
		rows = append(rows, VitalsRow{Measured: k.measured, Source: k.source, Row: vitals.Row{Cell: k.cell, Version: k.version, Counts: c}})
	}
	err := s.SaveVitals(ctx, rows, time.Now())
	if err != nil {
		for i := range rows {
			b.note(rows[i].Measured, rows[i].Source, &rows[i].Row)
		}
	}
	return err
}

// keepVitals writes what was reported to the store, where all directories read it.
func (s *Server) keepVitals(ctx context.Context) {
	every := time.NewTicker(vitalsEvery)
	defer every.Stop()
	fold := time.NewTicker(time.Hour)
	defer fold.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-every.C:
			err = s.vitals.flush(ctx, s.store)
		case <-fold.C:
			err = s.store.FoldVitals(ctx, time.Now().Add(-vitalsKeep))
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("counts of requests not written; trying again", "err", err)
			s.metrics.storeErrors.Inc()
		}
	}
}

// postVitals takes how the requests of an edge went.
func (s *Server) postVitals(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var rep api.VitalsReport
	if err := web.Decode(w, r, &rep, api.MaxVitalsBody, false); err != nil { // a newer edge may say more
		return 0, nil, err
	}
	if err := rep.Normalize(); err != nil {
		return 0, nil, err
	}
	id, _ := channel.PeerFrom(r)
	for i := range rep.Rows {
		if _, ok := s.fleet.cell(rep.Rows[i].Cell); ok {
			s.vitals.note(api.MeasuredByEdge, id.Name+"/"+rep.Instance, &rep.Rows[i])
		}
	}
	return http.StatusOK, struct{}{}, nil
}

// totals reads what was counted of all cells so far, all their versions together: a
// rollout compares cells, while each has one version.
func (s *Server) totals(ctx context.Context) (rollout.Totals, error) {
	list, err := s.store.Vitals(ctx)
	if err != nil {
		return nil, err
	}
	t := rollout.Totals{api.MeasuredByEdge: {}, api.MeasuredByCell: {}}
	for i := range list {
		if of := t[list[i].Measured]; of != nil {
			of[list[i].Cell] = of[list[i].Cell].Plus(list[i].Counts)
		}
	}
	return t, nil
}
