// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/tabletest"
)

// writeFile makes a table file that holds the tenants at once; one change a
// tenant would take long.
func writeFile(tb testing.TB, path string, tenants []string) {
	tb.Helper()
	if err := cells.WriteTableFile(path, tenants); err != nil {
		tb.Fatal(err)
	}
}

func BenchmarkTableMem(b *testing.B) {
	tabletest.Benchmark(b, func(tb testing.TB) cells.RoutingTable { return cells.NewMemTable() })
}

func BenchmarkTableFile(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprintf("tenants=%d", n), func(b *testing.B) {
			tabletest.Benchmark(b, func(tb testing.TB) cells.RoutingTable {
				path := filepath.Join(tb.TempDir(), "routes.json")
				ids := make([]string, n)
				for i := range ids {
					ids[i] = fmt.Sprintf("a-tenant-%06d", i)
				}
				writeFile(tb, path, ids)
				f := cells.NewFileTable(path)
				tb.Cleanup(func() { _ = f.Close() })
				return f
			})
		})
	}
}
