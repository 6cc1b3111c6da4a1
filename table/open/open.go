// SPDX-License-Identifier: Apache-2.0

// Package open opens a routing table by its address.
//
//	file:PATH                          one file (package cells)
//	sqlite:PATH                        an SQLite database
//	postgres://...[?cells_schema=NAME] a Postgres database, as pgx takes the rest
//	etcd://host:port[,...][/prefix]    an etcd cluster, see etcd.ParseURL
//	kube:[NAMESPACE]                   TenantRoute objects, see kube.ParseURL
//	http(s)://host:port                what a directory or another handler serves
//
// The store is authoritative; the package has no state. A malformed address, or one
// of an unknown kind, is [cells.ErrInvalid] and nothing was reached; a store that
// does not answer is [cells.ErrUnavailable], except for files and http(s), which are
// first reached when the table is used.
package open

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/etcd"
	"github.com/cloister-dev/cloister/table/kube"
	"github.com/cloister-dev/cloister/table/postgres"
	"github.com/cloister-dev/cloister/table/remote"
	"github.com/cloister-dev/cloister/table/sqlite"
)

// Help lists the addresses, for the help of commands.
const Help = `file:PATH, sqlite:PATH, postgres://..., etcd://host:port/prefix, kube:NAMESPACE or https://host:port`

// Table is a routing table that its opener closes.
type Table interface {
	cells.RoutingTable
	io.Closer
}

type config struct {
	http  *http.Client
	exist bool
}

// Option configures [Open].
type Option func(*config)

// WithHTTPClient sets the client for http(s) addresses. It stays the caller's.
func WithHTTPClient(hc *http.Client) Option { return func(c *config) { c.http = hc } }

// MustExist refuses a file or a database file that is not there, which would be
// made otherwise; the error wraps [fs.ErrNotExist].
func MustExist() Option { return func(c *config) { c.exist = true } }

// Open opens the table at an address. The error wraps [cells.ErrInvalid] or
// [cells.ErrUnavailable] and holds no password.
func Open(ctx context.Context, address string, opts ...Option) (Table, error) {
	var c config
	for _, o := range opts {
		o(&c)
	}
	kind, rest, ok := strings.Cut(address, ":")
	if !ok {
		return nil, fmt.Errorf("%w: a table's address is %s", cells.ErrInvalid, Help)
	}
	switch kind {
	case "file", "sqlite":
		return c.file(ctx, kind, rest)
	case "postgres", "postgresql":
		return openPostgres(ctx, address)
	case "etcd":
		cfg, topts, err := etcd.ParseURL(address)
		if err != nil {
			return nil, err
		}
		return some(etcd.Open(ctx, cfg, topts...))
	case "kube":
		cfg, namespace, err := kube.ParseURL(address)
		if err != nil {
			return nil, err
		}
		return some(kube.Open(ctx, cfg, namespace))
	case "http", "https":
		u, err := url.Parse(address)
		if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "" {
			return nil, fmt.Errorf("%w: want %s://host:port", cells.ErrInvalid, kind)
		}
		return remote.NewClient(c.http, address), nil
	}
	return nil, fmt.Errorf("%w: %q is no kind of table; an address is %s", cells.ErrInvalid, kind, Help)
}

// some keeps a nil pointer from becoming a table.
func some[T Table](t T, err error) (Table, error) {
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (c *config) file(ctx context.Context, kind, path string) (Table, error) {
	if path == "" || strings.HasPrefix(path, "//") {
		return nil, fmt.Errorf("%w: want %s:PATH", cells.ErrInvalid, kind)
	}
	if c.exist {
		st, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("no table at %s: %w", path, fs.ErrNotExist)
		}
		if err != nil || st.IsDir() {
			return nil, fmt.Errorf("%w: %s is no file that can be read", cells.ErrInvalid, path)
		}
	}
	if kind == "file" {
		return cells.NewFileTable(path), nil
	}
	return some(sqlite.Open(ctx, path))
}

func openPostgres(ctx context.Context, address string) (Table, error) {
	u, err := url.Parse(address)
	if err != nil { // repeats the address, and with it the password
		return nil, fmt.Errorf("%w: the postgres url is malformed", cells.ErrInvalid)
	}
	var opts []postgres.Option
	q := u.Query()
	if q.Has("cells_schema") {
		opts = append(opts, postgres.WithSchema(q.Get("cells_schema")))
		q.Del("cells_schema")
		u.RawQuery = q.Encode()
	}
	return some(postgres.Open(ctx, u.String(), opts...))
}
