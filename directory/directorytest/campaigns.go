// SPDX-License-Identifier: Apache-2.0

package directorytest

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

func planned(n int) []api.PlannedItem {
	var out []api.PlannedItem
	for i := range n {
		out = append(out, api.PlannedItem{PlannedMove: api.PlannedMove{Tenant: cells.TenantID(fmt.Sprintf("t%03d", i)), From: "a", To: "b"}, Rows: 10, Bytes: 100})
	}
	return out
}

func (e *env) campaign(id api.CampaignID, n int, op string) api.Campaign {
	e.Helper()
	c, created, err := e.s.CreateCampaign(e.ctx, api.Campaign{ID: id, Actor: "alice", OperationID: op, CreatedAt: epoch}, planned(n), audit("campaign.plan", ""))
	e.must(err)
	if !created {
		e.Fatalf("campaign %s was not created", id)
	}
	return c
}

func (e *env) order(id api.CampaignID, s api.CampaignState) api.Campaign {
	e.Helper()
	c, err := e.s.UpdateCampaign(e.ctx, id, func(c *api.Campaign) error { c.State = s; return nil }, nil)
	e.must(err)
	return c
}

// counts compares the record's counts with the items.
func (e *env) counts(id api.CampaignID) api.CampaignCounts {
	e.Helper()
	c, err := e.s.Campaign(e.ctx, id)
	e.must(err)
	var n api.CampaignCounts
	f := directory.ItemFilter{Campaign: id, Limit: 7}
	for {
		list, err := e.s.CampaignItems(e.ctx, f)
		e.must(err)
		for _, it := range list {
			n.Total++
			*n.Of(it.State)++
			if it.Pos <= f.After {
				e.Errorf("item %d after %d", it.Pos, f.After)
			}
			f.After = it.Pos
		}
		if len(list) < f.Limit {
			break
		}
	}
	if n != c.Counts {
		e.Errorf("the record counts %+v, the items are %+v", c.Counts, n)
	}
	return c.Counts
}

func campaignLifecycle(t TB, h Harness) {
	e := start(t, h)
	c := e.campaign("c1", 450, "o1")
	if c.State != api.CampaignPlanned || c.Version != 1 || c.Seq == 0 || c.Rows != 4500 || c.Bytes != 45000 || c.NextPos != 450 || c.Driver != "" {
		e.Errorf("created %+v", c)
	}
	if n := e.counts("c1"); n.Total != 450 || n.Pending != 450 {
		e.Errorf("counts %+v", n)
	}
	again, created, err := e.s.CreateCampaign(e.ctx, api.Campaign{ID: "c9", OperationID: "o1"}, planned(1), audit("campaign.plan", ""))
	e.must(err)
	if created || again.ID != "c1" {
		e.Errorf("a repeated operation: %s, created %v", again.ID, created)
	}
	if _, err := e.s.Campaign(e.ctx, "c9"); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("a campaign that was not made: %v", err)
	}
	if _, err := e.s.UpdateItem(e.ctx, "c1", 451, func(*api.CampaignItem) error { return nil }, nil, nil); !errors.Is(err, cells.ErrNotFound) {
		e.Errorf("an item that there is not: %v", err)
	}
	entry := audit("campaign.item", "t002")
	it, err := e.s.UpdateItem(e.ctx, "c1", 3, func(it *api.CampaignItem) error {
		it.State, it.Tenant, it.To, it.Pos, it.Move = api.ItemRunning, "x", "z", 9, "m"
		return nil
	}, func(c *api.Campaign, it *api.CampaignItem) error {
		c.LastStart, c.Counts.Failed = epoch, 77
		if it.Move != "m" {
			return errors.New("also runs before")
		}
		return nil
	}, &entry)
	e.must(err)
	if it.Tenant != "t002" || it.To != "b" || it.Pos != 3 || it.Move != "m" {
		e.Errorf("changed item %+v", it)
	}
	if n := e.counts("c1"); n.Running != 1 || n.Failed != 0 {
		e.Errorf("counts %+v", n)
	}
	if n := e.auditCount("t002"); n != 1 {
		e.Errorf("%d audit entries of the item", n)
	}
	boom := errors.New("boom")
	for _, also := range []bool{false, true} {
		_, err := e.s.UpdateItem(e.ctx, "c1", 3, func(it *api.CampaignItem) error {
			it.State = api.ItemMoved
			if !also {
				return boom
			}
			return nil
		}, func(*api.Campaign, *api.CampaignItem) error { return boom }, &entry)
		if !errors.Is(err, boom) {
			e.Errorf("a refused change: %v", err)
		}
	}
	if n := e.counts("c1"); n.Running != 1 {
		e.Errorf("a refused change took effect: %+v", n)
	}
	n, err := e.s.MoveItems(e.ctx, "c1", []api.ItemState{api.ItemPending}, api.ItemSkipped, "why")
	e.must(err)
	if n != 449 {
		e.Errorf("%d items were skipped", n)
	}
	if c := e.counts("c1"); c.Skipped != 449 || c.Running != 1 {
		e.Errorf("counts %+v", c)
	}
	list, err := e.s.CampaignItems(e.ctx, directory.ItemFilter{Campaign: "c1", State: api.ItemSkipped, After: 448, Limit: 10})
	e.must(err)
	if len(list) != 2 || list[0].Pos != 449 || list[0].Reason != "why" || list[0].State != api.ItemSkipped {
		e.Errorf("skipped %+v", list)
	}
	e.must(e.s.Close())
	e.s = e.open()
	if c, err := e.s.Campaign(e.ctx, "c1"); err != nil || !c.LastStart.Equal(epoch) || c.Actor != "alice" {
		e.Errorf("after a reopening %+v %v", c, err)
	}
}

func campaignItemsAreTakenOnce(t TB, h Harness) {
	e := start(t, h)
	e.campaign("c1", 40, "")
	stores := []directory.Store{e.s, e.open()}
	taken := errors.New("taken")
	var mu sync.Mutex
	won := map[int64]int{}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for pos := int64(1); pos <= 40; pos++ {
				_, err := stores[i%2].UpdateItem(e.ctx, "c1", pos, func(it *api.CampaignItem) error {
					if it.State != api.ItemPending {
						return taken
					}
					it.State = api.ItemRunning
					it.Attempt++
					return nil
				}, nil, nil)
				mu.Lock()
				if err == nil {
					won[pos]++
				} else if !errors.Is(err, taken) {
					e.Errorf("item %d: %v", pos, err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for pos, n := range won {
		if n != 1 {
			e.Errorf("item %d was taken %d times", pos, n)
		}
	}
	if n := e.counts("c1"); len(won) != 40 || n.Running != 40 {
		e.Errorf("%d taken, counts %+v", len(won), n)
	}
}

// An item and its move agree: a move is recorded only while its item waits for it,
// and an item whose move is recorded gets no other result.
func campaignMovesOnce(t TB, h Harness) {
	e := start(t, h)
	e.cell("b", api.CellSpec{})
	e.campaign("c1", 2, "")
	of := func(pos int64, id string) api.Move {
		m := move(id, fmt.Sprintf("t%03d", pos-1), "a", "b", id)
		m.Campaign, m.Item = "c1", pos
		return m
	}
	if _, _, err := e.createMove(of(1, "c1.1.1")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("a move of an item that is not begun: %v", err)
	}
	begin := func(pos int64, id cells.MoveID) {
		e.Helper()
		_, err := e.s.UpdateItem(e.ctx, "c1", pos, func(it *api.CampaignItem) error { it.State, it.Move = api.ItemRunning, id; return nil }, nil, nil)
		e.must(err)
	}
	fail := func(it *api.CampaignItem) error { it.State = api.ItemFailed; return nil }
	begin(1, "c1.1.1")
	if _, _, err := e.createMove(of(1, "c1.1.2")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("a move that the item does not name: %v", err)
	}
	if _, _, err := e.createMove(of(2, "c1.1.1")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("a move of another item: %v", err)
	}
	e.mustCreate(of(1, "c1.1.1"))
	if _, created, err := e.createMove(of(1, "c1.1.1")); err != nil || created {
		e.Errorf("the same again: %v %v", created, err)
	}
	if _, err := e.s.UpdateUnmoved(e.ctx, "c1", 1, fail, nil, nil); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("a result beside a recorded move: %v", err)
	}
	begin(2, "c1.2.1")
	if _, err := e.s.UpdateUnmoved(e.ctx, "c1", 2, fail, nil, nil); err != nil {
		e.Errorf("a result without a move: %v", err)
	}
	if _, _, err := e.createMove(of(2, "c1.2.1")); !errors.Is(err, cells.ErrConflict) {
		e.Errorf("a move after the result: %v", err)
	}
	if n := e.counts("c1"); n.Running != 1 || n.Failed != 1 {
		e.Errorf("counts %+v", n)
	}
}

func campaignEdits(t TB, h Harness) {
	e := start(t, h)
	c := e.campaign("c1", 5, "")
	_, err := e.s.UpdateItem(e.ctx, "c1", 2, func(it *api.CampaignItem) error { it.State = api.ItemMoved; return nil }, nil, nil)
	e.must(err)
	refuse := errors.New("no")
	if _, err := e.s.ReplaceItems(e.ctx, "c1", func(*api.Campaign) error { return refuse }, planned(1), audit("campaign.edit", "")); !errors.Is(err, refuse) {
		e.Errorf("a refused edit: %v", err)
	}
	c, err = e.s.ReplaceItems(e.ctx, "c1", func(c *api.Campaign) error { c.Name = "edited"; return nil }, planned(2), audit("campaign.edit", ""))
	e.must(err)
	if c.Name != "edited" || c.Rows != 30 || c.Bytes != 300 {
		e.Errorf("edited %+v", c)
	}
	if n := e.counts("c1"); n.Total != 3 || n.Moved != 1 || n.Pending != 2 {
		e.Errorf("counts %+v", n)
	}
	list, err := e.s.CampaignItems(e.ctx, directory.ItemFilter{Campaign: "c1"})
	e.must(err)
	if len(list) != 3 || list[0].Pos != 2 || list[1].Pos != 6 || list[2].Pos != 7 {
		e.Errorf("items %+v: numbers are never used again", list)
	}
	got, err := e.s.Campaigns(e.ctx, directory.CampaignFilter{State: api.CampaignPlanned})
	e.must(err)
	e.campaign("c2", 1, "")
	e.order("c2", api.CampaignAborted)
	all, err := e.s.Campaigns(e.ctx, directory.CampaignFilter{Limit: 1})
	e.must(err)
	if len(got) != 1 || len(all) != 1 || all[0].ID != "c2" {
		e.Errorf("lists %+v and %+v", got, all)
	}
	rest, err := e.s.Campaigns(e.ctx, directory.CampaignFilter{After: all[0].Seq})
	e.must(err)
	if len(rest) != 1 || rest[0].ID != "c1" {
		e.Errorf("the second page %+v", rest)
	}
}

func campaignTakeover(t TB, h Harness) {
	e := start(t, h)
	e.campaign("c1", 2, "")
	beats := func() []directory.CampaignBeat {
		e.Helper()
		b, err := e.s.CampaignBeats(e.ctx)
		e.must(err)
		return b
	}
	if b := beats(); len(b) != 0 {
		e.Errorf("a planned campaign is to be driven: %+v", b)
	}
	e.order("c1", api.CampaignRunning)
	b := beats()
	if len(b) != 1 || b[0].Driver != "" {
		e.Fatalf("beats %+v", b)
	}
	stores := []directory.Store{e.s, e.open()}
	var mu sync.Mutex
	var won []string
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			name := fmt.Sprintf("d%d/1", i)
			ok, err := stores[i%2].TakeCampaign(e.ctx, b[0], name)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				e.Errorf("take: %v", err)
			} else if ok {
				won = append(won, name)
			}
		})
	}
	wg.Wait()
	c, err := e.s.Campaign(e.ctx, "c1")
	e.must(err)
	if len(won) != 1 || c.Driver != won[0] {
		e.Fatalf("taken by %v, driver %q", won, c.Driver)
	}
	seen := beats()[0]
	e.must(e.s.BeatCampaigns(e.ctx, "somebody/1"))
	if n := beats()[0]; n != seen {
		e.Errorf("somebody else's beat counted: %+v", n)
	}
	e.must(e.s.BeatCampaigns(e.ctx, won[0]))
	if n := beats()[0]; n.Beat <= seen.Beat {
		e.Errorf("the driver's beat did not count: %+v", n)
	}
	if ok, err := e.s.TakeCampaign(e.ctx, seen, "late/1"); ok || err != nil {
		e.Errorf("taken from the living: %v %v", ok, err)
	}
	c, err = e.s.UpdateCampaign(e.ctx, "c1", func(c *api.Campaign) error { c.Driver = "thief/1"; return nil }, nil)
	e.must(err)
	if c.Driver != won[0] {
		e.Errorf("an update made %s the driver", c.Driver)
	}
	// With something under way a paused campaign is driven on.
	_, err = e.s.UpdateItem(e.ctx, "c1", 1, func(it *api.CampaignItem) error { it.State = api.ItemRunning; return nil }, nil, nil)
	e.must(err)
	e.order("c1", api.CampaignPaused)
	if len(beats()) != 1 {
		e.Errorf("nobody looks after what runs")
	}
	_, err = e.s.UpdateItem(e.ctx, "c1", 1, func(it *api.CampaignItem) error { it.State = api.ItemMoved; return nil }, nil, nil)
	e.must(err)
	if b := beats(); len(b) != 0 {
		e.Errorf("at rest it is to be driven: %+v", b)
	}
	c, err = e.s.UpdateCampaign(e.ctx, "c1", func(c *api.Campaign) error { c.Driver = ""; return nil }, nil)
	e.must(err)
	if c.Driver != "" {
		e.Errorf("the driver did not give it up")
	}
}

func factsOfTenants(t TB, h Harness) {
	e := start(t, h)
	f, err := e.s.TenantFacts(e.ctx, "t")
	e.must(err)
	if f != (api.TenantFacts{Tenant: "t"}) {
		e.Errorf("facts of nobody %+v", f)
	}
	later := epoch.Add(time.Hour)
	e.must(e.s.SaveMeasures(e.ctx, []directory.Measurement{{Tenant: "t", Rows: 7, Bytes: 70, At: later}, {Tenant: "u", Rows: 1, At: epoch}}))
	e.must(e.s.SaveMeasures(e.ctx, []directory.Measurement{{Tenant: "t", Rows: 5, Bytes: 50, At: epoch}}))
	f, err = e.s.SetAttributes(e.ctx, "t", "g", "eu", audit("tenant.attributes", "t"))
	e.must(err)
	if f.Group != "g" || f.Jurisdiction != "eu" || f.Rows != 7 || f.Bytes != 70 || !f.MeasuredAt.Equal(later) {
		e.Errorf("facts %+v: an old measure came after a new one", f)
	}
	if n := e.auditCount("t"); n != 1 {
		e.Errorf("%d audit entries", n)
	}
	f, err = e.s.SetAttributes(e.ctx, "t", "", "", audit("tenant.attributes", "t"))
	e.must(err)
	if f.Group != "" || f.Jurisdiction != "" || f.Rows != 7 {
		e.Errorf("cleared %+v", f)
	}
	list, err := e.s.Facts(e.ctx, "t", 10)
	e.must(err)
	all, err := e.s.Facts(e.ctx, "", 1)
	e.must(err)
	if len(list) != 1 || list[0].Tenant != "u" || len(all) != 1 || all[0].Tenant != "t" {
		e.Errorf("pages %+v and %+v", list, all)
	}
}
