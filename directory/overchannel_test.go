// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

// process is a stateless process of a cell: it beats, and its agent drains.
type process struct {
	cell   cells.CellID
	mu     sync.Mutex
	drains []cells.TenantRoute
	slow   chan struct{}
}

func (p *process) run(d *dir) {
	d.t.Helper()
	ch := d.state.fleet.Open(d.t, channel.RoleCell, string(p.cell))
	l := listen(d.t)
	mux := http.NewServeMux()
	mux.Handle("POST "+member.PathDrain, ch.Require(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var route cells.TenantRoute
		if err := json.NewDecoder(r.Body).Decode(&route); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		p.mu.Lock()
		p.drains = append(p.drains, route)
		p.mu.Unlock()
		if p.slow != nil {
			select {
			case <-p.slow:
			case <-r.Context().Done():
			}
		}
		_, _ = w.Write([]byte("{}\n"))
	}), channel.RoleDirectory))
	srv := &http.Server{Handler: mux, TLSConfig: ch.Server()}
	h := ch.Client(channel.Identity{Role: channel.RoleDirectory})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.ServeTLS(l, "", "") })
	hb := heartbeat(p.cell, "i-"+string(p.cell), true)
	hb.AgentURL = "https://" + l.Addr().String()
	first := make(chan struct{})
	wg.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for once := false; ctx.Err() == nil; {
			if ok := beat(ctx, h, d.chURL, hb); ok && !once {
				once = true
				close(first)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	<-first
	d.t.Cleanup(func() {
		cancel()
		_ = srv.Close()
		wg.Wait()
		h.CloseIdleConnections()
	})
}

func beat(ctx context.Context, h *http.Client, url string, hb member.Heartbeat) bool {
	b, err := json.Marshal(hb)
	if err != nil {
		return false
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+member.PathHeartbeat, bytes.NewReader(b))
	if err != nil {
		return false
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := h.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// The directory's own agent client, over mutual TLS, with processes that beat.
func TestMoveOverTheChannel(t *testing.T) {
	s := newState(t)
	d := s.start(t, func(c *directory.Config) { c.Agents, c.UndoWindow = nil, -1; c.Lapse = 5 * time.Second })
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	a, b := &process{cell: "a", slow: make(chan struct{})}, &process{cell: "b"}
	a.run(d)
	b.run(d)
	d.place("t", "a")
	m := d.move("t", "b")
	eventually(t, "a is asked to drain", func() bool { a.mu.Lock(); defer a.mu.Unlock(); return len(a.drains) > 0 })
	if r := d.route("t"); r.State != cells.StateDraining {
		t.Errorf("route %+v while a drains", r)
	}
	close(a.slow)
	m = d.untilState(m.ID, api.MoveDone)
	if r := d.route("t"); r.CellID != "b" || r.Epoch != 3 || m.Pause <= 0 {
		t.Errorf("route %+v, pause %v", r, m.Pause)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if got := a.drains[0]; got.TenantID != "t" || got.Epoch != 1 || got.CellID != "a" {
		t.Errorf("drain order %+v", got)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.drains) != 0 {
		t.Errorf("the target was drained: %+v", b.drains)
	}
}
