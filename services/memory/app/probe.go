// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/open"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// deployment is which deployment the process belongs to, by its stores.
type deployment struct {
	id       stores.DeploymentID
	stores   *open.Stores
	listener *probe.Listener // nil without CELL_PROBE_PORT
}

// openDeployment pairs the process's stores and starts the probe listener where one
// is wanted. Only Postgres carries a deployment: it is nil on SQLite, and so are the
// methods' effects.
func (o *options) openDeployment(ctx context.Context, log *slog.Logger) (_ *deployment, err error) {
	port, err := probe.PortFromEnv()
	if err != nil {
		return nil, err
	}
	if o.command {
		port = 0 // its cell's processes have it
	}
	cfg, err := open.FromEnv()
	if err != nil {
		return nil, err
	}
	if o.store != "postgres" {
		if port != 0 || cfg.S3 != nil || cfg.ClickHouse != nil {
			return nil, fmt.Errorf("%w: CELL_PROBE_PORT, CELL_S3_URL and CELL_CLICKHOUSE_URL need --store postgres", cells.ErrInvalid)
		}
		return nil, nil
	}
	cfg.Postgres.URL = o.dsn
	cfg.Postgres.Own = []string{"cell"} // the guard's: fences and published events
	d := &deployment{}
	if d.stores, err = open.Open(ctx, cfg); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.stores.Close()
		}
	}()
	if d.id, err = d.stores.Pair(ctx); err != nil {
		return nil, err
	}
	log.Info("deployment", "id", d.id, "objects", d.stores.Location().String())
	if port != 0 {
		if d.listener, err = probe.Start(probe.Config{Port: port, Stores: d.stores.Set, Deployment: d.id, Logger: log}); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// handler answers the deployment id before whatever else the service does with a
// request.
func (d *deployment) handler(next http.Handler) http.Handler {
	if d == nil {
		return next
	}
	return probe.IDHandler(d.id, next)
}

func (d *deployment) close() (err error) {
	if d == nil {
		return nil
	}
	if d.listener != nil {
		err = d.listener.Close()
	}
	d.stores.Close()
	return err
}
