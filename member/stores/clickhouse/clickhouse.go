// SPDX-License-Identifier: Apache-2.0

package clickhouse

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/internal/names"
)

const (
	// reserved is the table; service users may read and write it.
	reserved       = "cell_reserved"
	nameDeployment = "deployment"
	nameNonce      = "cell-probe"
	nameMark       = "mark/"
	maxValue       = "256"
)

// Config says which database of which server, and what belongs to tenants in it.
type Config struct {
	// URL of the HTTP interface: http or https, a host and perhaps a port.
	URL string
	// Database; default "default". It exists.
	Database string
	// User and Password; "" for the server's default user without a password.
	User, Password string
	// RootCAs sign the server's certificate; nil is the system's.
	RootCAs *x509.CertPool
	// TenantColumns are the names that say that a table's rows belong to tenants; default
	// [stores.TenantColumns].
	TenantColumns []string
}

// Store is a database of a ClickHouse server. It is safe for concurrent use.
type Store struct {
	common
	c       *client
	columns []string
}

// common are the methods that are the same for every store with reserved names.
type common = names.Names

var _ interface {
	stores.Store
	stores.TenantLister
} = (*Store)(nil)

// Open makes the reserved table when it is missing, and checks it. The caller closes
// the store.
//
// [cells.ErrInvalid] for a malformed configuration, a database that is not there and a
// user who may not; [cells.ErrUnavailable] when the server cannot be reached.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("%w: ClickHouse's URL is http:// or https:// and a host, without a user or a path", cells.ErrInvalid) // it may have a secret in it
	}
	if cfg.Database == "" {
		cfg.Database = "default"
	}
	if cfg.TenantColumns == nil {
		cfg.TenantColumns = stores.TenantColumns
	}
	if strings.ContainsAny(cfg.User+cfg.Password, "\r\n\x00") || cfg.Password != "" && cfg.User == "" {
		return nil, fmt.Errorf("%w: ClickHouse's user and password are single lines, and a password has a user", cells.ErrInvalid)
	}
	tr := &http.Transport{DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext, TLSHandshakeTimeout: 5 * time.Second, MaxIdleConnsPerHost: 2,
		IdleConnTimeout: 2 * time.Second, TLSClientConfig: &tls.Config{RootCAs: cfg.RootCAs, MinVersion: tls.VersionTLS12}}
	s := &Store{columns: slices.Clone(cfg.TenantColumns), c: &client{url: u.Scheme + "://" + u.Host + "/", database: cfg.Database, user: cfg.User, password: cfg.Password,
		http: &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}}
	s.common = common{Nonce: nameNonce, Mark: nameMark, Get: s.get, Put: s.put, Drop: s.drop}
	if err := s.install(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("member/stores/clickhouse: %w", err)
	}
	return s, nil
}

// Close closes the connections that are idle.
func (s *Store) Close() { s.c.http.CloseIdleConnections() }

func (s *Store) install(ctx context.Context) error {
	have, err := s.shape(ctx)
	if err != nil {
		return err
	}
	if len(have) == 0 {
		_, err := s.c.query(ctx, `CREATE TABLE IF NOT EXISTS `+reserved+` (name String, value String, version UInt64)
			ENGINE = ReplacingMergeTree(version) PARTITION BY name ORDER BY (name, value)`)
		if err != nil {
			return fmt.Errorf("making table %s: %w", reserved, err)
		}
		if have, err = s.shape(ctx); err != nil {
			return err
		}
	}
	if want := []string{"name String", "value String", "version UInt64"}; !slices.Equal(have, want) {
		return fmt.Errorf("%w: table %s has the columns %q, not %q", cells.ErrInvalid, reserved, have, want)
	}
	return nil
}

func (s *Store) shape(ctx context.Context) ([]string, error) {
	rows, err := s.c.query(ctx, `SELECT concat(name, ' ', type) AS c FROM system.columns WHERE database = currentDatabase() AND table = '`+reserved+`' ORDER BY c`)
	if err != nil {
		return nil, err
	}
	return column(rows)
}

// Kind implements [stores.Store].
func (s *Store) Kind() stores.Kind { return stores.ClickHouse }

// Location implements [stores.Store]: none.
func (s *Store) Location() stores.Location { return stores.Location{} }

// Identity implements [stores.Store].
func (s *Store) Identity(ctx context.Context) (stores.Identity, error) {
	rows, err := s.c.query(ctx, `SELECT DISTINCT substring(value, 1, `+maxValue+`) AS v FROM `+reserved+` WHERE name = '`+nameDeployment+`' ORDER BY v LIMIT 2`)
	if err != nil {
		return stores.Identity{}, err
	}
	ids, err := column(rows)
	if err != nil {
		return stores.Identity{}, err
	}
	out := stores.Identity{Kind: stores.ClickHouse}
	for _, v := range ids {
		if err := stores.DeploymentID(v).Validate(); err != nil {
			return stores.Identity{}, err
		}
	}
	switch len(ids) {
	case 0:
	case 1:
		out.Deployment = stores.DeploymentID(ids[0])
	default:
		return stores.Identity{}, fmt.Errorf("%w: ClickHouse carries both %s and %s", stores.ErrMismatch, ids[0], ids[1])
	}
	return out, nil
}

// Establish implements [stores.Store].
func (s *Store) Establish(ctx context.Context, id stores.DeploymentID) (stores.DeploymentID, error) {
	if err := id.Validate(); err != nil {
		return "", err
	}
	_, err := s.c.query(ctx, `INSERT INTO `+reserved+` (name, value, version) SELECT '`+nameDeployment+`', `+literal(string(id))+`, toUInt64(1) FROM system.one
		WHERE (SELECT count() FROM `+reserved+` WHERE name = '`+nameDeployment+`') = 0`)
	if err != nil {
		return "", err
	}
	got, err := s.Identity(ctx)
	if err == nil && got.Deployment == "" {
		err = fmt.Errorf("%w: the deployment id was written and is gone", cells.ErrUnavailable)
	}
	return got.Deployment, err
}

// get returns the value with the highest version of a name.
func (s *Store) get(ctx context.Context, name string) (value string, there bool, err error) {
	rows, err := s.c.query(ctx, `SELECT substring(argMax(value, version), 1, `+maxValue+`) AS v FROM `+reserved+` WHERE name = `+literal(name)+` GROUP BY name`)
	if err != nil {
		return "", false, err
	}
	vs, err := column(rows)
	if err != nil || len(vs) == 0 {
		return "", false, err
	}
	if len(vs) > 1 {
		return "", false, errors.New("more than one row of one group")
	}
	return vs[0], true, nil
}

// put is one INSERT of a SELECT: such a statement is never queued by the server.
func (s *Store) put(ctx context.Context, name, value string) error {
	_, err := s.c.query(ctx, `INSERT INTO `+reserved+` (name, value, version) SELECT `+literal(name)+`, `+literal(value)+`, toUInt64(max(version) + 1)
		FROM `+reserved+` WHERE name = `+literal(name))
	return err
}

func (s *Store) drop(ctx context.Context, name string) error {
	_, err := s.c.query(ctx, `ALTER TABLE `+reserved+` DROP PARTITION `+literal(name))
	return err
}
