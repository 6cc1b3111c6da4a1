// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/services/memory"
)

// Main runs the service until ctx ends and returns the exit code: 0 when it was
// asked to end, 1 when it failed, 2 for a wrong command line.
func Main(ctx context.Context, args []string, stderr io.Writer) int {
	if len(args) > 0 && args[0] == "import" {
		return importMain(ctx, args[1:], os.Stdin, stderr)
	}
	var o options
	fs := flag.NewFlagSet("memory", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&o.listen, "listen", "127.0.0.1:8081", "address of the service; in a cell only edges need to reach it")
	fs.StringVar(&o.admin, "admin-listen", "", "address of /livez, /readyz and /metrics; default: none")
	fs.StringVar(&o.store, "store", "sqlite", "sqlite or postgres")
	fs.StringVar(&o.dsn, "dsn", "memory.db", "the SQLite file, or the Postgres URL")
	fs.StringVar(&o.publish.target, "publish", "", "publish the tenants' events, in order: nats://host:port/STREAM?create=true, kafka://host:port/TOPIC, or https:// for webhooks")
	fs.StringVar(&o.publish.keyFile, "publish-key-file", "", "file with what --publish needs: webhook keys, one a line (whsec_..., whsk_...); NATS credentials; Kafka's user and password in two lines")
	fs.StringVar(&o.publish.caFile, "publish-ca-file", "", "file with the certificates that the broker's is checked against; default: the system's")
	fs.BoolVar(&o.publish.publicOnly, "publish-public-only", false, "refuse webhooks to addresses that are not public")
	fs.Float64Var(&o.fault.percent, "fault-percent", 0, "for rehearsals of rollouts: fail so many percent of requests with 500, before anything of them has run")
	fs.DurationVar(&o.fault.delay, "fault-delay", 0, "for rehearsals of rollouts: answer each request so much later")
	fs.DurationVar(&o.drain, "drain", 0, "outside of a fleet: how long a process that was told to end is not ready and still takes requests, for a load balancer that looks at /readyz")
	fs.StringVar(&o.issuers, "issuers", "", "file with the issuers whose bearer tokens are accepted, for a process with CELL set: a JSON list of {issuer, jwks, audience, kind, tenants, tenant_claim, algorithms}; without jwks an issuer's keys are found by its discovery document")
	fs.BoolVar(&o.verbose, "v", false, "log more")
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: memory [flags]\n       memory import --tenant T [flags] < items.ndjson\n\nServe the agent-memory API. With CELL_ variables in the environment it is a process of\nthat cell; without them an ordinary service, with the tenant in the X-Tenant header.\nWith CELL set it is a process of a deployment that is one cell, and checks tenants.\n\n")
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if fs.NArg() > 0 || (o.store != "sqlite" && o.store != "postgres") {
		fmt.Fprintln(stderr, "memory: --store is sqlite or postgres, and there are no arguments; see --help")
		return 2
	}
	if !(o.fault.percent >= 0 && o.fault.percent <= 100) || o.fault.delay < 0 || o.drain < 0 {
		fmt.Fprintln(stderr, "memory: --fault-percent is 0 to 100, and --fault-delay and --drain are not negative")
		return 2
	}
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	if err := run(ctx, o, log); err != nil {
		log.Error("ended", "err", err)
		return 1
	}
	return 0
}

type options struct {
	listen, admin, store, dsn string
	issuers, build            string
	command                   bool // it is a command, no process that serves
	publish                   publishing
	fault                     faults
	drain                     time.Duration
	verbose                   bool
}

func run(ctx context.Context, o options, log *slog.Logger) (err error) {
	cfg, inCell, err := member.FromEnv()
	if err != nil {
		return err
	}
	settings, is, err := o.boot(log)
	if err != nil {
		return err
	}
	defer is.close()
	if inCell && settings.Cell != "" && settings.Cell != cfg.Cell {
		return fmt.Errorf("%w: CELL is %s and CELL_ID is %s", cells.ErrInvalid, settings.Cell, cfg.Cell)
	}
	o.build = cfg.Version
	open := memory.OpenSQLite
	if o.store == "postgres" {
		open = memory.OpenPostgres
	}
	store, err := open(ctx, o.dsn, memory.OpenOptions{Cell: cfg.Cell, Checked: settings.Cell != ""})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	dep, err := o.openDeployment(ctx, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dep.close()) }()
	d, err := o.openCell(ctx, settings, is, dep, log)
	if err != nil {
		return err
	}
	defer d.close()
	check, err := d.start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, leave(ctx, check)) }()
	relay, closePublisher, err := o.publish.relay(store, log)
	if err != nil {
		return err
	}
	defer closePublisher()
	ln, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	defer ln.Close()
	metrics := prometheus.NewRegistry()
	if !inCell {
		log.Info("no fleet around; serving alone", "listen", ln.Addr(), "cell", settings.Cell)
		if relay != nil {
			life, stop := context.WithCancel(ctx)
			done := make(chan struct{})
			go func() { defer close(done); _ = aside(life, check, relay.Run) }()
			defer func() { stop(); <-done }()
		}
		tenant, health := memory.HeaderTenant("X-Tenant"), alive()
		if settings.Cell != "" {
			tenant = checkedTenant
		}
		if check != nil {
			health = check.HealthHandler()
		}
		api := memory.New(store, memory.Options{Log: log, Tenant: tenant}).Handler()
		var leaving drain
		return o.serve(ctx, ln, leaving.api(dep.handler(d.guard(check, api))), leaving.health(health), metrics, func(ctx context.Context) error { return leaving.run(ctx, o.drain) })
	}
	agent, closeAgent, err := store.Agent(ctx, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAgent()) }()
	mopts := []member.Option{member.WithLogger(log), member.WithMetrics(metrics), member.WithWarmUp(store.Warm)}
	if check != nil {
		mopts = append(mopts, member.WithCheck(check.Check))
		if relay != nil {
			relay = standsAside{relay, check}
		}
	}
	kept := member.Store{Keeper: store.Guard(), Agent: agent, Relay: relay, Tables: memory.Tables, Engine: o.store}
	if settings.Cell != "" {
		kept.Tenancy = d.rows
	}
	mopts = append(mopts, member.WithStore(kept))
	m, err := member.Join(ctx, cfg, mopts...)
	if err != nil {
		return err
	}
	api := o.fault.around(memory.New(store, memory.Options{Log: log}).Handler())
	// First nobody is sent here any more, then what runs ends, then the member does.
	err = o.serve(ctx, ln, dep.handler(d.guardMember(check, m, api)), m.HealthHandler(), metrics, m.Retire)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return errors.Join(err, m.Close(end))
}

func alive() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
}

// serve answers the API, and health and metrics where they are wanted, until ctx
// ends; then retire says that nobody shall come any more, and what runs may end.
func (o *options) serve(ctx context.Context, ln net.Listener, api, health http.Handler, reg *prometheus.Registry, retire func(context.Context) error) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: api, Protocols: protocols, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
	failed := make(chan error, 2)
	go func() { failed <- srv.Serve(ln) }()
	var admin *http.Server
	if o.admin != "" {
		al, err := net.Listen("tcp", o.admin)
		if err != nil {
			return errors.Join(err, srv.Close())
		}
		mux := http.NewServeMux()
		mux.Handle("/livez", health)
		mux.Handle("/readyz", health)
		mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
		admin = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
		go func() { failed <- admin.Serve(al) }()
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.drain+4*time.Second)
	defer cancel()
	err = errors.Join(err, retire(end))
	if serr := srv.Shutdown(end); serr != nil {
		_ = srv.Close() // streams that do not end by themselves
	}
	if admin != nil {
		err = errors.Join(err, admin.Close())
	}
	return err
}
