// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// CampaignRun describes a run: many small tenants are moved from one cell to another by
// one campaign, and back by the next.
type CampaignRun struct {
	Edge    string
	Cells   [2]string
	Tenants int
	// Rows of each tenant, of Size bytes; Users of the tenants are used by a client each,
	// which pauses for Think after each request.
	Rows, Size int
	Users      int
	Think      time.Duration
	// Rounds is how many campaigns there are.
	Rounds int
	// Mover places tenants. Campaign moves all of them from a cell to another and returns
	// what came of it once everything is done.
	Mover    Mover
	Campaign func(ctx context.Context, from, to string) (CampaignRound, error)
	OnStep   func(string)
}

// CampaignRound is one campaign.
type CampaignRound struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Moved of all tenants; Took from the start of the campaign to its end, Clean until the
	// last row was removed.
	Moved int           `json:"moved"`
	Took  time.Duration `json:"took_ns"`
	Clean time.Duration `json:"clean_ns"`
	// Rate is moves a second.
	Rate float64 `json:"rate"`
	// Steps is how long each step of the moves took, in their order.
	Steps []StepTook `json:"steps"`
	// Pauses are the drivers' measures.
	Pauses []time.Duration `json:"pauses_ns"`
}

// StepTook is a step of many moves.
type StepTook struct {
	Step string          `json:"step"`
	Took []time.Duration `json:"took_ns"`
}

// CampaignReport is what came of a run.
type CampaignReport struct {
	Tenants int             `json:"tenants"`
	Rows    int             `json:"rows"`
	Size    int             `json:"row_bytes"`
	Rounds  []CampaignRound `json:"rounds"`
	// Used adds up what the clients of tenants counted.
	Used Tally `json:"used"`
}

// Clean reports whether every tenant was moved in every round and nothing was lost.
func (r *CampaignReport) Clean() bool {
	for _, x := range r.Rounds {
		if x.Moved != r.Tenants {
			return false
		}
	}
	return r.Used.Clean()
}

func (r *CampaignRun) step(s string) {
	if r.OnStep != nil {
		r.OnStep(s)
	}
}

// Run carries it out.
func (r *CampaignRun) Run(ctx context.Context) (*CampaignReport, error) {
	rep := &CampaignReport{Tenants: r.Tenants, Rows: r.Rows, Size: r.Size}
	hc := NewHTTPClient(64)
	defer hc.CloseIdleConnections()
	r.step(fmt.Sprintf("placing %d tenants with %d rows", r.Tenants, r.Rows))
	if err := r.fill(ctx, hc); err != nil {
		return rep, err
	}
	using, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	hammers := make([]*Hammer, min(r.Users, r.Tenants))
	for i := range hammers {
		hammers[i] = &Hammer{Client: r.client(hc, i), Clients: 1, Keys: 2, Pause: r.Think}
		wg.Go(func() { hammers[i].Run(using) })
	}
	defer wg.Wait()
	defer stop()
	for i := range r.Rounds {
		from, to := r.Cells[i%2], r.Cells[(i+1)%2]
		r.step(fmt.Sprintf("campaign %d, from %s to %s", i+1, from, to))
		x, err := r.Campaign(ctx, from, to)
		if err != nil {
			return rep, err
		}
		rep.Rounds = append(rep.Rounds, x)
	}
	stop()
	wg.Wait()
	for i, h := range hammers {
		t, err := h.Verify(ctx)
		if err != nil {
			return rep, fmt.Errorf("books of tenant %d: %w", i, err)
		}
		rep.Used.add(t)
	}
	return rep, nil
}

func (r *CampaignRun) client(hc *http.Client, i int) *Client {
	return &Client{Base: r.Edge, Tenant: fmt.Sprintf("t%05d", i), HTTP: hc}
}

// fill places and fills the tenants, a few at once.
func (r *CampaignRun) fill(ctx context.Context, hc *http.Client) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failed error
	slots := make(chan struct{}, 8)
	for i := range r.Tenants {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			c := r.client(hc, i)
			err := r.Mover.Place(ctx, c.Tenant, r.Cells[0])
			if err == nil {
				err = WaitServed(ctx, c)
			}
			if err == nil {
				err = c.Fill(ctx, "bulk", r.Rows, r.Size, func(int) {})
			}
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
		})
	}
	wg.Wait()
	return failed
}
