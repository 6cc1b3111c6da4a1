// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// readPlan reads a plan in YAML or JSON; what it does not know is refused by name.
func (a *app) readPlan(path string, f *api.CampaignFile) error {
	var b []byte
	var err error
	if path == "-" {
		b, err = io.ReadAll(io.LimitReader(a.in, api.MaxPlanBody))
	} else {
		b, err = os.ReadFile(path)
	}
	if err != nil {
		return err
	}
	var doc any
	dec := yaml.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(&doc); err != nil {
		return usagef("%s: %w", path, err)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return usagef("%s: more than one document", path)
	}
	text, err := json.Marshal(doc)
	if err != nil {
		return usagef("%s: %w", path, err)
	}
	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(f); err != nil {
		return usagef("%s: %w", path, err)
	}
	return nil
}

// writePlan writes a plan as YAML, in the order of its fields.
func writePlan(w io.Writer, f *api.CampaignFile) error {
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	var n yaml.Node
	if err := yaml.Unmarshal(text, &n); err != nil {
		return err
	}
	plain(&n, 0)
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	return errors.Join(enc.Encode(&n), enc.Close())
}

// plain takes JSON's quotes and braces off, but keeps each move on one line.
func plain(n *yaml.Node, depth int) {
	n.Style = 0
	if depth > 2 && n.Kind == yaml.MappingNode {
		n.Style = yaml.FlowStyle
	}
	for _, c := range n.Content {
		plain(c, depth+1)
	}
}

func printCampaign(w io.Writer, c *api.Campaign) error {
	id := string(c.ID)
	if id == "" {
		id = "(not kept)"
	}
	fmt.Fprintf(w, "%s %s%s\n", id, c.State, named(c))
	if c.Reason != "" {
		fmt.Fprintf(w, "  reason     %s\n", c.Reason)
	}
	n := &c.Counts
	fmt.Fprintf(w, "  moves      %d", n.Total)
	for _, s := range []struct {
		n    int64
		what string
	}{{n.Moved, "moved"}, {n.Already, "there already"}, {n.Running, "running"}, {n.Pending, "to do"}, {n.Deferred, "deferred by budgets"}, {n.Failed, "failed"}, {n.Skipped, "skipped"}} {
		if s.n > 0 {
			fmt.Fprintf(w, ", %d %s", s.n, s.what)
		}
	}
	fmt.Fprintf(w, "\n  to carry   %d rows, %s, as measured\n", c.Rows, size(c.Bytes))
	if c.Unmeasured > 0 {
		fmt.Fprintf(w, "  note       %d tenants were never measured and count as empty: cell tenants measure\n", c.Unmeasured)
	}
	if e := c.Estimate; e != nil {
		fmt.Fprintf(w, "  estimate   %s%s, pauses of about %s each, %s together (from %d moves)\n", short(e.Left), ends(e), short(e.Pause), short(e.PauseTotal), e.Moves)
		if e.OverBudget > 0 {
			fmt.Fprintf(w, "  budget     %d tenants have less than such a pause left and would be deferred\n", e.OverBudget)
		}
	}
	if c.Waiting != "" {
		fmt.Fprintf(w, "  waiting    %s\n", c.Waiting)
	}
	s := &c.Settings
	fmt.Fprintf(w, "  settings   %d at once", s.Concurrency)
	if s.PerPair > 0 {
		fmt.Fprintf(w, ", %d for each pair of cells", s.PerPair)
	}
	if s.PerHour > 0 {
		fmt.Fprintf(w, ", %d an hour", s.PerHour)
	}
	for i := range s.Windows {
		fmt.Fprintf(w, ", %s", s.Windows[i].String())
	}
	if len(s.Windows) > 0 {
		zone := s.TimeZone
		if zone == "" {
			zone = "UTC"
		}
		fmt.Fprintf(w, " (%s)", zone)
	}
	fmt.Fprintf(w, ", stops after %s\n", s.StopAfter)
	if n := c.Counts.Total; n > 1 && c.ID != "" {
		first, last := api.ItemGroup(c.ID, 1), api.ItemGroup(c.ID, max(c.NextPos, 1))
		if first != last {
			first += " to " + last
		}
		fmt.Fprintf(w, "  group      %s: its moves between the same two cells share slots and snapshots\n", first)
	}
	for i, st := range c.Stays {
		if i == 10 {
			break
		}
		fmt.Fprintf(w, "  stays      %s in %s: %s\n", st.Tenant, dash(string(st.Cell)), st.Why)
	}
	if more := c.StaysTotal - min(len(c.Stays), 10); more > 0 {
		fmt.Fprintf(w, "  stays      and %d more (--json has up to %d)\n", more, api.MaxStays)
	}
	return nil
}

func named(c *api.Campaign) string {
	s := ""
	if c.Name != "" {
		s = " " + c.Name
	}
	if c.Policy != nil {
		s += ", policy " + c.Policy.Kind
		if m := c.Policy.Measure(); c.Policy.Kind == api.PolicyEven || c.Policy.Kind == api.PolicyHot {
			s += " by " + string(m)
		}
	}
	return s + ", by " + c.Actor
}

func ends(e *api.CampaignEstimate) string {
	if e.Ends.IsZero() {
		return ""
	}
	return ", until " + e.Ends.Local().Format("2006-01-02 15:04")
}

func printMoves(w io.Writer, moves []api.PlannedMove, total int64) error {
	rows := [][]string{{"TENANT", "FROM", "TO"}}
	for i, m := range moves {
		if i == 50 {
			rows = append(rows, []string{fmt.Sprintf("and %d more", total-50), "", ""})
			break
		}
		rows = append(rows, []string{string(m.Tenant), string(m.From), string(m.To)})
	}
	return table(w, rows)
}

// follow shows a campaign until it is over or at rest.
func (a *app) followCampaign(ctx context.Context, cl *client.Client, id api.CampaignID) error {
	var last api.Campaign
	line := ""
	err := cl.WatchCampaign(ctx, id, func(c api.Campaign) error {
		last = c
		n := &c.Counts
		now := fmt.Sprintf("%-8s %d of %d, %d running, %d failed", c.State, n.Finished(), n.Total, n.Running, n.Failed)
		if c.Estimate != nil && c.State == api.CampaignRunning {
			now += ", about " + short(c.Estimate.Left) + " left"
		}
		if c.Waiting != "" {
			now += ", waiting " + c.Waiting
		}
		if now != line && !a.json {
			line = now
			fmt.Fprintf(a.err, "%s  %s\n", time.Now().Format("15:04:05"), now)
		}
		return nil
	})
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; the campaign goes on: cell campaign watch %s", id)
		}
		return err
	}
	if err := a.print(last, func(w io.Writer) error { return printCampaign(w, &last) }); err != nil {
		return err
	}
	switch {
	case last.State == api.CampaignPaused:
		return fmt.Errorf("campaign %s is paused: %s", id, last.Reason)
	case last.State == api.CampaignAborted:
		return fmt.Errorf("campaign %s was aborted: %s", id, last.Reason)
	case last.Counts.Failed > 0:
		return fmt.Errorf("%w: %d of %d moves have failed: cell campaign show %s --state failed", cells.ErrRolledBack, last.Counts.Failed, last.Counts.Total, id)
	}
	return nil
}

// order makes a command of an order to a campaign.
func (a *app) campaignOrder(c *cobra.Command, question string, send func(*client.Client, context.Context, api.CampaignID, api.CampaignOrder) (api.Campaign, error)) *cobra.Command {
	var o api.CampaignOrder
	var yes, follow bool
	verb := c.Name()
	c.Args, c.ValidArgsFunction = cobra.ExactArgs(1), a.completeCampaigns
	f := c.Flags()
	if question != "" {
		f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	}
	if verb == "run" || verb == "resume" {
		f.BoolVarP(&follow, "follow", "f", false, "show it to its end")
	} else {
		f.StringVar(&o.Reason, "reason", "", "why; kept with the campaign")
	}
	if verb == "resume" {
		f.BoolVar(&o.Retry, "retry", false, "try the failed and the deferred moves again, also of a campaign that is done")
	}
	running := ""
	if verb == "abort" {
		f.StringVar(&running, "running", "finish", "what becomes of moves that run: finish, or rollback (those that are not decided)")
		_ = c.RegisterFlagCompletionFunc("running", cobra.FixedCompletions([]string{"finish", "rollback"}, cobra.ShellCompDirectiveNoFileComp))
	}
	c.RunE = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		if verb == "abort" {
			if running != "finish" && running != "rollback" {
				return usagef("--running is finish or rollback")
			}
			o.Rollback = running == "rollback"
		}
		if question != "" {
			if err := a.confirm(yes, fmt.Sprintf(question, args[0])); err != nil {
				return err
			}
		}
		o.Actor = actor()
		id := api.CampaignID(args[0])
		rec, err := send(cl, ctx, id, o)
		if err != nil {
			return err
		}
		if follow {
			return a.followCampaign(ctx, cl, id)
		}
		return a.print(rec, func(w io.Writer) error { return printCampaign(w, &rec) })
	})
	return c
}

func (a *app) campaignRun() *cobra.Command {
	return a.campaignOrder(&cobra.Command{Use: "run CAMPAIGN", Short: "Start a campaign; the directory goes on with it"}, "", (*client.Client).RunCampaign)
}

func (a *app) campaignPause() *cobra.Command {
	return a.campaignOrder(&cobra.Command{Use: "pause CAMPAIGN", Short: "Begin no more moves; those that run go on to their end"}, "", (*client.Client).PauseCampaign)
}

func (a *app) campaignResume() *cobra.Command {
	return a.campaignOrder(&cobra.Command{Use: "resume CAMPAIGN", Short: "Go on with a paused campaign; its failures so far are accepted"}, "", (*client.Client).ResumeCampaign)
}

func (a *app) campaignAbort() *cobra.Command {
	return a.campaignOrder(&cobra.Command{Use: "abort CAMPAIGN", Short: "Give a campaign up; what was moved stays moved"},
		"Give up campaign %s for good?", (*client.Client).AbortCampaign)
}

func (a *app) campaignWatch() *cobra.Command {
	return &cobra.Command{
		Use: "watch CAMPAIGN", Short: "Show a campaign's progress until it is over or at rest", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeCampaigns,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			return a.followCampaign(ctx, cl, api.CampaignID(args[0]))
		}),
	}
}

func (a *app) rebalanceCmd() *cobra.Command {
	var p policyFlags
	var x settingFlags
	var yes, dry, noWait bool
	c := &cobra.Command{
		Use:   "rebalance",
		Short: "Spread the tenants evenly over the cells, with the fewest moves",
		Long: `Make a plan that spreads the tenants evenly, show it, ask, and run it as a campaign.
The same as cell campaign plan --policy even, and cell campaign run --follow.`,
		Example: "  cell rebalance --dry-run\n  cell rebalance --by rows --concurrency 2 --yes",
		Args:    cobra.NoArgs,
		PreRunE: x.check,
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			settings, err := x.settings()
			if err != nil {
				return err
			}
			req := api.CampaignRequest{Name: "rebalance", Policy: p.policy(api.PolicyEven), Settings: settings, DryRun: true, Actor: actor()}
			plan, err := cl.PlanCampaign(ctx, req)
			if err != nil {
				return err
			}
			show := func(w io.Writer) error {
				if err := printCampaign(w, &plan.Campaign); err != nil {
					return err
				}
				return printMoves(w, plan.Moves, plan.Campaign.Counts.Total)
			}
			if dry || plan.Campaign.Counts.Total == 0 {
				return a.print(plan, show)
			}
			if !a.json {
				if err := show(a.err); err != nil {
					return err
				}
			}
			if err := a.confirm(yes, fmt.Sprintf("Make %d moves?", plan.Campaign.Counts.Total)); err != nil {
				return err
			}
			req.DryRun = false
			if plan, err = cl.PlanCampaign(ctx, req); err != nil {
				return err
			}
			rec, err := cl.RunCampaign(ctx, plan.Campaign.ID, api.CampaignOrder{Actor: actor()})
			if err != nil {
				return err
			}
			if noWait {
				return a.print(rec, func(w io.Writer) error { return printCampaign(w, &rec) })
			}
			return a.followCampaign(ctx, cl, rec.ID)
		}),
	}
	f := c.Flags()
	p.register(f, api.PolicyEven)
	x.register(f)
	f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	f.BoolVar(&dry, "dry-run", false, "show the plan, keep nothing")
	f.BoolVar(&noWait, "no-wait", false, "start it and return")
	_ = c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"tenants", "rows", "bytes", "load"}, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("cells", a.completeCells)
	return c
}

func (a *app) tenantSetCmd() *cobra.Command {
	var req api.AttributesRequest
	c := &cobra.Command{
		Use:   "set TENANT",
		Short: "Set a tenant's group and jurisdiction",
		Long: `Set the group of a tenant, which plans keep apart from its like, and the
jurisdiction that its cell must have: plans, moves and placements keep to it, also
before the tenant is placed. What is not given is kept; "" clears it.`,
		Example: "  cell tenants set acme --group acme-corp --jurisdiction eu",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeTenants,
	}
	f := c.Flags()
	group, jurisdiction := "", ""
	f.StringVar(&group, "group", "", "the customer, or whatever must not fail together")
	f.StringVar(&jurisdiction, "jurisdiction", "", "the tenant is put only into cells of this jurisdiction")
	c.MarkFlagsOneRequired("group", "jurisdiction")
	c.RunE = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		t, err := cl.Tenant(ctx, cells.TenantID(args[0]))
		if err != nil {
			return err
		}
		if t.Facts != nil {
			req.Group, req.Jurisdiction = t.Facts.Group, t.Facts.Jurisdiction
		}
		if f.Changed("group") {
			req.Group = group
		}
		if f.Changed("jurisdiction") {
			req.Jurisdiction = jurisdiction
		}
		req.Actor = actor()
		facts, err := cl.SetAttributes(ctx, t.Tenant, req)
		if err != nil {
			return err
		}
		return a.print(facts, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s: group %s, jurisdiction %s\n", facts.Tenant, dash(facts.Group), dash(facts.Jurisdiction))
			return err
		})
	})
	return c
}

func (a *app) tenantMeasureCmd() *cobra.Command {
	var cell string
	c := &cobra.Command{
		Use:   "measure [TENANT...]",
		Short: "Ask the cells how large tenants are, for plans by rows and bytes",
		Long: `Ask each tenant's cell how many rows and bytes it has, as its database estimates
them, and keep the answers. Without tenants all are measured, or those of --cell.
A move measures its tenant too.`,
		ValidArgsFunction: a.completeTenants,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			var list []cells.TenantID
			for _, t := range args {
				list = append(list, cells.TenantID(t))
			}
			q := client.TenantQuery{Cell: cells.CellID(cell), Limit: api.MaxPage}
			for len(args) == 0 {
				p, err := cl.Tenants(ctx, q)
				if err != nil {
					return err
				}
				for i := range p.Routes {
					list = append(list, p.Routes[i].TenantID)
				}
				if p.Next == "" {
					break
				}
				q.After = p.Next
			}
			all := api.Measured{Tenants: []api.TenantFacts{}, Failed: map[cells.TenantID]string{}}
			for from := 0; from < len(list); from += api.MaxMeasure {
				m, err := cl.Measure(ctx, list[from:min(from+api.MaxMeasure, len(list))])
				if err != nil {
					return err
				}
				all.Tenants = append(all.Tenants, m.Tenants...)
				for t, why := range m.Failed {
					all.Failed[t] = why
				}
			}
			if err := a.print(all, func(w io.Writer) error {
				rows := [][]string{{"TENANT", "ROWS", "SIZE"}}
				for _, f := range all.Tenants {
					rows = append(rows, []string{string(f.Tenant), fmt.Sprint(f.Rows), size(f.Bytes)})
				}
				return table(w, rows)
			}); err != nil {
				return err
			}
			if n := len(all.Failed); n > 0 {
				for t, why := range all.Failed {
					return fmt.Errorf("%d tenants were not measured, one of them %s: %s", n, t, why)
				}
			}
			return nil
		}),
	}
	c.Flags().StringVar(&cell, "cell", "", "only the tenants of this cell")
	_ = c.RegisterFlagCompletionFunc("cell", a.completeCells)
	return c
}
