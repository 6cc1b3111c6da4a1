// SPDX-License-Identifier: Apache-2.0

package tabletest_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/tabletest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func memHarness(wrap func(*cells.MemTable) cells.RoutingTable) tabletest.Harness {
	return tabletest.Harness{
		Open: func(tb tabletest.TB) cells.RoutingTable {
			t := cells.NewMemTable(cells.WithWatchIdle(5 * time.Millisecond))
			tb.Cleanup(func() { _ = t.Close() })
			if wrap == nil {
				return t
			}
			return wrap(t)
		},
	}
}

// shared hands out the same table as if to several processes.
type shared struct{ *cells.MemTable }

func (shared) Close() error { return nil }

func TestMemTable(t *testing.T) {
	h := memHarness(nil)
	h.Another = func(_ tabletest.TB, t cells.RoutingTable) cells.RoutingTable { return shared{t.(*cells.MemTable)} }
	h.Compact = func(_ tabletest.TB, t cells.RoutingTable) { t.(*cells.MemTable).Compact(1 << 62) }
	tabletest.Run(t, h)
}
