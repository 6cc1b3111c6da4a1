// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// lineCounter counts the records of a log.
type lineCounter struct {
	slog.Handler
	n atomic.Int64
}

func (c *lineCounter) Enabled(context.Context, slog.Level) bool { return true }
func (c *lineCounter) Handle(context.Context, slog.Record) error {
	c.n.Add(1)
	return nil
}

func TestOutageIsLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newFaultTable(t)
		lines := &lineCounter{}
		r := cells.NewRouter(table, cells.WithRouterLogger(slog.New(lines)))
		if err := r.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		table.with(func(f *faultTable) { f.down = errors.New("no route to the table") })
		<-time.After(5*time.Minute + 20*time.Second)
		breaks := r.Status().Breaks
		if got := lines.n.Load(); got < 5 || got > 6 || breaks < 30 {
			t.Fatalf("%d lines in five minutes of %d breaks", got, breaks)
		}
	})
}
