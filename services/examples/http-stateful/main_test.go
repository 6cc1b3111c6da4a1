// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/services/examples/local"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	want := "cell-a: visits is 1\ncell-a: visits is 2\ncell-b: visits is 3\ncell-b: visits is 4\ncell-a: visits is 5\ncell-a: visits is 6\n"
	if out.String() != want {
		t.Errorf("%s, want %s", out.String(), want)
	}
}

// Clients count while the tenant moves: no request fails, and none is counted twice
// or lost.
func TestEveryCountIsThere(t *testing.T) {
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	f, err := local.Start(t.Context(), local.Options{HTTP: service, Schema: schema, Tables: tables})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Place(t.Context(), "acme", "cell-a"); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var counted atomic.Int64
	seen := sync.Map{} // the answers, each once
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := ask(t.Context(), f.URL, http.MethodPost, "n")
				if err != nil {
					t.Error(err)
					return
				}
				if before, twice := seen.LoadOrStore(c.N, c.Cell); twice {
					t.Errorf("%d was answered by %s and %s", c.N, before, c.Cell)
				}
				counted.Add(1)
			}
		})
	}
	for range 2 {
		for _, to := range []cells.CellID{"cell-b", "cell-a"} {
			if _, err := f.Move(t.Context(), "acme", to); err != nil {
				t.Error(err)
			}
		}
	}
	stop()
	wg.Wait()
	c, err := ask(t.Context(), f.URL, http.MethodGet, "n")
	if err != nil || c.N != counted.Load() || c.N == 0 || c.Cell != "cell-a" {
		t.Errorf("%+v, %v; %d were counted", c, err, counted.Load())
	}
	// The events went along.
	events, err := f.Cell("cell-a").Guard.Events(t.Context(), "acme", 0, 100000)
	if err != nil || int64(len(events)) != c.N {
		t.Errorf("%d events, %v, want %d", len(events), err, c.N)
	}
}
