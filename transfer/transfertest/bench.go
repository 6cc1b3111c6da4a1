// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"fmt"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// BenchmarkCopy measures the preparation of a move of 20,000 rows of about 200
// bytes, comparison included, in rows per second.
func BenchmarkCopy(b *testing.B, h Harness) {
	const n = 20_000
	w := benchWorld(b, h, n)
	for i := range b.N {
		m := w.move(cells.MoveID(fmt.Sprintf("m%d", i)))
		m.Base += cells.Epoch(2 * i)
		v := h.agent(b, w.b, transfer.WithFollow(0))
		b.StartTimer()
		_, err := v.Prepare(b.Context(), m, w.a.Source(), nil)
		b.StopTimer()
		w.must(err)
		w.must(w.a.Keeper().OpenFence(b.Context(), cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: base, Move: m.ID}))
		w.must(w.a.Sink().Sweep(b.Context()))
		w.must(v.Discard(b.Context(), w.tenant, cells.Residue{Cell: w.b.ID(), Epoch: m.OpenEpoch(), Move: m.ID}, nil))
	}
	b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "rows/s")
}

// BenchmarkCut measures Finish, with writes until the fence is closed.
func BenchmarkCut(b *testing.B, h Harness) {
	w := benchWorld(b, h, 5000)
	var worst time.Duration
	e := base
	from, to := w.a, w.b
	for i := range b.N {
		w.a, w.b = from, to
		m := cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("m%d", i)), Tenant: w.tenant, Source: from.ID(), Target: to.ID(), Base: e}
		v := h.agent(b, to)
		_, err := v.Prepare(b.Context(), m, from.Source(), nil)
		w.must(err)
		for k := range 100 {
			w.must(from.Write(b.Context(), w.tenant, e, "", func(x Exec) error { return putItem(x, w.tenant, fmt.Sprintf("k%05d", k), int64(i)) }))
		}
		w.close(m)
		start := time.Now()
		b.StartTimer()
		_, err = v.Finish(b.Context(), m, from.Source(), nil)
		b.StopTimer()
		worst = max(worst, time.Since(start))
		w.must(err)
		w.commit(m)
		w.must(h.agent(b, from).Discard(b.Context(), w.tenant, cells.Residue{Cell: from.ID(), Epoch: m.CloseEpoch(), Move: m.ID}, nil))
		w.must(to.Sink().Sweep(b.Context()))
		e = m.OpenEpoch()
		from, to = to, from
	}
	b.ReportMetric(float64(worst.Milliseconds()), "worst-ms")
}

func benchWorld(b *testing.B, h Harness, n int) *world {
	b.StopTimer()
	w := newWorld(b, h)
	body := fmt.Sprintf("%0150d", 1)
	for at := 0; at < n; at += 1000 {
		w.write(func(x Exec) error {
			for k := at; k < at+1000; k++ {
				if err := x(`INSERT INTO item (tenant, id, n, body) VALUES (?1, ?2, ?3, ?4)`, string(w.tenant), fmt.Sprintf("k%05d", k), k, body); err != nil {
					return err
				}
			}
			return nil
		})
	}
	b.ResetTimer()
	return w
}
