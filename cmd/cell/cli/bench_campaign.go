// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) benchCampaignCmd() *cobra.Command {
	var store string
	var concurrency int
	run := load.CampaignRun{Cells: [2]string{"cell-a", "cell-b"}}
	c := &cobra.Command{
		Use:   "campaign",
		Short: "Move many small tenants by one campaign and say how fast that went",
		Long: `Start a fleet of two cells in a folder of its own, place many small tenants in one of
them, and move all of them to the other by a campaign, and back by the next, while
some of them are used. The moves have no undo window. It tells how many moves a second
there were, where their time went, and that no acknowledged write was lost.`,
		Example: "  cell bench campaign --store postgres --tenants 200",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := benchFlags(store, map[string]int{"rows": run.Rows, "size": run.Size, "tenants": run.Tenants, "rounds": run.Rounds, "concurrency": concurrency}); err != nil {
				return err
			}
			rep, err := a.benchCampaign(cmd.Context(), store, concurrency, run)
			return benchResult(a, rep, err, rep != nil && len(rep.Rounds) > 0, func(w io.Writer) error { return printCampaignReport(w, store, rep) })
		},
	}
	f := c.Flags()
	f.StringVar(&store, "store", fleet.StoreSQLite, "sqlite or postgres")
	completeStore(c)
	f.IntVar(&run.Tenants, "tenants", 200, "tenants to move")
	f.IntVar(&run.Rows, "rows", 20, "rows of each tenant")
	f.IntVar(&run.Size, "size", 100, "bytes of a row's value")
	f.IntVar(&run.Users, "users", 10, "tenants that are used, by a client each")
	f.DurationVar(&run.Think, "think", 100*time.Millisecond, "pause of each client between two requests")
	f.IntVar(&run.Rounds, "rounds", 2, "campaigns, back and forth")
	f.IntVar(&concurrency, "concurrency", 8, "moves at once, of the campaign and of the directory")
	return c
}

func (a *app) benchCampaign(ctx context.Context, store string, concurrency int, run load.CampaignRun) (*load.CampaignReport, error) {
	f, cl, step, end, err := a.benchFleet(ctx, store, 1, "--moves", fmt.Sprint(concurrency))
	if err != nil {
		return nil, err
	}
	defer end()
	run.Edge, run.Mover, run.OnStep = f.Info.Edge, fleet.Mover{Client: cl}, step
	run.Campaign = func(ctx context.Context, from, to string) (load.CampaignRound, error) {
		return benchRound(ctx, cl, concurrency, cells.CellID(from), cells.CellID(to))
	}
	return run.Run(ctx)
}

// benchRound moves everybody from a cell by a campaign.
func benchRound(ctx context.Context, cl *client.Client, concurrency int, from, to cells.CellID) (load.CampaignRound, error) {
	x := load.CampaignRound{From: string(from), To: string(to)}
	p, err := cl.PlanCampaign(ctx, api.CampaignRequest{Actor: "bench", Policy: &api.PolicySpec{Kind: api.PolicyDrain, Drain: []cells.CellID{from}, Cells: []cells.CellID{to}},
		Settings: api.CampaignSettings{Concurrency: concurrency, StopAfter: "none", UndoWindow: "0s"}})
	if err != nil {
		return x, err
	}
	began := time.Now()
	if _, err := cl.RunCampaign(ctx, p.Campaign.ID, api.CampaignOrder{Actor: "bench"}); err != nil {
		return x, err
	}
	var last api.Campaign
	if err := cl.WatchCampaign(ctx, p.Campaign.ID, func(c api.Campaign) error { last = c; return nil }); err != nil {
		return x, err
	}
	x.Took, x.Moved = time.Since(began), int(last.Counts.Moved)
	x.Rate = float64(x.Moved) / x.Took.Seconds()
	if last.State != api.CampaignDone {
		return x, fmt.Errorf("the campaign is %s: %s", last.State, last.Reason)
	}
	moves, err := movesOf(ctx, cl, p.Campaign.ID)
	if err != nil {
		return x, err
	}
	x.Clean = time.Since(began)
	at := map[string]int{}
	for i := range moves {
		m := &moves[i]
		x.Pauses = append(x.Pauses, m.Pause)
		for _, s := range m.Steps {
			n, ok := at[s.Step]
			if !ok {
				n = len(x.Steps)
				at[s.Step] = n
				x.Steps = append(x.Steps, load.StepTook{Step: s.Step})
			}
			x.Steps[n].Took = append(x.Steps[n].Took, s.Took)
		}
	}
	return x, nil
}

// movesOf waits until every move of the campaign is over, its rows removed, and returns
// them.
func movesOf(ctx context.Context, cl *client.Client, id api.CampaignID) ([]api.Move, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		var out []api.Move
		over := true
		q := client.MoveQuery{Limit: api.MaxPage}
		for {
			list, err := cl.Moves(ctx, q)
			if err != nil {
				return nil, err
			}
			for _, m := range list.Moves {
				if m.Campaign == id {
					out = append(out, m)
					over = over && m.State.Final() && !m.Removable()
				}
			}
			if list.Next == 0 {
				break
			}
			q.After = list.Next
		}
		if over {
			return out, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func printCampaignReport(w io.Writer, store string, r *load.CampaignReport) error {
	fmt.Fprintf(w, "store %s, %d tenants of %d rows of %d bytes\n", store, r.Tenants, r.Rows, r.Size)
	for _, x := range r.Rounds {
		fmt.Fprintf(w, "%s -> %s: %d moves in %s, %.1f a second; rows removed after %s\n", x.From, x.To, x.Moved, short(x.Took), x.Rate, short(x.Clean))
		names, p50, p95 := []string{"step"}, []string{"p50"}, []string{"p95"}
		for _, s := range x.Steps {
			names, p50, p95 = append(names, s.Step), append(p50, short(load.Percentile(s.Took, 50))), append(p95, short(load.Percentile(s.Took, 95)))
		}
		names, p50, p95 = append(names, "PAUSE"), append(p50, short(load.Percentile(x.Pauses, 50))), append(p95, short(load.Percentile(x.Pauses, 95)))
		if err := table(w, [][]string{names, p50, p95}); err != nil {
			return err
		}
	}
	t := r.Used
	fmt.Fprintf(w, "used tenants: %d requests (%d writes): %d failed, %d lost, %d duplicated, %d phantom\n", t.Requests, t.Writes, t.Failed, t.Lost, t.Duplicated, t.Phantom)
	if t.FirstFailure != "" {
		fmt.Fprintf(w, "first failure: %s\n", t.FirstFailure)
	}
	return nil
}
