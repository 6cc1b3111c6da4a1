// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/topology"
	"github.com/cloister-dev/cloister/table/open"
)

func (a *app) routerCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "router", Short: "The edge in front of the cells", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.routerServe(), a.routerMigrate(), a.routerDeployment())
	return c
}

func (a *app) routerServe() *cobra.Command {
	var ch channelFlags
	var cfg edge.Config
	var listen listenFlags
	var directoryURL, state, keyFile, extractors, extractorsFile, defaultCell, routesURL string
	c := &cobra.Command{
		Use:   "serve",
		Short: "Take requests to the cell of their tenant",
		Long: `Serve an edge: find each request's tenant, take it to the tenant's cell, and hold
it while the tenant is moving.

Routes and topology come from the directory, are kept in memory and, signed, in
the state folder: an edge serves while the directory is down, also after a start.
The public listener speaks HTTP/1.1 and HTTP/2 without TLS; --tls-listen adds one
with TLS. The admin listener has health, metrics and explain, and no credential.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.router(cmd, &ch, &cfg, &listen, routerFlags{directoryURL, state, keyFile, extractors, extractorsFile, defaultCell, routesURL})
		},
	}
	ch.register(c)
	listen.register(c, &cfg)
	f := c.Flags()
	f.StringVar(&directoryURL, "directory", "", "the directory's channel listener, https://host:port")
	f.StringVar(&routesURL, "routes", "", "address of the routing table to read ("+open.Help+"); default: what the directory serves")
	f.StringVar(&state, "state", "edge", "folder of the signed snapshots; each edge has its own")
	f.StringVar(&keyFile, "admission-key-file", "", "the fleet's admission key, hexadecimal; also signs the snapshots")
	f.StringVar(&extractors, "extractors", `[{"header":"X-Tenant"},{"path":"/t/{tenant}/","strip":true}]`, "how to find a request's tenant: a list in YAML or JSON")
	f.StringVar(&extractorsFile, "extractors-file", "", "the same, from a file")
	f.StringVar(&defaultCell, "default-cell", "", "cell that serves tenants without a route; default: none does")
	f.IntVar(&cfg.Hold.Requests, "hold-count", 0, "how many requests may wait for moves at once; 0 is the default")
	f.BoolVar(&cfg.FastPath, "fast-path", false, "forward common HTTP/1.1 requests past net/http, on the listeners without TLS, to processes that are reached without TLS; not with trusted proxies")
	f.DurationVar(&cfg.Hold.Time, "hold-time", 0, "how long one request may wait for a move; 0 is the default")
	for _, n := range []string{"directory", "admission-key-file"} {
		_ = c.MarkFlagRequired(n)
	}
	return c
}

type routerFlags struct {
	directoryURL, state, keyFile, extractors, extractorsFile, defaultCell, routesURL string
}

func (a *app) router(cmd *cobra.Command, chf *channelFlags, cfg *edge.Config, listen *listenFlags, fl routerFlags) (err error) {
	ctx := cmd.Context()
	doc := []byte(fl.extractors)
	if fl.extractorsFile != "" {
		if doc, err = os.ReadFile(fl.extractorsFile); err != nil {
			return err
		}
	}
	if cfg.Extractors, err = extract.Parse(doc); err != nil {
		return &usageError{err}
	}
	if cfg.AdmissionKey, err = fleet.ReadKey(fl.keyFile); err != nil {
		return err
	}
	if err := listen.open(cfg); err != nil {
		return err
	}
	ch, err := chf.open(a, channel.RoleEdge)
	if err != nil {
		return err
	}
	cfg.Name, cfg.Log = ch.Self().Name, a.log
	if err := os.MkdirAll(fl.state, 0o700); err != nil {
		return err
	}
	hc := ch.Client(channel.Identity{Role: channel.RoleDirectory})
	defer hc.CloseIdleConnections()
	if fl.routesURL == "" {
		fl.routesURL = fl.directoryURL
	}
	table, err := open.Lazy(ctx, fl.routesURL, open.WithHTTPClient(hc))
	if errors.Is(err, cells.ErrInvalid) {
		return usagef("--routes: %w", err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, table.Close()) }()
	directory, err := client.Edge(hc, fl.directoryURL)
	if err != nil {
		return &usageError{err}
	}
	cfg.Witness, cfg.Vitals = edge.NewWitness(directory, a.log), directory
	opts := []cells.RouterOption{cells.WithRouterLogger(a.log), cells.WithPlacementsOnly(), cells.WithOnChange(cfg.Witness.Route), cells.WithSnapshot(filepath.Join(fl.state, "routes.snapshot"), cfg.AdmissionKey)}
	if fl.defaultCell != "" {
		opts = append(opts, cells.WithDefaultCell(cells.CellID(fl.defaultCell)))
	}
	routes := cells.NewRouter(table, opts...)
	if err := routes.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, routes.Close()) }()
	topo, err := topology.Watch(ctx, topology.Config{Client: hc, Directory: fl.directoryURL,
		Snapshot: filepath.Join(fl.state, "topology.snapshot"), Key: cfg.AdmissionKey, Log: a.log})
	if err != nil {
		return err
	}
	defer topo.Close()
	srv, err := edge.New(*cfg, routes, topo)
	if err != nil {
		return err
	}
	// What is left is reported when the last request has ended.
	witnessing, end := context.WithCancel(context.WithoutCancel(ctx))
	var witness sync.WaitGroup
	witness.Go(func() { cfg.Witness.Run(witnessing) })
	defer witness.Wait()
	defer end()
	return srv.Run(ctx)
}
