// SPDX-License-Identifier: Apache-2.0

package tabletest

import (
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// Benchmark measures a table: CAS (one writer of one row), CASParallel (writers of
// rows of their own), Get, List (a page of 100 rows) and Watch (from a change until
// a watch reports it). open is called once a measurement and releases the table
// with Cleanup.
func Benchmark(b *testing.B, open func(tb testing.TB) cells.RoutingTable) {
	b.Helper()
	b.Run("CAS", func(b *testing.B) {
		t := open(b)
		var rev cells.Revision
		for b.Loop() {
			r, err := t.CompareAndSet(b.Context(), rev, active("t", "a", 1))
			if err != nil {
				b.Fatal(err)
			}
			rev = r.Revision
		}
	})
	b.Run("CASParallel", func(b *testing.B) {
		t := open(b)
		ids := make(chan cells.TenantID, 1024)
		for i := range cap(ids) {
			ids <- tenantN(i)
		}
		b.RunParallel(func(pb *testing.PB) {
			id := <-ids
			var rev cells.Revision
			for pb.Next() {
				r, err := t.CompareAndSet(b.Context(), rev, active(id, "a", 1))
				if err != nil {
					b.Error(err)
					return
				}
				rev = r.Revision
			}
		})
	})
	b.Run("Get", func(b *testing.B) {
		t := open(b)
		if _, err := t.CompareAndSet(b.Context(), 0, active("t", "a", 1)); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := t.Get(b.Context(), "t"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("List", func(b *testing.B) {
		t := open(b)
		for i := range 100 {
			if _, err := t.CompareAndSet(b.Context(), 0, active(tenantN(i), "a", 1)); err != nil {
				b.Fatal(err)
			}
		}
		for b.Loop() {
			if _, err := t.List(b.Context(), cells.ListOptions{Limit: 100}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Watch", func(b *testing.B) {
		t := open(b)
		r, err := t.CompareAndSet(b.Context(), 0, active("t", "a", 1))
		if err != nil {
			b.Fatal(err)
		}
		w, err := t.Watch(b.Context(), r.Revision)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = w.Close() }()
		for b.Loop() {
			if r, err = t.CompareAndSet(b.Context(), r.Revision, r); err != nil {
				b.Fatal(err)
			}
			for {
				up, err := w.Next(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				if up.Revision >= r.Revision {
					break
				}
			}
		}
	})
}
