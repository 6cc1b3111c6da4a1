// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	directoryopen "github.com/cloister-dev/cloister/directory/open"
	"github.com/cloister-dev/cloister/table/open"
	"github.com/cloister-dev/cloister/transfer"
)

// channelFlags are the files of a process's end of the channel.
type channelFlags struct{ cfg channel.Config }

func (c *channelFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.cfg.CAFile, "channel-ca", "", "the fleet's CA certificate (PEM)")
	f.StringVar(&c.cfg.CertFile, "channel-cert", "", "this process's certificate (cell pki issue)")
	f.StringVar(&c.cfg.KeyFile, "channel-key", "", "this process's key")
	f.StringVar(&c.cfg.RevokedFile, "channel-revoked", "", "list of revoked serials; re-read when it changes")
	for _, n := range []string{"channel-ca", "channel-cert", "channel-key"} {
		_ = cmd.MarkFlagRequired(n)
	}
}

// open opens the channel of a process that must have the role.
func (c *channelFlags) open(a *app, role channel.Role) (*channel.Channel, error) {
	c.cfg.Log = a.log
	ch, err := channel.Open(c.cfg)
	if err != nil {
		return nil, err
	}
	if ch.Self().Role != role {
		return nil, usagef("--channel-cert is for %s; a certificate for the role %s is needed (cell pki issue %s NAME)", ch.Self(), role, role)
	}
	return ch, nil
}

func (a *app) directoryCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "directory", Short: "The control plane", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.directoryServe(), a.directoryCredential())
	return c
}

func (a *app) directoryCredential() *cobra.Command {
	return &cobra.Command{
		Use: "new-credential", Short: "Make an operator credential; prints it once, with the SHA-256 that the directory is given", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			cred, sum := directory.NewOperatorCredential()
			return a.print(map[string]string{"credential": cred, "sha256": sum}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "credential %s\nsha256     %s\n", cred, sum)
				return err
			})
		},
	}
}

func (a *app) directoryServe() *cobra.Command {
	var ch channelFlags
	var cfg directory.Config
	limits := throttle{retained: transfer.DefaultMaxRetained}
	var state, operatorListen, channelListen, credentialFile, routesURL, receiptKey, haltFile, clockFile, trace string
	var sums, cellsAllowed []string
	var undoWindow time.Duration
	var storeURL string
	var asynchronous bool
	c := &cobra.Command{
		Use:   "serve",
		Short: "Serve the directory from SQLite files in a folder, or from Postgres",
		Long: `Serve the directory: cells, routes, placements and the execution of moves.

The channel listener (mutual TLS) is for edges and cells. The operator listener is
plain HTTP with a bearer credential of which only the SHA-256 is given here; it
binds to the loopback unless you say otherwise.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			if credentialFile != "" {
				b, err := os.ReadFile(credentialFile)
				if err != nil {
					return err
				}
				sum, err := directory.HashOperatorCredential(strings.TrimSpace(string(b)))
				if err != nil {
					return fmt.Errorf("--operator-credential-file: %w", err)
				}
				sums = append(sums, sum)
			}
			cfg.OperatorSHA256, cfg.Logger = sums, a.log
			if cfg.UndoWindow = undoWindow; undoWindow == 0 {
				cfg.UndoWindow = -1
			}
			if len(cellsAllowed) > 0 {
				allowed := map[string]bool{}
				for _, n := range cellsAllowed {
					allowed[n] = true
				}
				ch.cfg.Known = func(id channel.Identity) bool { return id.Role != channel.RoleCell || allowed[id.Name] }
			}
			if cfg.Channel, err = ch.open(a, channel.RoleDirectory); err != nil {
				return err
			}
			cfg.Name = cfg.Channel.Self().Name
			if err := os.MkdirAll(state, 0o700); err != nil {
				return err
			}
			if storeURL == "" {
				storeURL = "sqlite:" + filepath.Join(state, "directory.db")
			}
			store, err := directoryopen.Open(ctx, storeURL, directoryopen.Options{AllowAsynchronous: asynchronous, Logger: a.log})
			if errors.Is(err, cells.ErrInvalid) && cmd.Flags().Changed("store") {
				return usagef("--store: %w", err)
			}
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, store.Close()) }()
			if routesURL == "" {
				routesURL = "sqlite:" + filepath.Join(state, "routes.db")
			}
			routes, err := open.Open(ctx, routesURL)
			if errors.Is(err, cells.ErrInvalid) {
				return usagef("--routes: %w", err)
			}
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, routes.Close()) }()
			cfg.Store, cfg.Table, cfg.Deployments = store, routes, store.Deployments()
			if receiptKey != "" {
				if cfg.ReceiptKey, err = pki.ReadReceiptKey(receiptKey); err != nil {
					return err
				}
			}
			cfg.Budget = cells.NewBudgetMeter(cells.WithBudgetStore(store.Budgets()))
			if haltFile != "" {
				halt := haltFileHook(haltFile)
				cfg.StepHook = func(ctx context.Context, ev cells.StepEvent) error {
					return halt(ctx, string(ev.Step), string(ev.Tenant))
				}
				cfg.CampaignHook = func(ctx context.Context, step string, id api.CampaignID, _ int64) error {
					return halt(ctx, "campaign-"+step, string(id))
				}
				cfg.RolloutHook = func(ctx context.Context, step string, id api.RolloutID) error {
					return halt(ctx, "rollout-"+step, string(id))
				}
			}
			if clockFile != "" {
				cfg.Now = func() time.Time { return time.Now().Add(offsetOf(clockFile)) }
			}
			if trace != "" {
				f, err := os.OpenFile(trace, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
				if err != nil {
					return err
				}
				defer f.Close()
				cfg.Trace = f
			}
			if cfg.OperatorListener, err = net.Listen("tcp", operatorListen); err != nil {
				return err
			}
			if cfg.ChannelListener, err = net.Listen("tcp", channelListen); err != nil {
				return err
			}
			cfg.RowsPerSecond, cfg.Limits = limits.rows, transfer.Limits{MaxRetained: int64(limits.retained), MaxReplicaLag: limits.lag}
			srv, err := directory.New(cfg)
			if err != nil {
				return err
			}
			return srv.Run(ctx)
		},
	}
	ch.register(c)
	f := c.Flags()
	f.StringVar(&state, "state", "directory", "folder of the directory's databases")
	f.StringVar(&storeURL, "store", "", "address of the records ("+directoryopen.Help+"); default: directory.db in --state")
	f.BoolVar(&asynchronous, "allow-asynchronous", false, "use a --store on Postgres that has no synchronous standby; it is logged as an error")
	f.StringVar(&routesURL, "routes", "", "address of the routing table ("+open.Help+"); default: routes.db in --state")
	f.StringVar(&operatorListen, "operator-listen", "127.0.0.1:7400", "address of the operator listener")
	f.StringVar(&channelListen, "channel-listen", "127.0.0.1:7401", "address of the channel listener")
	f.StringSliceVar(&sums, "operator-sha256", nil, "SHA-256 of an operator credential (cell directory new-credential); two while it is rotated")
	f.StringVar(&credentialFile, "operator-credential-file", "", "file with the credential itself, hashed at start; for one machine only")
	f.StringVar(&receiptKey, "receipt-key", "", "key that signs the receipts of moves (cell pki receipt-key); default: no receipts")
	f.DurationVar(&cfg.ReceiptGrace, "receipt-grace", 30*time.Second, "for how long a receipt that lacks nothing else waits for edges that report late, before it is ended")
	f.StringSliceVar(&cellsAllowed, "cell", nil, "accept only these cells' certificates; default: every cell of the fleet's CA")
	f.DurationVar(&cfg.DrainDeadline, "drain-deadline", cells.DefaultDrainDeadline, "longest cut of a move; past it the move rolls back")
	f.DurationVar(&undoWindow, "undo-window", directory.DefaultUndoWindow, "for how long a move can be undone unless it says otherwise; 0 is not at all")
	f.DurationVar(&cfg.ReturnEvery, "return-every", 5*time.Second, "how often changes are brought back to the cell that a tenant came from while its move can be undone")
	f.DurationVar(&cfg.MaxPause, "max-pause", 0, "refuse cuts that are predicted to be longer, and roll back those that are; 0 is no bound")
	f.DurationVar(&cfg.PauseHeadroom, "pause-headroom", cells.DefaultPauseHeadroom, "a cut is rolled back when it is not decided within twice its predicted pause and this")
	f.IntVar(&limits.rows, "rows-per-second", 0, "how fast moves copy and remove rows; 0 is unlimited")
	f.Var(&limits.retained, "max-retained", "how many bytes of changes a source may keep for a move, as 8GiB or unlimited; past it the move rolls back")
	f.DurationVar(&limits.lag, "max-replica-lag", 0, "moves copy nothing while a standby of one of their databases is further behind; 0 is no bound")
	f.IntVar(&cfg.Moves, "moves", 4, "how many moves prepare at once")
	f.DurationVar(&cfg.HeartbeatEvery, "heartbeat", 500*time.Millisecond, "how often processes report")
	f.DurationVar(&cfg.Lapse, "lapse", 2*time.Second, "a process that has not reported for so long is gone")
	f.BoolVar(&cfg.Pinned, "pinned", false, "placements never change: refuse moves and deletions")
	f.StringVar(&trace, "trace", "", "append a JSON line for each step of each move to this file")
	f.StringVar(&haltFile, "halt-file", "", "stand still at the steps that this file names, while it does; for crash tests")
	f.StringVar(&clockFile, "clock-file", "", "the clock is off by the duration in this file; for tests of clocks that jump")
	_ = f.MarkHidden("halt-file")
	_ = f.MarkHidden("clock-file")
	return c
}

// offsetOf reads how far the clock is off; 0 while the file says nothing.
func offsetOf(file string) time.Duration {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	d, err := time.ParseDuration(string(bytes.TrimSpace(b)))
	if err != nil {
		return 0
	}
	return d
}
