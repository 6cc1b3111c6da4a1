// SPDX-License-Identifier: Apache-2.0

package open

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/tabletest"
)

// A table that was opened late is the table.
func TestLazyConformance(t *testing.T) {
	tabletest.Run(t, tabletest.Harness{Open: func(tb tabletest.TB) cells.RoutingTable {
		down := true
		l := &lazy{open: func(context.Context) (Table, error) {
			if down {
				return nil, fmt.Errorf("%w: down", cells.ErrUnavailable)
			}
			return cells.NewMemTable(cells.WithWatchIdle(5 * time.Millisecond)), nil
		}}
		tb.Cleanup(func() { _ = l.Close() })
		_, getErr := l.Get(tb.Context(), "t")
		_, listErr := l.List(tb.Context(), cells.ListOptions{})
		_, casErr := l.CompareAndSet(tb.Context(), 0, cells.TenantRoute{})
		_, watchErr := l.Watch(tb.Context(), 0)
		for _, err := range []error{getErr, listErr, casErr, watchErr} {
			if !errors.Is(err, cells.ErrUnavailable) {
				tb.Fatalf("while it is down: %v, want ErrUnavailable", err)
			}
		}
		down = false
		return l
	}})
}

func TestLazyStart(t *testing.T) {
	if _, err := Lazy(t.Context(), "nonsense"); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a malformed address: %v, want ErrInvalid", err)
	}
	now, err := Lazy(t.Context(), "file:"+filepath.Join(t.TempDir(), "routes"))
	if err != nil {
		t.Fatal(err)
	}
	if _, late := now.(*lazy); late {
		t.Error("a table that can be opened is not opened")
	}
	_ = now.Close()
	later, err := Lazy(t.Context(), "postgres://u@127.0.0.1:1/x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := later.Get(t.Context(), "t"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a table that is down: %v, want ErrUnavailable", err)
	}
	if err := later.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := later.Get(t.Context(), "t"); !errors.Is(err, cells.ErrClosed) {
		t.Errorf("after Close: %v, want ErrClosed", err)
	}
}
