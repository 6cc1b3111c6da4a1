// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/member/sidecar"
)

func (a *app) sidecarCmd() *cobra.Command {
	var cfg sidecar.Config
	var tables, webhookURL, webhookKeys string
	c := &cobra.Command{
		Use:   "sidecar [flags] [-- command [args]]",
		Short: "Put a service that knows nothing of cells into one",
		Long: `Run beside a service as a member of its cell: admit each request at the gate, pass
it on with Cell-Tenant, Cell-Epoch and Cell-Cell, report health, and end streams and
wait for requests when a tenant moves. HTTP/1.1, HTTP/2 without TLS, gRPC,
server-sent events and WebSockets pass.

The cell is named by the CELL_ variables that every member has (CELL_ID, CELL_FLEET,
CELL_DIRECTORY_URL, CELL_SERVICE_URL, CELL_CHANNEL_CA, CELL_CHANNEL_CERT,
CELL_CHANNEL_KEY, CELL_ADMISSION_KEY_FILE, ...); CELL_SERVICE_URL is where edges reach
--listen.

With --store the sidecar installs the guard on the tables in the service's database,
carries the orders of moves to it and moves rows; the service admits its transactions
there (docs/guards.md). Without it the service is taken for stateless.

A command behind -- is the service itself: it is started with PORT set, has to listen
there on 127.0.0.1, and gets no CELL_ variable but CELL_NAME. When it ends, so does
the sidecar.

--listen takes tenants' requests and must be reachable by edges only; --admin-listen
has health and metrics, without a credential. The service believes the headers that
it gets: nothing but the sidecar may reach it.`,
		Example: `  cell sidecar --upstream http://127.0.0.1:9000
  cell sidecar --store postgres --dsn postgres://127.0.0.1/app --tables notes:tenant,tags:tenant --health-path /healthz -- python3 app.py`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && cmd.ArgsLenAtDash() != 0 {
				return usagef("%q: the service's command stands behind --", args[0])
			}
			var on bool
			var err error
			if cfg.Member, on, err = member.FromEnv(); err != nil {
				return &usageError{err}
			} else if !on {
				return usagef("CELL_ID is not set; a sidecar needs the CELL_ variables of its cell")
			}
			cfg.Command, cfg.Log = args, a.log
			if cfg.DSN == "" {
				cfg.DSN = os.Getenv("CELL_SIDECAR_DSN") // no default of the flag: help would print it
			}
			if tables != "" {
				if cfg.Tables, err = sidecar.ParseTables(tables); err != nil {
					return &usageError{err}
				}
			}
			if cfg.Publisher, err = webhookPublisher(webhookURL, webhookKeys); err != nil {
				return err
			}
			return sidecar.Run(cmd.Context(), cfg)
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Listen, "listen", "127.0.0.1:8081", "address of tenants' requests; only edges need to reach it")
	f.StringVar(&cfg.AdminListen, "admin-listen", "", "address of /livez, /readyz and /metrics; default: none")
	f.StringVar(&cfg.Upstream, "upstream", "", "the service, http://host:port; with a command the default is a free port of 127.0.0.1")
	f.BoolVar(&cfg.HTTP2, "upstream-http2", false, "speak HTTP/2 without TLS to the service; gRPC always does")
	f.StringVar(&cfg.HealthPath, "health-path", "", "path that the service answers with 2xx while it is well; default: it takes connections")
	f.StringSliceVar(&cfg.Streams, "stream", nil, "path of requests that go on for long: a pattern (/feed/*), or a prefix that ends in /")
	f.DurationVar(&cfg.IdleTimeout, "upstream-idle", time.Second, "close connections to the service that were not used for so long; less than its own keep-alive")
	f.StringVar(&cfg.Engine, "store", "", "where the service keeps its tenants: postgres or sqlite; default: it is stateless")
	f.StringVar(&cfg.DSN, "dsn", "", "URL of the Postgres database, or the SQLite file ($CELL_SIDECAR_DSN)")
	f.StringVar(&tables, "tables", "", "the tenant tables, as notes:tenant,tags:tenant (table:column)")
	f.StringVar(&webhookURL, "webhook", "", "publish the tenants' events to this URL, in order")
	f.StringVar(&webhookKeys, "webhook-key-file", "", "file with the secret that webhooks are signed with")
	f.DurationVar(&cfg.StartTimeout, "start-timeout", time.Minute, "how long to wait for the service's tables")
	f.DurationVar(&cfg.StopTimeout, "stop-timeout", 4*time.Second, "how long requests may take to end when the sidecar does")
	return c
}

// webhookPublisher returns what posts events to a URL, or nil when nobody wants it.
func webhookPublisher(url, keyFile string) (guard.Publisher, error) {
	if url == "" {
		return nil, nil
	}
	b, err := os.ReadFile(keyFile)
	if err != nil {
		return nil, usagef("--webhook needs --webhook-key-file: %w", err)
	}
	keys, err := webhook.ParseKeys(string(b))
	if err != nil {
		return nil, fmt.Errorf("--webhook-key-file %s: %w", keyFile, err)
	}
	return webhook.New(webhook.Config{URL: url, Keys: keys})
}
