// SPDX-License-Identifier: Apache-2.0

package rows

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/guard"
	guardpostgres "github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/postgres"
)

// The tenant that moves, and the others of its database.
const (
	tenant = cells.TenantID("moving")
	others = "'before', 'zulu'"
	// base is the epoch at which the tenant is served in the first cell.
	base = cells.Epoch(5)
)

const table = `(tenant text NOT NULL, id text NOT NULL, version bigint NOT NULL, body text NOT NULL, at timestamptz NOT NULL, PRIMARY KEY (tenant, id))`

var tables = []guard.Table{{Name: "item", TenantColumn: "tenant"}}

// side is one cell's database with its agent.
type side struct {
	id    cells.CellID
	url   string
	pool  *pgxpool.Pool
	guard *guardpostgres.Guard
	store *postgres.Store
	ch    *channel.Channel
	close []func()
}

func (s *side) end() {
	for i := len(s.close) - 1; i >= 0; i-- {
		s.close[i]()
	}
}

// pair is both sides and the cluster of their databases.
type pair struct {
	dir      string
	cluster  *pgcluster.Cluster
	from, to *side
	server   *http.Server
	source   transfer.Source // as the target's agent sees it
	close    []func()
}

func (p *pair) end() {
	for i := len(p.close) - 1; i >= 0; i-- {
		p.close[i]()
	}
}

// start makes a pair whose source has rows of size bytes of the tenant, and a tenth as
// many of each of two others.
func start(ctx context.Context, rows, size int, log *slog.Logger) (_ *pair, err error) {
	p := &pair{}
	defer func() {
		if err != nil {
			p.end()
		}
	}()
	if p.dir, err = os.MkdirTemp("", "cell-rows-"); err != nil {
		return nil, err
	}
	p.close = append(p.close, func() { _ = os.RemoveAll(p.dir) })
	if err := os.Chmod(p.dir, 0o755); err != nil { // Postgres runs as another user
		return nil, err
	}
	// No checkpoint falls into one round and not into the next.
	settings := []string{"shared_buffers=1GB", "max_wal_size=16GB", "checkpoint_timeout=1h", "autovacuum=off"}
	if p.cluster, err = pgcluster.Start(ctx, pgcluster.Options{Dir: filepath.Join(p.dir, "pg"), Settings: settings}); err != nil {
		return nil, err
	}
	p.close = append(p.close, func() { _ = p.cluster.Stop() })
	ca, err := pki.NewAuthority(filepath.Join(p.dir, "ca"), "bench", pki.Options{})
	if err != nil {
		return nil, err
	}
	for _, s := range []struct {
		to **side
		id cells.CellID
	}{{&p.from, "cell-a"}, {&p.to, "cell-b"}} {
		x, err := p.side(ctx, s.id, ca)
		if x != nil {
			p.close = append(p.close, x.end)
			*s.to = x
		}
		if err != nil {
			return nil, err
		}
	}
	if err := p.fill(ctx, rows, size); err != nil {
		return nil, err
	}
	return p, p.serve(log)
}

func (p *pair) side(ctx context.Context, id cells.CellID, ca *pki.Authority) (*side, error) {
	s := &side{id: id}
	db := strings.ReplaceAll(string(id), "-", "_")
	if err := p.cluster.CreateDatabase(ctx, db); err != nil {
		return nil, err
	}
	s.url = p.cluster.URL(db)
	var err error
	if s.pool, err = pgxpool.New(ctx, s.url); err != nil {
		return nil, err
	}
	s.close = append(s.close, s.pool.Close)
	for _, q := range []string{"CREATE TABLE item " + table, "CREATE TABLE bare " + table} {
		if _, err := s.pool.Exec(ctx, q); err != nil {
			return s, err
		}
	}
	if s.guard, err = guardpostgres.New(s.pool, guardpostgres.WithCell(id)); err != nil {
		return s, err
	}
	s.close = append(s.close, s.guard.Close)
	if err := s.guard.Install(ctx, tables); err != nil {
		return s, err
	}
	if s.store, err = postgres.Open(ctx, postgres.Config{Pool: s.pool, Keeper: s.guard, Admit: s.guard.AdmitClosed, Tables: tables}); err != nil {
		return s, err
	}
	s.close = append(s.close, func() { _ = s.store.Close() })
	issued, err := ca.Issue(channel.Identity{Role: channel.RoleCell, Name: string(id)}, pki.IssueOptions{Dir: filepath.Join(p.dir, "issued")})
	if err != nil {
		return s, err
	}
	s.ch, err = channel.Open(channel.Config{CAFile: ca.CAFile(), CertFile: issued.CertFile, KeyFile: issued.KeyFile})
	return s, err
}

func (p *pair) fill(ctx context.Context, rows, size int) error {
	for _, name := range []cells.TenantID{tenant, "before", "zulu"} {
		n := rows
		if name != tenant {
			n = rows / 10
		}
		if err := p.from.guard.OpenFence(ctx, cells.FenceOrder{Cell: p.from.id, Tenant: name, Epoch: base, Floor: base}); err != nil {
			return err
		}
		err := p.from.guard.InTx(guard.ContextWith(ctx, guard.Admission{Tenant: name, Epoch: base, Cell: p.from.id}), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO item SELECT $1, 'row-' || lpad(i::text, 9, '0'), i, left(repeat(md5(i::text), $3 / 32 + 1), $3), now() FROM generate_series(1, $2) AS i`, name, n, size)
			return err
		})
		if err != nil {
			return err
		}
	}
	_, err := p.from.pool.Exec(ctx, "VACUUM ANALYZE item")
	return err
}

// serve serves the source's agent to that of the target.
func (p *pair) serve(log *slog.Logger) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	h := transfer.Handler(p.from.store, func(r *http.Request, m cells.MoveRef) error {
		if peer, ok := channel.PeerFrom(r); !ok || peer.Name != string(p.to.id) || m.Tenant != tenant {
			return fmt.Errorf("%w: not that move", cells.ErrInvalid)
		}
		return nil
	})
	p.server = &http.Server{Handler: p.from.ch.Require(h, channel.RoleCell), TLSConfig: p.from.ch.Server(), ReadHeaderTimeout: 5 * time.Second,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	done := make(chan struct{})
	go func() { defer close(done); _ = p.server.ServeTLS(l, "", "") }()
	client := p.to.ch.Client(channel.Identity{Role: channel.RoleCell, Name: string(p.from.id)})
	p.source = transfer.NewRemoteSource(client, []string{"https://" + l.Addr().String()})
	p.close = append(p.close, func() {
		client.CloseIdleConnections()
		_ = p.server.Close()
		<-done
	})
	return nil
}
