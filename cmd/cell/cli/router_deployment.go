// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory/deploy/httpapi"
	directoryopen "github.com/cloister-dev/cloister/directory/open"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/rules"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// listenFlags are those of every edge's listeners.
type listenFlags struct{ cert, key string }

func (l *listenFlags) register(c *cobra.Command, cfg *edge.Config) {
	f := c.Flags()
	f.StringVar(&cfg.Addr, "listen", "127.0.0.1:8080", "public address, without TLS; - for none")
	f.StringVar(&cfg.TLSAddr, "tls-listen", "", "public address with TLS; default: none")
	f.StringVar(&l.cert, "tls-cert", "", "certificate chain for --tls-listen")
	f.StringVar(&l.key, "tls-key", "", "key for --tls-listen")
	f.StringVar(&cfg.AdminAddr, "admin-listen", "127.0.0.1:8081", "address of health, metrics and explain; - for none")
	f.Var((*prefixes)(&cfg.TrustedProxies), "trusted-proxy", "address or network of proxies in front, whose X-Forwarded-For and -Proto are taken; may be given more than once")
	f.Int64Var(&cfg.MaxBody, "max-body", 0, "most bytes of a request's body; 0 is no bound")
	f.IntVar(&cfg.AccessLog, "access-log", 0, "log every n-th request; 0 logs none")
}

// open loads the certificate.
func (l *listenFlags) open(cfg *edge.Config) error {
	if cfg.TLSAddr == "" {
		return nil
	}
	cert, err := tls.LoadX509KeyPair(l.cert, l.key)
	if err != nil {
		return usagef("--tls-listen needs --tls-cert and --tls-key: %w", err)
	}
	cfg.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	return nil
}

// prefixes is a flag that is a list of addresses and networks.
type prefixes []netip.Prefix

func (p *prefixes) String() string {
	var out []string
	for _, x := range *p {
		out = append(out, x.String())
	}
	return strings.Join(out, ",")
}

func (p *prefixes) Type() string { return "network" }

func (p *prefixes) Set(s string) error {
	for v := range strings.SplitSeq(s, ",") {
		v = strings.TrimSpace(v)
		x, err := netip.ParsePrefix(v)
		if err != nil {
			a, errAddr := netip.ParseAddr(v)
			if errAddr != nil || a.Zone() != "" {
				return fmt.Errorf("%q is no address and no network", v)
			}
			x = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen())
		}
		if x != x.Masked() {
			return fmt.Errorf("%q has bits behind its length; the network is %s", v, x.Masked())
		}
		*p = append(*p, x)
	}
	return nil
}

// seconds is a flag that is a duration, or a number of seconds.
type seconds time.Duration

func (s *seconds) String() string { return time.Duration(*s).String() }
func (s *seconds) Type() string   { return "duration" }

func (s *seconds) Set(v string) error {
	d, err := time.ParseDuration(v)
	if n, errNumber := strconv.ParseFloat(v, 64); errNumber == nil {
		d, err = time.Duration(n*float64(time.Second)), nil
	}
	if err != nil || d <= 0 || d > time.Hour {
		return fmt.Errorf("%q is no time of up to an hour, as 5s or 5", v)
	}
	*s = seconds(d)
	return nil
}

type deploymentFlags struct {
	own                                    httpapi.Config
	asynchronous                           bool
	rules                                  rules.Config
	directory, snapshots, key, name, caPEM string
	cache                                  seconds
}

func (a *app) routerDeployment() *cobra.Command {
	var cfg edge.Config
	var listen listenFlags
	var fl deploymentFlags
	c := &cobra.Command{
		Use:   "deployment",
		Short: "Take requests to the deployment that they address, when whole deployments are the cells",
		Long: `Serve the router in front of whole deployments. By the request's host, by SCIM, by
the issuer of its bearer token, else to the first cell; what is under /cells/,
/livez and /readyz is the router's own.

It is put in front of one deployment first, at --upstream, and passes everything on
the shared host to it; that deployment becomes the first cell.

The cells are read from the directory once per --directory-cache, behind the requests:
a directory that is down or hangs delays none of them. The last table is kept in
--snapshots, signed, for a start while the directory is down. Replicas share that
folder and the key; each has a --name of its own.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.deployment(cmd.Context(), &cfg, &listen, &fl) },
	}
	listen.register(c, &cfg)
	f := c.Flags()
	fl.cache = seconds(celltable.DefaultEvery)
	var badCache error
	if v := os.Getenv("CELL_ROUTER_DIRECTORY_CACHE_S"); v != "" {
		badCache = fl.cache.Set(v)
	}
	c.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if v := os.Getenv("CELL_ROUTER_PLACEMENTS_PER_MINUTE"); v != "" && !cmd.Flags().Changed("placements-per-minute") {
			n, err := strconv.Atoi(v)
			if err != nil || n < 1 {
				return usagef("$CELL_ROUTER_PLACEMENTS_PER_MINUTE: %q is no number above 0", v)
			}
			fl.own.PlacementsPerMinute = n
		}
		if badCache != nil && !cmd.Flags().Changed("directory-cache") {
			return usagef("$CELL_ROUTER_DIRECTORY_CACHE_S: %w", badCache)
		}
		return nil
	}
	f.StringVar(&fl.rules.Shared, "shared-host", os.Getenv("CELL_ROUTER_SHARED_HOST"), "the deployment's public host, which the first cell keeps ($CELL_ROUTER_SHARED_HOST)")
	f.StringVar(&fl.rules.Upstream, "upstream", os.Getenv("CELL_ROUTER_UPSTREAM_URL"), "where the deployment behind the router is reached, http(s)://host[:port] ($CELL_ROUTER_UPSTREAM_URL)")
	f.StringSliceVar(&fl.own.Aliases, "shared-alias", nil, "further name of the shared host, registered with the first cell; may be given more than once")
	f.StringVar(&fl.own.UpstreamProbe, "upstream-probe", os.Getenv("CELL_ROUTER_UPSTREAM_PROBE_URL"), "where the probe listener of the deployment behind the router is reached ($CELL_ROUTER_UPSTREAM_PROBE_URL)")
	f.StringSliceVar(&fl.own.OperatorSHA256, "operator-sha256", envList("CELL_ROUTER_OPERATOR_SHA256"), "SHA-256 of an operator credential (cell credential new --operator); two while it is rotated ($CELL_ROUTER_OPERATOR_SHA256)")
	f.IntVar(&fl.own.PlacementsPerMinute, "placements-per-minute", 600, "how many placement calls a cell may make at this replica ($CELL_ROUTER_PLACEMENTS_PER_MINUTE)")
	f.IntVar(&fl.own.LookupsPerMinute, "lookups-per-minute", 600, "how many lookups a client address may make at this replica")
	f.BoolVar(&fl.asynchronous, "allow-asynchronous", false, "use a directory on Postgres that has no synchronous standby; it is logged as an error")
	f.StringVar(&fl.directory, "directory", os.Getenv("CELL_ROUTER_DIRECTORY"), "where the cells are read: "+deploymentDirectories+" ($CELL_ROUTER_DIRECTORY)")
	f.Var(&fl.cache, "directory-cache", "how often the cells are read, as 5s or 5 ($CELL_ROUTER_DIRECTORY_CACHE_S)")
	f.StringVar(&fl.snapshots, "snapshots", os.Getenv("CELL_ROUTER_SNAPSHOTS"), "folder, shared by the replicas, of the last known cells; default: none is kept ($CELL_ROUTER_SNAPSHOTS)")
	f.StringVar(&fl.key, "snapshot-key-file", os.Getenv("CELL_ROUTER_SNAPSHOT_KEY_FILE"), "key that signs the snapshots, hexadecimal, the same for all replicas ($CELL_ROUTER_SNAPSHOT_KEY_FILE)")
	f.StringVar(&fl.name, "name", os.Getenv("CELL_ROUTER_NAME"), "this replica's name; default: the machine's ($CELL_ROUTER_NAME)")
	f.StringVar(&fl.caPEM, "upstream-ca", "", "CA certificates (PEM) of https upstreams; default: the system's")
	f.DurationVar(&cfg.ConnectWait, "connect-wait", edge.DefaultConnectWait, "how long a request waits for its deployment to take connections before it is answered 502")
	f.StringVar(&fl.rules.Paths.SCIM, "scim-path", "/scim/v2", "where the service serves SCIM")
	f.StringVar(&fl.rules.Paths.Groups, "scim-groups", "Groups", "the SCIM resource that goes by a token's issuer")
	f.StringVar(&fl.rules.Paths.Discovery, "discovery-path", "/.well-known", "where the service serves its discovery documents")
	f.StringVar(&fl.rules.Paths.Revoke, "revoke-path", "/oauth/revoke", "where the service revokes tokens (RFC 7009)")
	return c
}

func (a *app) deployment(ctx context.Context, cfg *edge.Config, listen *listenFlags, fl *deploymentFlags) (err error) {
	for _, n := range []struct{ flag, value string }{{"shared-host", fl.rules.Shared}, {"upstream", fl.rules.Upstream}, {"directory", fl.directory}} {
		if n.value == "" {
			return usagef("--%s is needed", n.flag)
		}
	}
	if err := listen.open(cfg); err != nil {
		return err
	}
	if fl.name == "" {
		if fl.name, err = os.Hostname(); err != nil {
			return usagef("--name is needed: %w", err)
		}
	}
	if fl.caPEM != "" {
		b, err := os.ReadFile(fl.caPEM)
		if err != nil {
			return err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(b) {
			return usagef("--upstream-ca: %s has no certificate", fl.caPEM)
		}
		conf := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
		cfg.Forward.TLS = func(cells.CellID) *tls.Config { return conf }
	}
	if cfg.ConnectWait == 0 {
		cfg.ConnectWait = time.Nanosecond // none; 0 would be the default
	}
	source, own, closeSource, err := a.openDeploymentDirectory(ctx, fl)
	if errors.Is(err, cells.ErrInvalid) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeSource()) }()
	tc := celltable.Config{Rules: fl.rules, Source: source, Every: time.Duration(fl.cache), Folder: fl.snapshots, Name: fl.name, Log: a.log}
	if fl.snapshots != "" {
		if fl.key == "" {
			return usagef("--snapshots needs --snapshot-key-file")
		}
		if tc.Key, err = fleet.ReadKey(fl.key); err != nil {
			return err
		}
		if err := os.MkdirAll(fl.snapshots, 0o700); err != nil {
			// Storage that is away must not keep a router from starting.
			a.log.Error("router: the folder of the snapshots cannot be made", "path", fl.snapshots, "err", err)
		}
	}
	table, err := celltable.Watch(ctx, tc)
	if errors.Is(err, cells.ErrInvalid) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	defer table.Close()
	cfg.Name, cfg.Log = fl.name, a.log
	srv, err := edge.NewDeployment(*cfg, edge.Deployment{Table: table, Own: own})
	if errors.Is(err, cells.ErrInvalid) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	return srv.Run(ctx)
}

// deploymentDirectories are the forms of --directory.
const deploymentDirectories = directoryopen.Help + ", or file:PATH, a table in YAML without placements and lookups"

// openDeploymentDirectory opens what --directory names, and makes the router's own
// paths if it is a directory.
func (a *app) openDeploymentDirectory(ctx context.Context, fl *deploymentFlags) (celltable.Source, http.Handler, func() error, error) {
	if path, ok := strings.CutPrefix(fl.directory, "file:"); ok && path != "" {
		return celltable.File(path), nil, func() error { return nil }, nil
	}
	if strings.HasPrefix(fl.directory, "file:") {
		return nil, nil, nil, fmt.Errorf("%w: --directory is one of %s", cells.ErrInvalid, deploymentDirectories)
	}
	store, err := directoryopen.Deployments(ctx, fl.directory, directoryopen.Options{AllowAsynchronous: fl.asynchronous, Logger: a.log})
	if err != nil {
		return nil, nil, nil, fmt.Errorf("--directory: %w (or file:PATH, a table in YAML)", err)
	}
	own := fl.own
	own.Store, own.Audit, own.Logger, own.Cache = store, store, a.log, time.Duration(fl.cache)
	own.SharedHost, own.Upstream, own.Prober = fl.rules.Shared, fl.rules.Upstream, probe.NewClient(probe.ClientConfig{})
	h, err := httpapi.New(own)
	if err != nil {
		return nil, nil, nil, errors.Join(err, store.Close())
	}
	return celltable.Deployments(store), h, store.Close, nil
}

// envList is a setting with several values, by commas.
func envList(name string) []string {
	if v := os.Getenv(name); v != "" {
		return strings.Split(v, ",")
	}
	return nil
}
