// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/internal/freeport"
)

// A process that was told to end is not ready, and answers until it has drained.
func TestDrain(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := options{drain: time.Hour}
	if o.admin, err = freeport.Addr(); err != nil {
		t.Fatal(err)
	}
	var leaving drain
	drained, finish := context.WithCancel(t.Context())
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- o.serve(ctx, ln, leaving.api(alive()), leaving.health(alive()), prometheus.NewRegistry(), func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			defer context.AfterFunc(drained, cancel)()
			return leaving.run(ctx, o.drain)
		})
	}()
	c := &http.Client{Transport: &http.Transport{}}
	defer c.CloseIdleConnections()
	ask := func(url string) (status int, closes bool) {
		resp, err := c.Get("http://" + url)
		if err != nil {
			return 0, true
		}
		defer resp.Body.Close()
		return resp.StatusCode, resp.Close
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		deadline, tick := time.After(time.Minute), time.NewTicker(5*time.Millisecond)
		defer tick.Stop()
		for !ok() {
			select {
			case <-deadline:
				t.Fatal("waited in vain: " + what)
			case <-tick.C:
			}
		}
	}
	until("it is ready", func() bool { s, _ := ask(o.admin + "/readyz"); return s == 200 })
	if s, closes := ask(ln.Addr().String()); s != 200 || closes {
		t.Errorf("before: %d, closes %t", s, closes)
	}
	stop()
	until("it is not ready", func() bool { s, _ := ask(o.admin + "/readyz"); return s == 503 })
	if s, _ := ask(o.admin + "/livez"); s != 200 {
		t.Errorf("it is not live: %d", s)
	}
	if s, closes := ask(ln.Addr().String()); s != 200 || !closes {
		t.Errorf("while it drains: %d, closes %t", s, closes)
	}
	finish()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if s, _ := ask(ln.Addr().String()); s != 0 {
		t.Errorf("after: %d", s)
	}
}
