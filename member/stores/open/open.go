// SPDX-License-Identifier: Apache-2.0

package open

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/clickhouse"
	"github.com/cloister-dev/cloister/member/stores/postgres"
	"github.com/cloister-dev/cloister/member/stores/s3"
)

// Config says which stores a cell has.
type Config struct {
	// Postgres is the authority; required.
	Postgres postgres.Config
	// S3 and ClickHouse are nil in a cell without.
	S3         *s3.Config
	ClickHouse *clickhouse.Config
}

// Stores is a cell's stores, open until Close.
type Stores struct {
	*stores.Set
	closers []func()
}

// Close closes the stores.
func (s *Stores) Close() {
	for _, c := range s.closers {
		c()
	}
	s.closers = nil
}

// Open opens every store. The caller closes what it returns. The errors are those of
// the stores, each of which may wrap [cells.ErrInvalid] or [cells.ErrUnavailable].
func Open(ctx context.Context, cfg Config) (_ *Stores, err error) {
	out := &Stores{}
	defer func() {
		if err != nil {
			out.Close()
		}
	}()
	pg, err := postgres.Open(ctx, cfg.Postgres)
	if err != nil {
		return nil, err
	}
	out.closers = append(out.closers, pg.Close)
	var derived []stores.Store
	if cfg.S3 != nil {
		s, err := s3.Open(ctx, *cfg.S3)
		if err != nil {
			return nil, err
		}
		out.closers = append(out.closers, s.Close)
		derived = append(derived, s)
	}
	if cfg.ClickHouse != nil {
		s, err := clickhouse.Open(ctx, *cfg.ClickHouse)
		if err != nil {
			return nil, err
		}
		out.closers = append(out.closers, s.Close)
		derived = append(derived, s)
	}
	if out.Set, err = stores.NewSet(pg, derived...); err != nil {
		return nil, err
	}
	return out, nil
}

// Names of the variables that [FromEnv] reads.
const (
	envS3       = "CELL_S3_URL"
	envS3Region = "CELL_S3_REGION"
	envS3Keys   = "CELL_S3_KEY_FILE"
	envS3CA     = "CELL_S3_CA_FILE"
	envCH       = "CELL_CLICKHOUSE_URL"
	envCHDB     = "CELL_CLICKHOUSE_DATABASE"
	envCHKeys   = "CELL_CLICKHOUSE_KEY_FILE"
	envCHCA     = "CELL_CLICKHOUSE_CA_FILE"
)

// FromEnv returns the derived stores of the environment, beside a Postgres that the
// caller sets:
//
//	CELL_S3_URL               https://host[:port]/bucket[/prefix]
//	CELL_S3_REGION            default us-east-1
//	CELL_S3_KEY_FILE          the access key and the secret key, a line each; without it
//	                          the AWS_ variables, file and role are looked at
//	CELL_S3_CA_FILE           certificates that the server's is checked against
//	CELL_CLICKHOUSE_URL       https://host[:port]
//	CELL_CLICKHOUSE_DATABASE  default "default"
//	CELL_CLICKHOUSE_KEY_FILE  the user and the password, a line each
//	CELL_CLICKHOUSE_CA_FILE   certificates that the server's is checked against
//
// [cells.ErrInvalid] for a malformed variable, and for one of a store that has no URL.
func FromEnv() (Config, error) { return From(os.Getenv) }

// From is [FromEnv] with variables that get returns, for a command that opens the
// stores of several cells. "" is a variable that is not set.
func From(get func(name string) string) (Config, error) {
	var cfg Config
	for url, others := range map[string][]string{envS3: {envS3Region, envS3Keys, envS3CA}, envCH: {envCHDB, envCHKeys, envCHCA}} {
		for _, o := range others {
			if get(o) != "" && get(url) == "" {
				return Config{}, fmt.Errorf("%w: %s is set and %s is not", cells.ErrInvalid, o, url)
			}
		}
	}
	var err error
	if v := get(envS3); v != "" {
		c := &s3.Config{Region: get(envS3Region)}
		if c.Endpoint, c.Location, err = parseBucket(v); err != nil {
			return Config{}, err
		}
		if c.AccessKey, c.SecretKey, err = pair(get, envS3Keys); err != nil {
			return Config{}, err
		}
		if c.RootCAs, err = roots(get, envS3CA); err != nil {
			return Config{}, err
		}
		cfg.S3 = c
	}
	if v := get(envCH); v != "" {
		c := &clickhouse.Config{URL: v, Database: get(envCHDB)}
		if c.User, c.Password, err = pair(get, envCHKeys); err != nil {
			return Config{}, err
		}
		if c.RootCAs, err = roots(get, envCHCA); err != nil {
			return Config{}, err
		}
		cfg.ClickHouse = c
	}
	return cfg, nil
}

// parseBucket reads https://host/bucket/prefix.
func parseBucket(s string) (endpoint string, at stores.Location, err error) {
	bad := fmt.Errorf("%w: %s is not https://host/bucket or https://host/bucket/prefix, without a user", cells.ErrInvalid, envS3)
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return "", at, bad
	}
	bucket, prefix, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if bucket == "" {
		return "", at, bad
	}
	at.Bucket = bucket
	if at.Prefix, err = stores.ParsePrefix(prefix); err != nil {
		return "", stores.Location{}, fmt.Errorf("%s: %w", envS3, err)
	}
	if err := at.Validate(); err != nil {
		return "", stores.Location{}, fmt.Errorf("%s: %w", envS3, err)
	}
	return u.Scheme + "://" + u.Host, at, nil
}

// pair reads a file of two lines; two empty strings without a file.
func pair(get func(string) string, env string) (first, second string, err error) {
	path := get(env)
	if path == "" {
		return "", "", nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", "", fmt.Errorf("%w: %s: %w", cells.ErrInvalid, env, err)
	}
	lines := strings.Split(strings.TrimRight(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n"), "\n")
	if len(lines) != 2 || lines[0] == "" || lines[1] == "" {
		return "", "", fmt.Errorf("%w: %s: the file has a name in its first line, a secret in its second, and nothing else", cells.ErrInvalid, env)
	}
	return lines[0], lines[1], nil
}

func roots(get func(string) string, env string) (*x509.CertPool, error) {
	path := get(env)
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", cells.ErrInvalid, env, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%w: %s: no certificate in the file", cells.ErrInvalid, env)
	}
	return pool, nil
}
