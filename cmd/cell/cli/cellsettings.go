// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"crypto/hmac"
	"crypto/sha256"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/attach"
	guardpg "github.com/cloister-dev/cloister/guard/postgres"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/member/stores/open"
	checks "github.com/cloister-dev/cloister/member/tenancy"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// cellFlags are those of the commands that connect to a cell's stores.
type cellFlags struct {
	router, dsn, env, halt string
	columns                []string
	wait, cache, alive     time.Duration
	request                time.Duration
}

func (fl *cellFlags) add(c *cobra.Command) {
	f := c.Flags()
	routerFlag(c, &fl.router)
	f.StringVar(&fl.env, "env-file", "", "file with the cell's settings, NAME=value a line, instead of the environment")
	f.StringVar(&fl.dsn, "dsn", "", "the cell's Postgres; default: $CELL_DSN")
	f.StringSliceVar(&fl.columns, "tenant-column", []string{"tenant"}, "columns that hold a tenant, as the service's own")
	f.DurationVar(&fl.wait, "wait", probe.DefaultWait, "how long to wait for processes, transactions and probes before refusing")
	f.DurationVar(&fl.alive, "alive", 15*time.Second, "how old a live process's heartbeat may be")
	f.DurationVar(&fl.request, "request-deadline", time.Minute, "how long a request of the service may last")
	f.StringVar(&fl.halt, "halt-file", "", "stand still at the steps that this file names, while it does; for crash tests")
	_ = f.MarkHidden("halt-file")
}

// openCell opens what a command on a cell works on. The caller calls close.
func (a *app) openCell(ctx context.Context, fl *cellFlags) (c *attach.Cell, close func(), err error) {
	get := os.LookupEnv
	if fl.env != "" {
		if get, err = readEnvFile(fl.env); err != nil {
			return nil, nil, &usageError{err}
		}
	}
	s, err := checks.From(get)
	if err != nil {
		return nil, nil, &usageError{err}
	}
	if s.Cell == "" {
		return nil, nil, usagef("CELL is not set: the command does not know which cell's stores these are")
	}
	op, err := a.routerOperator(fl.router)
	if err != nil {
		return nil, nil, err
	}
	o, err := openPeer(ctx, get, fl.dsn, fl.columns)
	if err != nil {
		op.CloseIdleConnections()
		return nil, nil, err
	}
	pool, fences, err := openFences(s.Cell, o.dsn)
	if err != nil {
		o.close()
		return nil, nil, err
	}
	who := &people{cell: s.Cell, dsn: o.dsn, tokens: s.SCIMTokensFile}
	c = &attach.Cell{Name: s.Cell, People: who, Directory: op, Rows: o.rows, Stores: o.stores.Set, Prober: probe.NewClient(probe.ClientConfig{}), Config: s.Configuration, Fences: fences,
		Wait: fl.wait, ModeCache: s.CacheFor, RequestDeadline: fl.request, Alive: fl.alive, Actor: actor(),
		Tell: func(step attach.Step, detail string) { a.log.Info(string(step), "cell", s.Cell, "detail", detail) }}
	if fl.halt != "" {
		halt := haltFileHook(fl.halt)
		c.Done = func(ctx context.Context, step attach.Step) error { return halt(ctx, string(step), string(s.Cell)) }
	}
	return c, func() { who.close(); pool.Close(); o.close(); op.CloseIdleConnections() }, nil
}

// openedPeer are a cell's rows and stores.
type openedPeer struct {
	dsn    string
	rows   *tenancypg.Store
	stores *open.Stores
}

func (o *openedPeer) close() { o.rows.Close(); o.stores.Close() }

func openPeer(ctx context.Context, lookup func(string) (string, bool), dsn string, columns []string) (_ *openedPeer, err error) {
	get := func(name string) string { v, _ := lookup(name); return v }
	if dsn == "" {
		dsn = get("CELL_DSN")
	}
	if dsn == "" {
		return nil, usagef("the cell's Postgres is needed: --dsn or $CELL_DSN")
	}
	cfg, err := open.From(get)
	if err != nil {
		return nil, &usageError{err}
	}
	cfg.Postgres.URL, cfg.Postgres.Own, cfg.Postgres.TenantColumns = dsn, []string{"cell"}, columns
	o := &openedPeer{dsn: dsn}
	if o.rows, err = tenancypg.Open(dsn, tenancypg.WithTenantColumns(columns...)); err != nil {
		return nil, &usageError{err}
	}
	if o.stores, err = open.Open(ctx, cfg); err != nil {
		o.rows.Close()
		return nil, err
	}
	return o, nil
}

// openFences connects when the first fence is raised.
func openFences(cell cells.CellID, dsn string) (*pgxpool.Pool, attach.Fences, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, nil, usagef("--dsn: the address of the database is malformed")
	}
	cfg.MaxConns, cfg.MinConns = 2, 0
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		return nil, nil, err
	}
	g, err := guardpg.New(pool, guardpg.WithCell(cell))
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, g, nil
}

// openPeers opens the cells whose settings are in a folder, one file <cell>.env each,
// but the command's own.
func openPeers(ctx context.Context, dir string, own cells.CellID, columns []string) (peers []attach.Peer, close func(), err error) {
	var opened []*openedPeer
	close = func() {
		for _, o := range opened {
			o.close()
		}
	}
	if dir == "" {
		return nil, close, nil
	}
	files, err := cellFiles(dir)
	if err != nil {
		return nil, close, err
	}
	for _, f := range files {
		if f.cell == own {
			continue
		}
		get, err := readEnvFile(f.path)
		if err == nil {
			var o *openedPeer
			if o, err = openPeer(ctx, get, "", columns); err == nil {
				opened = append(opened, o)
				peers = append(peers, attach.Peer{Cell: f.cell, Rows: o.rows, Stores: o.stores.Set})
				continue
			}
		}
		close()
		return nil, func() {}, fmt.Errorf("cell %s: %w", f.cell, err)
	}
	return peers, close, nil
}

type cellFile struct {
	cell cells.CellID
	path string
}

// cellFiles lists a folder's <cell>.env files by their names.
func cellFiles(dir string) ([]cellFile, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, usagef("--cells: %w", err)
	}
	var out []cellFile
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".env")
		if !ok || e.IsDir() {
			continue
		}
		if err := cells.CellID(name).Validate(); err != nil {
			return nil, usagef("--cells: %s: %w", e.Name(), err)
		}
		out = append(out, cellFile{cells.CellID(name), filepath.Join(dir, e.Name())})
	}
	return out, nil
}

var envName = regexp.MustCompile(`^[A-Z_][A-Z0-9_]*$`)

// readEnvFile reads NAME=value lines; empty lines and lines that begin with # are
// passed over. A value in double quotes is read as in Go. Nothing of the environment
// is seen through it.
func readEnvFile(path string) (func(string) (string, bool), error) {
	list, err := envFile(path)
	if err != nil {
		return nil, err
	}
	return func(name string) (string, bool) {
		for _, l := range list {
			if n, v, _ := strings.Cut(l, "="); n == name {
				return v, true
			}
		}
		return "", false
	}, nil
}

func envFile(path string) ([]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out []string
	seen := map[string]bool{}
	for i, l := range strings.Split(string(b), "\n") {
		if l = strings.TrimSpace(l); l == "" || l[0] == '#' {
			continue
		}
		name, v, ok := strings.Cut(l, "=")
		if !ok || !envName.MatchString(name) || seen[name] {
			// The line may hold a secret.
			return nil, fmt.Errorf("%w: %s line %d is not NAME=value, or names a setting twice", cells.ErrInvalid, path, i+1)
		}
		if strings.HasPrefix(v, `"`) {
			if v, err = strconv.Unquote(v); err != nil {
				return nil, fmt.Errorf("%w: %s line %d: a value in quotes that cannot be read", cells.ErrInvalid, path, i+1)
			}
		}
		seen[name] = true
		out = append(out, name+"="+v)
	}
	return out, nil
}

// keysFingerprint is the fingerprint of a root secret: it tells two apart and says
// nothing of either.
func keysFingerprint(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", usagef("--root-secret-file: %w", err)
	}
	secret := []byte(strings.TrimSpace(string(b)))
	if len(secret) < 16 {
		return "", &usageError{errors.New("--root-secret-file: a root secret has at least 16 bytes")}
	}
	m := hmac.New(sha256.New, secret)
	m.Write([]byte("cell root secret fingerprint"))
	return hex.EncodeToString(m.Sum(nil)), nil
}
