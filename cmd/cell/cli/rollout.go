// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func (a *app) rolloutCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "rollout", Short: "Bring a new version to the fleet in waves, judged by its health", Args: cobra.NoArgs,
		Long: `A rollout brings a new version to the fleet wave by wave: it moves tenants to cells
of the new version, or gives cells the new version. Each wave bakes for a while and is
compared with the rest by what edges and cells count. When the new version is worse
the wave is returned by itself, and the numbers that decided it are kept. The
directory drives it, whether or not this command still runs.`,
		Example: "  cell rollout start --version v2 --by move --dry-run\n  cell rollout start --version v2 --by move --waves 1%,10%,50%,100% --bake 10m\n  cell rollout status ro-...",
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.rolloutStart(), a.rolloutStatus(), a.rolloutPause(), a.rolloutResume(), a.rolloutAbort(), a.rolloutList(), a.rolloutShow())
	return c
}

func (a *app) completeRollouts(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if cl, err := a.client(); err == nil && len(args) == 0 {
		if list, err := cl.Rollouts(cmd.Context(), client.RolloutQuery{}); err == nil {
			for i := range list.Rollouts {
				if r := &list.Rollouts[i]; strings.HasPrefix(string(r.ID), prefix) {
					out = append(out, string(r.ID)+"\t"+string(r.State)+" "+r.Settings.Version)
				}
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// percentages reads "1%,10%,100%".
func percentages(list []string) ([]float64, error) {
	var out []float64
	for _, s := range list {
		f, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(s), "%"), 64)
		if err != nil {
			return nil, usagef("--waves: %q is no percentage", s)
		}
		out = append(out, f)
	}
	return out, nil
}

func (a *app) rolloutStart() *cobra.Command {
	var req api.RolloutRequest
	var waves []string
	var errorFloor string
	var noLatency, follow, yes bool
	s := &req.Settings
	// settings are what the flags say, or what is wrong with them.
	settings := func() (api.RolloutSettings, error) {
		set := *s
		var err error
		if set.Waves, err = percentages(waves); err != nil {
			return set, err
		}
		floor, err := strconv.ParseFloat(strings.TrimSuffix(errorFloor, "%"), 64)
		if err != nil {
			return set, usagef("--error-floor: %q is no percentage", errorFloor)
		}
		set.Health.ErrorFloor = floor / 100
		if noLatency {
			set.Health.LatencyRatio = -1
		}
		check := set
		if err := check.Normalize(); err != nil {
			return set, &usageError{err}
		}
		return set, nil
	}
	c := &cobra.Command{
		Use:   "start",
		Short: "Start a rollout, or show its waves with --dry-run",
		Long: `Start a rollout of a version.

  --by move     the tenants of cells of the old version are moved to cells of the new one
  --by upgrade  the cells of the old version are upgraded; a percentage is of cells, at least one

The waves follow from the names of the tenants or cells, --canary and --seed: the same
fleet gives the same waves, and --dry-run shows them. A wave that bakes is compared with
the rest of the same time, once each side has --min-requests. It is worse when its share
of errors is above the other's by more than --error-floor and by --sigma standard
errors, or when its 99th percentile is above the other's by both --latency-ratio and
--latency-floor and that is no chance either, or when the rollout has cost more errors
than --error-budget. Then the wave is returned: its tenants are undone or moved back, its
cells get their old version. What is not measured never counts as healthy: the rollout
pauses when data is missing for longer than --patience.`,
		Example: `  cell rollout start --version v2 --by move --canary acme,globex --dry-run
  cell rollout start --version v2 --from v1 --by upgrade --waves 1%,25%,100% --bake 30m --error-budget 0.1%`,
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := noZero(cmd.Flags(), "bake", "patience", "change-timeout", "concurrency", "min-requests", "error-floor", "sigma", "latency-ratio", "latency-floor"); err != nil {
				return err
			}
			_, err := settings()
			return err
		},
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			var err error
			if req.Settings, err = settings(); err != nil {
				return err
			}
			req.Actor = actor()
			if !req.DryRun {
				if err := a.confirm(yes, fmt.Sprintf("Start a rollout of %s by %s?", req.Settings.Version, req.Settings.By)); err != nil {
					return err
				}
			}
			out, err := cl.StartRollout(ctx, req)
			if err != nil {
				return err
			}
			if req.DryRun {
				return a.print(out, func(w io.Writer) error {
					if err := printRollout(w, &out.Rollout); err != nil {
						return err
					}
					return printUnits(w, out.Units, out.Rollout.Counts().Total)
				})
			}
			if follow {
				return a.followRollout(ctx, cl, out.Rollout.ID)
			}
			return a.print(out.Rollout, func(w io.Writer) error {
				if err := printRollout(w, &out.Rollout); err != nil {
					return err
				}
				_, err := fmt.Fprintf(w, "look: cell rollout status %[1]s    stop: cell rollout pause %[1]s, cell rollout abort %[1]s\n", out.Rollout.ID)
				return err
			})
		}),
	}
	f := c.Flags()
	f.StringVar(&s.Version, "version", "", "the new version")
	f.StringVar(&s.From, "from", "", "the old version (default that of the other cells, if they have one)")
	f.StringVar(&s.By, "by", "", "move or upgrade")
	f.StringSliceVar(&waves, "waves", []string{"1%", "10%", "50%", "100%"}, "how much has the new version after each wave; the last is 100%")
	f.DurationVar(&s.Bake, "bake", 10*time.Minute, "for how long a wave must be healthy")
	f.DurationVar(&s.Patience, "patience", 0, "for how much longer data may be missing before it pauses (default as --bake)")
	f.StringSliceVar(&s.Canary, "canary", nil, "tenants (by upgrade cells) that come first")
	f.Uint64Var(&s.Seed, "seed", 0, "varies the order of all others")
	f.StringVar(&s.Return, "return", api.ReturnWave, "what bad health returns: the wave, or all waves")
	f.IntVar(&s.Concurrency, "concurrency", 0, "how many moves (default 4) or upgrades (default 1) run at once")
	f.StringVar(&s.UndoWindow, "undo-window", "", "by move: for how long each move can be undone (default the directory's own)")
	f.BoolVar(&s.Force, "force", false, "by move: move although unavailability budgets would be exceeded; recorded with your name")
	f.DurationVar(&s.ChangeTimeout, "change-timeout", 10*time.Minute, "by upgrade: how long a cell may take")
	f.Int64Var(&s.Health.MinRequests, "min-requests", 200, "how many requests each side needs before it is judged")
	f.StringVar(&errorFloor, "error-floor", "0.5%", "a difference of the shares of errors up to this is not looked at")
	f.Float64Var(&s.Health.Sigma, "sigma", 3.29, "how many standard errors a difference must have")
	f.Float64Var(&s.Health.LatencyRatio, "latency-ratio", 1.5, "a 99th percentile up to this multiple of the other is not looked at")
	f.DurationVar(&s.Health.LatencyFloor, "latency-floor", 50*time.Millisecond, "nor one that is longer by no more than this")
	f.BoolVar(&noLatency, "no-latency", false, "do not judge latency")
	f.StringVar(&s.Health.Budget, "error-budget", "none", "how many errors the rollout may cost: a number, a percentage of its requests, or none")
	f.StringSliceVar(&s.Health.MeasuredBy, "measured-by", []string{api.MeasuredByEdge, api.MeasuredByCell}, "who counts: edge, cell; each of them must find it healthy")
	f.StringVar(&req.Name, "name", "", "a name, for people")
	f.BoolVar(&req.DryRun, "dry-run", false, "show the waves, start nothing")
	f.StringVar(&req.OperationID, "operation-id", "", "makes a retry from a script safe: the same id answers the same rollout")
	f.BoolVarP(&follow, "follow", "f", false, "show it to its end")
	f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	for _, n := range []string{"version", "by"} {
		_ = c.MarkFlagRequired(n)
	}
	_ = c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{api.ByMove, api.ByUpgrade}, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("return", cobra.FixedCompletions([]string{api.ReturnWave, api.ReturnAll}, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("measured-by", cobra.FixedCompletions([]string{api.MeasuredByEdge, api.MeasuredByCell}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

// noZero refuses zeros: the directory takes them for what was not given, and who wants no
// floor would get the default one.
func noZero(flags *pflag.FlagSet, names ...string) error {
	for _, n := range names {
		f := flags.Lookup(n)
		v := f.Value.String()
		if x, err := strconv.ParseFloat(strings.TrimRight(v, "%s"), 64); f.Changed && err == nil && x == 0 {
			return usagef("--%s %s: want more than 0", n, v)
		}
	}
	return nil
}

func (a *app) rolloutStatus() *cobra.Command {
	var follow bool
	c := &cobra.Command{
		Use: "status ROLLOUT", Short: "Show how far a rollout is and how its health looks", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeRollouts,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			if follow {
				return a.followRollout(ctx, cl, api.RolloutID(args[0]))
			}
			rec, err := cl.Rollout(ctx, api.RolloutID(args[0]))
			if err != nil {
				return err
			}
			return a.print(rec, func(w io.Writer) error { return printRollout(w, &rec) })
		}),
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "show it to its end")
	return c
}

func (a *app) rolloutShow() *cobra.Command {
	var q client.UnitQuery
	var state string
	c := &cobra.Command{
		Use: "show ROLLOUT", Short: "Show a rollout with all its tenants or cells", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeRollouts,
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id := api.RolloutID(args[0])
			rec, err := cl.Rollout(ctx, id)
			if err != nil {
				return err
			}
			q.State, q.Limit = api.UnitState(strings.ToUpper(state)), api.MaxPage
			var list []api.RolloutUnit
			for {
				p, err := cl.RolloutUnits(ctx, id, q)
				if err != nil {
					return err
				}
				list = append(list, p.Units...)
				if p.Next == 0 {
					break
				}
				q.After = p.Next
			}
			doc := struct {
				api.Rollout
				Units []api.RolloutUnit `json:"units"`
			}{rec, list}
			return a.print(doc, func(w io.Writer) error {
				if err := printRollout(w, &rec); err != nil {
					return err
				}
				return printUnits(w, list, int64(len(list)))
			})
		}),
	}
	f := c.Flags()
	f.IntVar(&q.Wave, "wave", 0, "only this wave")
	f.StringVar(&state, "state", "", "only those in this state: pending, changing, changed, failed, left, gone, returning, returned")
	return c
}

func (a *app) rolloutList() *cobra.Command {
	var q client.RolloutQuery
	var state string
	c := &cobra.Command{
		Use: "list", Short: "List rollouts, newest first", Args: cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return atLeastOne("limit", q.Limit) },
		RunE: a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			q.State = api.RolloutState(strings.ToUpper(state))
			list, err := cl.Rollouts(ctx, q)
			if err != nil {
				return err
			}
			return a.print(list.Rollouts, func(w io.Writer) error {
				rows := [][]string{{"ROLLOUT", "VERSION", "FROM", "BY", "STATE", "WAVE", "CHANGED", "ACTOR", "STARTED", "REASON"}}
				for i := range list.Rollouts {
					r := &list.Rollouts[i]
					n := r.Counts()
					rows = append(rows, []string{string(r.ID), r.Settings.Version, dash(r.Settings.From), r.Settings.By, stateOf(r), fmt.Sprintf("%d of %d", r.Wave, len(r.Waves)),
						fmt.Sprintf("%d of %d", n.Changed, n.Total), r.Actor, ago(r.CreatedAt), dash(r.Reason)})
				}
				return table(w, rows)
			})
		}),
	}
	c.Flags().StringVar(&state, "state", "", "only those in this state: observing, changing, baking, returning, done, halted, aborted")
	c.Flags().IntVar(&q.Limit, "limit", 50, "how many at most")
	return c
}

// rolloutOrder makes a command of an order to a rollout.
func (a *app) rolloutOrder(c *cobra.Command, o *api.RolloutOrder, question string, send func(*client.Client, context.Context, api.RolloutID, api.RolloutOrder) (api.Rollout, error)) *cobra.Command {
	var yes, follow bool
	c.Args, c.ValidArgsFunction = cobra.ExactArgs(1), a.completeRollouts
	f := c.Flags()
	if question != "" {
		f.BoolVarP(&yes, "yes", "y", false, "do not ask")
	}
	if c.Name() == "pause" {
		f.StringVar(&o.Reason, "reason", "", "why; kept with the rollout")
	} else {
		f.BoolVarP(&follow, "follow", "f", false, "show it to its end")
	}
	c.RunE = a.with(func(ctx context.Context, cl *client.Client, args []string) error {
		if question != "" {
			if err := a.confirm(yes, fmt.Sprintf(question, args[0])); err != nil {
				return err
			}
		}
		o.Actor = actor()
		rec, err := send(cl, ctx, api.RolloutID(args[0]), *o)
		if err != nil {
			return err
		}
		if follow {
			return a.followRollout(ctx, cl, rec.ID)
		}
		return a.print(rec, func(w io.Writer) error { return printRollout(w, &rec) })
	})
	return c
}

func (a *app) rolloutPause() *cobra.Command {
	var o api.RolloutOrder
	return a.rolloutOrder(&cobra.Command{Use: "pause ROLLOUT", Short: "Begin nothing more; bad health still returns the wave"}, &o, "", (*client.Client).PauseRollout)
}

func (a *app) rolloutResume() *cobra.Command {
	var o api.RolloutOrder
	c := a.rolloutOrder(&cobra.Command{Use: "resume ROLLOUT", Short: "Go on with a paused rollout; what has failed is tried again"}, &o, "", (*client.Client).ResumeRollout)
	c.Flags().BoolVar(&o.Skip, "skip", false, "leave what has failed with the old version")
	return c
}

func (a *app) rolloutAbort() *cobra.Command {
	var o api.RolloutOrder
	c := a.rolloutOrder(&cobra.Command{
		Use: "abort ROLLOUT", Short: "Give a rollout up and return all of it to the old version",
		Long: `Give a rollout up. Every wave is returned: tenants are undone or moved back, cells get
the version that they had. With --keep everything stays as it is, also what could not be
returned so far.`,
	}, &o, "Give up rollout %s for good?", (*client.Client).AbortRollout)
	c.Flags().BoolVar(&o.Keep, "keep", false, "return nothing (more)")
	c.Flags().StringVar(&o.Reason, "reason", "", "why; kept with the rollout")
	return c
}

// followRollout shows a rollout until it is over or at rest.
func (a *app) followRollout(ctx context.Context, cl *client.Client, id api.RolloutID) error {
	var last api.Rollout
	line := ""
	err := cl.WatchRollout(ctx, id, func(r api.Rollout) error {
		last = r
		now := fmt.Sprintf("%-10s wave %d of %d", stateOf(&r), r.Wave, len(r.Waves))
		if w := r.Current(); w != nil {
			now += fmt.Sprintf(", %d of %d changed", w.Counts.Changed, w.Counts.Total)
		}
		if r.BakeLeft > 0 {
			now += ", bakes for " + short(r.BakeLeft.Round(time.Second))
		}
		if r.Now != nil {
			now += ", " + string(r.Now.Health)
		}
		if now != line && !a.json {
			line = now
			fmt.Fprintf(a.err, "%s  %s\n", time.Now().Format("15:04:05"), now)
		}
		return nil
	})
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; the rollout goes on: cell rollout status %s", id)
		}
		return err
	}
	if err := a.print(last, func(w io.Writer) error { return printRollout(w, &last) }); err != nil {
		return err
	}
	switch {
	case last.State == api.RolloutHalted:
		return fmt.Errorf("%w: rollout %s was halted: %s", cells.ErrRolledBack, id, last.Reason)
	case last.State == api.RolloutAborted:
		return fmt.Errorf("rollout %s was aborted: %s", id, last.Reason)
	case last.Paused:
		return fmt.Errorf("rollout %s is paused: %s", id, last.Reason)
	}
	return nil
}

func stateOf(r *api.Rollout) string {
	if r.Paused {
		return string(r.State) + ", paused"
	}
	return string(r.State)
}
