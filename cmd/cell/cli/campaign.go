// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// policyFlags are the flags that choose a policy.
type policyFlags struct {
	spec                            api.PolicySpec
	by                              string
	cells, dedicated, others, drain []string
}

func (p *policyFlags) register(f *pflag.FlagSet, kind string) {
	if kind == "" {
		f.StringVar(&p.spec.Kind, "policy", "", "what the plan is for: "+strings.Join(api.Policies, ", "))
		f.Float64Var(&p.spec.Above, "above", 0, "hot: a tenant is hot from this many rows, bytes or requests a second")
		f.StringSliceVar(&p.dedicated, "dedicated", nil, "hot: the cells for hot tenants; without, the others are moved away from them")
		f.IntVar(&p.spec.PerCell, "per-cell", 0, "hot: how many hot tenants a dedicated cell gets (default 1)")
		f.StringSliceVar(&p.others, "others", nil, "hot: the cells for tenants that have to leave a hot one, or a dedicated cell")
		f.StringSliceVar(&p.drain, "drain", nil, "drain: the cells to empty, into --cells or all that are open")
		f.IntVar(&p.spec.Shards, "shards", 0, "shuffle: in how many cells a group's tenants are (default 2)")
		f.Uint64Var(&p.spec.Seed, "seed", 0, "shuffle: varies which cells a group gets")
	}
	f.StringVar(&p.by, "by", "", "even, hot: what is weighed: tenants, rows, bytes or load")
	f.StringSliceVar(&p.cells, "cells", nil, "the cells to spread over (default all that are open)")
	f.Float64Var(&p.spec.Tolerance, "tolerance", 0, "even, by anything but tenants: how far above its share a cell may be (default 0.1)")
	f.IntVar(&p.spec.GroupMax, "group-max", 0, "put at most so many tenants of one group into a cell")
	f.IntVar(&p.spec.MaxMoves, "max-moves", 0, "plan only the first moves")
}

func cellIDs(list []string) []cells.CellID {
	var out []cells.CellID
	for _, s := range list {
		out = append(out, cells.CellID(s))
	}
	return out
}

func (p *policyFlags) policy(kind string) *api.PolicySpec {
	s := p.spec
	if kind != "" {
		s.Kind = kind
	}
	s.By = cells.Measure(p.by)
	s.Cells, s.Dedicated, s.Others, s.Drain = cellIDs(p.cells), cellIDs(p.dedicated), cellIDs(p.others), cellIDs(p.drain)
	return &s
}

// settingFlags are the flags that say how a campaign runs.
type settingFlags struct {
	s       api.CampaignSettings
	windows []string
}

func (x *settingFlags) register(f *pflag.FlagSet) {
	f.IntVar(&x.s.Concurrency, "concurrency", 4, "how many moves run at once")
	f.IntVar(&x.s.PerPair, "per-pair", 0, "how many of them between the same two cells (default no bound)")
	f.IntVar(&x.s.PerHour, "per-hour", 0, "how many moves begin in an hour (default no bound)")
	f.StringArrayVar(&x.windows, "window", nil, `when moves may begin, for example "mon-fri 22:00-04:00"; may be repeated (default always)`)
	f.StringVar(&x.s.TimeZone, "time-zone", "", "the windows' IANA time zone, for example Europe/Berlin (default UTC)")
	f.StringVar(&x.s.StopAfter, "stop-after", "1", "pause after so many failed moves, or beyond a percentage like 5%, or none")
	f.StringVar(&x.s.UndoWindow, "undo-window", "", "for how long each move can be undone, for example 24h or 0s (default the directory's own)")
	f.BoolVar(&x.s.Force, "force", false, "move although unavailability budgets would be exceeded; recorded with your name")
}

func (x *settingFlags) settings() (api.CampaignSettings, error) {
	s := x.s
	for _, text := range x.windows {
		w, err := api.ParseWindow(text)
		if err != nil {
			return s, &usageError{err}
		}
		s.Windows = append(s.Windows, w)
	}
	if err := s.Normalize(); err != nil {
		return s, &usageError{err}
	}
	return s, nil
}

// check says what is wrong with the flags, before anything is asked.
func (x *settingFlags) check(*cobra.Command, []string) error {
	_, err := x.settings()
	return err
}

func (a *app) campaignCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "campaign", Short: "Plan many moves, and have the directory make them", Args: cobra.NoArgs,
		Long: `A campaign is a plan of many moves that is kept in the directory: it is shown and
edited before anything moves, and the directory makes it, whether or not this
command still runs.`,
		Example: "  cell campaign plan --policy even --concurrency 2\n  cell campaign show cp-...\n  cell campaign run cp-... --follow",
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.campaignPlan(), a.campaignShow(), a.campaignEdit(), a.campaignRun(), a.campaignPause(), a.campaignResume(),
		a.campaignAbort(), a.campaignList(), a.campaignWatch())
	return c
}

func (a *app) completeCampaigns(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if cl, err := a.client(); err == nil && len(args) == 0 {
		if list, err := cl.Campaigns(cmd.Context(), client.CampaignQuery{}); err == nil {
			for _, c := range list.Campaigns {
				if strings.HasPrefix(string(c.ID), prefix) {
					out = append(out, string(c.ID)+"\t"+string(c.State)+" "+c.Name)
				}
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) campaignPlan() *cobra.Command {
	var p policyFlags
	var x settingFlags
	var req api.CampaignRequest
	var file string
	c := &cobra.Command{
		Use:   "plan",
		Short: "Make a plan; nothing is moved",
		Long: `Make a plan by a policy, or of the moves in a file, and keep it in the directory.

Closed cells, quotas, the cells' limits of rows, bytes and load, and jurisdictions
hold for every policy: tenants that would have to break one stay, and are listed
with the reason. The same fleet gives the same plan.

  even         the same number of tenants (or --by rows, bytes, load) in every cell, with the fewest moves
  round-robin  tenants in the order of their names to the cells in turn
  hot          hot tenants to --dedicated cells, or the others away from them
  groups       no two tenants of one group (cell tenants set --group) in one cell
  shuffle      each group's tenants in --shards cells of its own choice
  drain        everybody out of --drain`,
		Example: `  cell campaign plan --policy even
  cell campaign plan --policy drain --drain cell-a --per-hour 60 --window "mon-fri 22:00-04:00" --time-zone Europe/Berlin
  cell campaign plan --policy hot --above 100 --dedicated cell-hot --dry-run
  cell campaign plan --file moves.yaml`,
		Args:    cobra.NoArgs,
		PreRunE: x.check,
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			var err error
			if req.Settings, err = x.settings(); err != nil {
				return err
			}
			switch {
			case (file == "") == (p.spec.Kind == ""):
				return usagef("name a --policy or a --file")
			case file != "":
				var f api.CampaignFile
				if err := a.readPlan(file, &f); err != nil {
					return err
				}
				req.Moves = f.Moves
			default:
				req.Policy = p.policy("")
			}
			req.Actor = actor()
			out, err := cl.PlanCampaign(ctx, req)
			if err != nil {
				return err
			}
			if req.DryRun {
				return a.print(out, func(w io.Writer) error {
					if err := printCampaign(w, &out.Campaign); err != nil {
						return err
					}
					return printMoves(w, out.Moves, out.Campaign.Counts.Total)
				})
			}
			return a.print(out.Campaign, func(w io.Writer) error {
				if err := printCampaign(w, &out.Campaign); err != nil {
					return err
				}
				_, err := fmt.Fprintf(w, "look: cell campaign show %[1]s --items    change: cell campaign edit %[1]s    start: cell campaign run %[1]s\n", out.Campaign.ID)
				return err
			})
		}),
	}
	f := c.Flags()
	p.register(f, "")
	x.register(f)
	f.StringVar(&req.Name, "name", "", "a name, for people")
	f.StringVar(&file, "file", "", "the moves, as cell campaign show --plan writes them; - is standard input")
	f.BoolVar(&req.DryRun, "dry-run", false, "show the plan, keep nothing")
	f.StringVar(&req.OperationID, "operation-id", "", "makes a retry from a script safe: the same id answers the same campaign")
	_ = c.RegisterFlagCompletionFunc("policy", cobra.FixedCompletions(api.Policies, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"tenants", "rows", "bytes", "load"}, cobra.ShellCompDirectiveNoFileComp))
	for _, n := range []string{"cells", "dedicated", "others", "drain"} {
		_ = c.RegisterFlagCompletionFunc(n, a.completeCells)
	}
	return c
}

func (a *app) campaignShow() *cobra.Command {
	var items, plan bool
	var state string
	c := &cobra.Command{
		Use: "show CAMPAIGN", Short: "Show a campaign, its moves, or its plan as a file", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeCampaigns,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id := api.CampaignID(args[0])
			if plan {
				f, err := cl.CampaignFile(ctx, id)
				if err != nil {
					return err
				}
				return a.print(f, func(w io.Writer) error { return writePlan(w, &f) })
			}
			rec, err := cl.Campaign(ctx, id)
			if err != nil {
				return err
			}
			var list []api.CampaignItem
			if items || state != "" {
				q := client.ItemQuery{State: api.ItemState(strings.ToUpper(state)), Limit: api.MaxPage}
				for {
					p, err := cl.CampaignItems(ctx, id, q)
					if err != nil {
						return err
					}
					list = append(list, p.Items...)
					if p.Next == 0 {
						break
					}
					q.After = p.Next
				}
			}
			doc := struct {
				api.Campaign
				Items []api.CampaignItem `json:"items,omitempty"`
			}{rec, list}
			return a.print(doc, func(w io.Writer) error {
				if err := printCampaign(w, &rec); err != nil || len(list) == 0 {
					return err
				}
				rows := [][]string{{"#", "TENANT", "FROM", "TO", "STATE", "ROWS", "SIZE", "PAUSE", "MOVE", "REASON"}}
				for _, it := range list {
					rows = append(rows, []string{fmt.Sprint(it.Pos), string(it.Tenant), string(it.From), string(it.To), string(it.State),
						fmt.Sprint(it.Rows), size(it.Bytes), short(it.Pause), dash(string(it.Move)), dash(it.Reason)})
				}
				return table(w, rows)
			})
		}),
	}
	f := c.Flags()
	f.BoolVar(&items, "items", false, "every move with its result")
	f.StringVar(&state, "state", "", "only the moves in this state: pending, running, moved, already, deferred, failed, skipped")
	f.BoolVar(&plan, "plan", false, "the moves that are not begun, as YAML (with --json as JSON) that cell campaign edit takes")
	return c
}

func (a *app) campaignEdit() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "edit CAMPAIGN",
		Short: "Change the moves and the settings of a campaign that does not run",
		Long: `Open the plan in $VISUAL or $EDITOR, or take it from --file. Every move is checked
against the present routes: those that do not fit are named, and nothing is changed.
A paused campaign is edited too; what was moved stays moved.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeCampaigns,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id := api.CampaignID(args[0])
			var f api.CampaignFile
			if file != "" {
				if err := a.readPlan(file, &f); err != nil {
					return err
				}
			} else {
				var err error
				if f, err = a.inEditor(ctx, cl, id); err != nil {
					return err
				}
			}
			if f.Campaign != id {
				return usagef("the plan is of campaign %q, not of %s", f.Campaign, id)
			}
			f.Actor = actor()
			rec, err := cl.EditCampaign(ctx, f)
			if err != nil {
				return err
			}
			return a.print(rec, func(w io.Writer) error { return printCampaign(w, &rec) })
		}),
	}
	c.Flags().StringVarP(&file, "file", "f", "", "the plan, as cell campaign show --plan writes it; - is standard input")
	return c
}

// inEditor lets a person edit the plan.
func (a *app) inEditor(ctx context.Context, cl *client.Client, id api.CampaignID) (f api.CampaignFile, err error) {
	if in, ok := a.in.(*os.File); !ok || !isTerminal(in) {
		return f, usagef("without a terminal the plan comes from --file")
	}
	editor := envOr("VISUAL", os.Getenv("EDITOR"))
	if editor == "" {
		return f, usagef("set $EDITOR, or give the plan with --file")
	}
	if f, err = cl.CampaignFile(ctx, id); err != nil {
		return f, err
	}
	dir, err := os.MkdirTemp("", "cell-plan-")
	if err != nil {
		return f, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, string(id)+".yaml")
	w, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return f, err
	}
	if err := errors.Join(writePlan(w, &f), w.Close()); err != nil {
		return f, err
	}
	words := strings.Fields(editor)
	cmd := exec.CommandContext(ctx, words[0], append(words[1:], path)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.in, a.err, a.err
	if err := cmd.Run(); err != nil {
		return f, fmt.Errorf("%s: %w; nothing was changed", words[0], err)
	}
	f = api.CampaignFile{}
	return f, a.readPlan(path, &f)
}

func (a *app) campaignList() *cobra.Command {
	var q client.CampaignQuery
	var state string
	c := &cobra.Command{
		Use: "list", Short: "List campaigns, newest first", Args: cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return atLeastOne("limit", q.Limit) },
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			q.State = api.CampaignState(strings.ToUpper(state))
			list, err := cl.Campaigns(ctx, q)
			if err != nil {
				return err
			}
			return a.print(list.Campaigns, func(w io.Writer) error {
				rows := [][]string{{"CAMPAIGN", "NAME", "STATE", "MOVES", "DONE", "FAILED", "BY", "PLANNED", "REASON"}}
				for i := range list.Campaigns {
					c := &list.Campaigns[i]
					rows = append(rows, []string{string(c.ID), dash(c.Name), string(c.State), fmt.Sprint(c.Counts.Total), fmt.Sprint(c.Counts.Finished()),
						fmt.Sprint(c.Counts.Failed), c.Actor, ago(c.CreatedAt), dash(c.Reason)})
				}
				return table(w, rows)
			})
		}),
	}
	c.Flags().StringVar(&state, "state", "", "only those in this state: planned, running, paused, aborting, done, aborted")
	c.Flags().IntVar(&q.Limit, "limit", 50, "how many at most")
	return c
}
