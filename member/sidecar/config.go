// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/member"
)

// Engines of [Config.Engine].
const (
	Postgres = "postgres"
	SQLite   = "sqlite"
)

// Config configures [Run]. A zero field takes its default.
type Config struct {
	// Member is the cell's membership; see [member.FromEnv]. Required.
	Member member.Config
	// Listen is the address that edges reach, which Member.ServiceURL names from
	// outside; default 127.0.0.1:8081. Listener, if set, is used instead and closed.
	Listen   string
	Listener net.Listener
	// AdminListen is the address of /livez, /readyz and /metrics; "" is none.
	AdminListen string

	// Upstream is the service's base URL, http://host:port. With a Command it may be
	// empty: then a free port of the loopback is chosen and given to it as PORT.
	Upstream string
	// HTTP2 speaks HTTP/2 without TLS to the service for every request; without it
	// only gRPC does, and everything else is HTTP/1.1.
	HTTP2 bool
	// HealthPath is asked for by GET every half second; the process is ready while
	// the answer is 2xx. "" only connects.
	HealthPath string
	// Streams are paths of requests that go on for long, besides those that say so
	// themselves: as [path.Match] has it, or a prefix that ends in "/".
	Streams []string
	// IdleTimeout closes connections to the service that were not used; default 1 s.
	// It must be shorter than the service's own keep-alive, or a request may be sent
	// into a connection that is just being closed.
	IdleTimeout time.Duration

	// Engine is [Postgres] or [SQLite], where the service keeps its tenants; "" when it
	// is stateless.
	Engine string
	// DSN is the database's URL, or the SQLite file's path.
	DSN string
	// Tables hold tenants' rows. The service makes them; the start waits for them.
	Tables []guard.Table
	// Publisher, if set, is given the tenants' events from the outbox.
	Publisher guard.Publisher

	// Command, if set, is the service: it is started first, without CELL_* in its
	// environment but CELL_NAME, and ended last. Its output is the sidecar's.
	Command []string
	// StartTimeout bounds the wait for the service's tables; default 60 s.
	StartTimeout time.Duration
	// StopTimeout bounds the wait for requests at the end; default 4 s.
	StopTimeout time.Duration
	// Log takes log lines; slog.Default().
	Log *slog.Logger
}

// normalize fills in defaults and checks. Errors wrap [cells.ErrInvalid].
func (c *Config) normalize() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: sidecar: %s", cells.ErrInvalid, fmt.Sprintf(format, args...))
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:8081"
	}
	for _, d := range []struct {
		to  *time.Duration
		def time.Duration
	}{{&c.IdleTimeout, time.Second}, {&c.StartTimeout, time.Minute}, {&c.StopTimeout, 4 * time.Second}} {
		if *d.to == 0 {
			*d.to = d.def
		}
		if *d.to < 0 {
			return bad("a duration is negative")
		}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Upstream == "" {
		if len(c.Command) == 0 {
			return bad("neither an upstream nor a command")
		}
	} else if u, err := url.Parse(c.Upstream); err != nil || u.Scheme != "http" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return bad("upstream %q is not http://host:port", c.Upstream)
	}
	if c.HealthPath != "" && !strings.HasPrefix(c.HealthPath, "/") {
		return bad("health path %q does not begin with /", c.HealthPath)
	}
	for _, s := range c.Streams {
		if _, err := path.Match(s, "/"); err != nil || !strings.HasPrefix(s, "/") {
			return bad("stream path %q; want one that begins with /", s)
		}
	}
	switch c.Engine {
	case "":
		if c.DSN != "" || len(c.Tables) > 0 || c.Publisher != nil {
			return bad("a DSN, tables or a publisher, and no engine")
		}
	case Postgres, SQLite:
		if c.DSN == "" || len(c.Tables) == 0 {
			return bad("%s needs a DSN and the tables", c.Engine)
		}
	default:
		return bad("engine %q; want %s or %s", c.Engine, Postgres, SQLite)
	}
	return nil
}

// isStream reports whether the configuration calls the path a stream's.
func (c *Config) isStream(p string) bool {
	for _, s := range c.Streams {
		if strings.HasSuffix(s, "/") && strings.HasPrefix(p, s) {
			return true
		}
		if ok, _ := path.Match(s, p); ok {
			return true
		}
	}
	return false
}

// ParseTables reads "table:column,table:column".
func ParseTables(s string) ([]guard.Table, error) {
	var out []guard.Table
	for _, part := range strings.Split(s, ",") {
		name, column, ok := strings.Cut(strings.TrimSpace(part), ":")
		if !ok || name == "" || column == "" || strings.Contains(column, ":") {
			return nil, fmt.Errorf("%w: table %q; want table:column, as accounts:tenant", cells.ErrInvalid, part)
		}
		out = append(out, guard.Table{Name: name, TenantColumn: column})
	}
	return out, nil
}
