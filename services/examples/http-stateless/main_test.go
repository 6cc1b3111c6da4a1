// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
	want := "acme is served by cell-a at epoch 1\nacme is served by cell-b at epoch 3\nacme is served by cell-a at epoch 5\n"
	if out.String() != want {
		t.Errorf("%s, want %s", out.String(), want)
	}
}

// No request fails while the tenant goes to and fro.
func TestNothingFails(t *testing.T) {
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	f, err := local.Start(t.Context(), local.Options{HTTP: service})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Place(t.Context(), "acme", "cell-a"); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var asked atomic.Int64
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.URL+"/where", nil)
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("X-Tenant", "acme")
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusOK {
					t.Errorf("%s %s %v", resp.Status, body, err)
					return
				}
				asked.Add(1)
			}
		})
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); asked.Load() < 4 && !t.Failed(); <-tick.C { // the moves may be over before a client has begun
		if time.Now().After(end) {
			t.Fatal("nobody asks")
		}
	}
	for range 5 {
		for _, to := range []cells.CellID{"cell-b", "cell-a"} {
			if _, err := f.Move(t.Context(), "acme", to); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop()
	wg.Wait()
	if asked.Load() == 0 {
		t.Error("nobody asked")
	}
}
