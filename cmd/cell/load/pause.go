// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"time"
)

// PauseCell is one cell of a matrix of pauses: a store, a tenant's size, a rate of writes.
type PauseCell struct {
	Store string `json:"store"`
	Rows  int    `json:"rows"`
	// Rate is how many writes a second were asked for, 0: as many as are answered;
	// Reached is how many there were while the moves went on.
	Rate    float64 `json:"rate"`
	Reached float64 `json:"reached"`
	Moves   int     `json:"moves"`
	// Clients has, for each cut and each client that waited in it, its longest wait;
	// Driver the drivers' measures.
	Clients []time.Duration `json:"clients_ns"`
	Driver  []time.Duration `json:"driver_ns"`
	Clean   bool            `json:"clean"`
}

// PauseMatrix is what came of a run of [PauseRun].
type PauseMatrix struct {
	Cells []PauseCell `json:"cells"`
}

// Clean reports whether nothing failed and nothing was lost in any cell.
func (m *PauseMatrix) Clean() bool {
	for _, c := range m.Cells {
		if !c.Clean {
			return false
		}
	}
	return true
}

// PauseRun measures cells of a matrix on one fleet: all sizes by all rates.
type PauseRun struct {
	Store string
	Rows  []int
	Rates []float64
	// Run is one cell, but for its rows and its rate. Its clients only write.
	Run MoveRun
}

// Into measures and adds what it finds, also when an error ends it.
func (p PauseRun) Into(ctx context.Context, m *PauseMatrix) error {
	for _, rows := range p.Rows {
		for _, rate := range p.Rates {
			r := p.Run
			r.Rows, r.Rate, r.WriteShare = rows, rate, 100
			r.OnStep(fmt.Sprintf("%s, %d rows, %s writes/s", p.Store, rows, RateName(rate)))
			rep, err := r.Run(ctx)
			c := PauseCell{Store: p.Store, Rows: rows, Rate: rate, Reached: rep.WritesPerS, Moves: len(rep.Moves), Clean: err == nil && rep.Clean()}
			for _, mv := range rep.Moves {
				c.Clients, c.Driver = append(c.Clients, mv.Clients...), append(c.Driver, mv.Pause)
			}
			if len(rep.Moves) > 0 {
				m.Cells = append(m.Cells, c)
			}
			if err != nil {
				return fmt.Errorf("%s, %d rows, %s writes/s: %w", p.Store, rows, RateName(rate), err)
			}
		}
	}
	return nil
}

// RateName names a rate of writes.
func RateName(rate float64) string {
	if rate == 0 {
		return "max"
	}
	return fmt.Sprintf("%g", rate)
}
