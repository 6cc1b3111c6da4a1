// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// Config says which cell a process belongs to and how it reaches its fleet. Each
// field is read by [FromEnv] from the variable named beside it.
type Config struct {
	// Cell is the process's cell; CELL_ID. [a-z0-9-]{1,32}. When it is not set at
	// all, the process runs without cells.
	Cell cells.CellID
	// Fleet is the fleet that the certificates name; CELL_FLEET.
	Fleet string
	// Instance names this start of the process, unique for ever; CELL_INSTANCE.
	// Default: the cell, the process id and a random part.
	Instance string
	// Version of the service, for people; CELL_VERSION. Default "dev".
	Version string
	// DirectoryURL is the base URL of the directory's channel listener, https;
	// CELL_DIRECTORY_URL.
	DirectoryURL string
	// ChannelCA, ChannelCert and ChannelKey are the PEM files of package channel:
	// the fleet's CA, and this cell's certificate and key, which must be for both
	// ends of a connection; CELL_CHANNEL_CA, CELL_CHANNEL_CERT, CELL_CHANNEL_KEY.
	ChannelCA, ChannelCert, ChannelKey string
	// ChannelRevoked, if set, is the list of revoked serials; CELL_CHANNEL_REVOKED.
	ChannelRevoked string
	// AgentAddr is where the agent listens; CELL_AGENT_ADDR. Default "127.0.0.1:0".
	AgentAddr string
	// AgentURL is the agent's address as the directory and other cells reach it;
	// CELL_AGENT_URL. Default: https and the address that the agent listens at,
	// which must then name one interface.
	AgentURL string
	// ServiceURL is where edges reach the service, http or https; CELL_SERVICE_URL.
	ServiceURL string
	// AdmissionKeyFile holds the cell's admission keys (see cells.DeriveCellKey) in
	// hexadecimal, one a line, each at least 16 bytes; CELL_ADMISSION_KEY_FILE. It is
	// re-read when it changes. "" admits requests without a token, which is only good
	// where nobody but the edges can reach the service.
	AdmissionKeyFile string
	// StateDir keeps the signed snapshot of the routes; CELL_STATE_DIR. "" keeps
	// none: the process cannot start while the directory is down. Each process has
	// its own.
	StateDir string
	// DefaultCell serves tenants that have no route, at epoch 0, as the directory
	// and the edges have it; CELL_DEFAULT_CELL. "" when there is none.
	DefaultCell cells.CellID
}

// FromEnv reads the configuration from CELL_* variables. on is false, without an
// error, when CELL_ID is not set: the process is an ordinary service then. When it
// is set, everything without a default must be, and the error, which wraps
// [cells.ErrInvalid], names the first variable that is missing or malformed. A
// CELL_ID that is missing while variables that only members have are set is an
// error, too.
func FromEnv() (cfg Config, on bool, err error) { return fromEnv(os.LookupEnv) }

func fromEnv(lookup func(string) (string, bool)) (cfg Config, on bool, err error) {
	var cell, def string
	vars := []struct {
		name     string
		to       *string
		required bool
	}{
		{"CELL_ID", &cell, true}, {"CELL_FLEET", &cfg.Fleet, true}, {"CELL_INSTANCE", &cfg.Instance, false},
		{"CELL_VERSION", &cfg.Version, false}, {"CELL_DIRECTORY_URL", &cfg.DirectoryURL, true},
		{"CELL_CHANNEL_CA", &cfg.ChannelCA, true}, {"CELL_CHANNEL_CERT", &cfg.ChannelCert, true},
		{"CELL_CHANNEL_KEY", &cfg.ChannelKey, true}, {"CELL_CHANNEL_REVOKED", &cfg.ChannelRevoked, false},
		{"CELL_AGENT_ADDR", &cfg.AgentAddr, false}, {"CELL_AGENT_URL", &cfg.AgentURL, false},
		{"CELL_SERVICE_URL", &cfg.ServiceURL, true}, {"CELL_ADMISSION_KEY_FILE", &cfg.AdmissionKeyFile, false},
		{"CELL_STATE_DIR", &cfg.StateDir, false}, {"CELL_DEFAULT_CELL", &def, false},
	}
	for _, v := range vars {
		*v.to, _ = lookup(v.name)
	}
	if cell == "" {
		// CELL_FLEET and CELL_DIRECTORY_URL may be there for the operator's commands.
		for _, v := range vars[5:] {
			if *v.to != "" {
				return Config{}, false, fmt.Errorf("%w: %s is set and CELL_ID is not; set CELL_ID to the cell's name, or none of them", cells.ErrInvalid, v.name)
			}
		}
		return Config{}, false, nil
	}
	for _, v := range vars {
		if v.required && *v.to == "" {
			return Config{}, true, fmt.Errorf("%w: CELL_ID is %s and %s is not set", cells.ErrInvalid, cell, v.name)
		}
	}
	cfg.Cell, cfg.DefaultCell = cells.CellID(cell), cells.CellID(def)
	if err := cfg.normalize(); err != nil {
		return Config{}, true, err
	}
	return cfg, true, nil
}

// normalize fills in defaults and checks everything that needs no file. Errors
// name the variable.
func (c *Config) normalize() error {
	bad := func(name string, err error) error {
		if !errors.Is(err, cells.ErrInvalid) {
			err = fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := c.Cell.Validate(); err != nil {
		return bad("CELL_ID", err)
	}
	if err := c.self().Validate(); err != nil {
		return bad("CELL_FLEET", err)
	}
	if c.Version == "" {
		c.Version = "dev"
	}
	if len(c.Version) > 128 {
		return bad("CELL_VERSION", errors.New("longer than 128 bytes"))
	}
	if c.Instance == "" {
		c.Instance = fmt.Sprintf("%s-%d-%s", c.Cell, os.Getpid(), strings.ToLower(rand.Text()[:10]))
	}
	if err := cells.MoveID(c.Instance).Validate(); err != nil {
		return bad("CELL_INSTANCE", errors.New("want 1 to 64 bytes of letters, digits and . _ -"))
	}
	if c.DefaultCell != "" {
		if err := c.DefaultCell.Validate(); err != nil {
			return bad("CELL_DEFAULT_CELL", err)
		}
	}
	for _, f := range []struct{ name, value string }{
		{"CELL_CHANNEL_CA", c.ChannelCA}, {"CELL_CHANNEL_CERT", c.ChannelCert}, {"CELL_CHANNEL_KEY", c.ChannelKey},
	} {
		if f.value == "" {
			return bad(f.name, errors.New("not set"))
		}
	}
	var err error
	if c.DirectoryURL, err = baseURL(c.DirectoryURL, "https"); err != nil {
		return bad("CELL_DIRECTORY_URL", err)
	}
	if c.ServiceURL, err = baseURL(c.ServiceURL, "http", "https"); err != nil {
		return bad("CELL_SERVICE_URL", err)
	}
	if c.AgentAddr == "" {
		c.AgentAddr = "127.0.0.1:0"
	}
	host, _, err := net.SplitHostPort(c.AgentAddr)
	if err != nil {
		return bad("CELL_AGENT_ADDR", err)
	}
	if c.AgentURL != "" {
		if c.AgentURL, err = baseURL(c.AgentURL, "https"); err != nil {
			return bad("CELL_AGENT_URL", err)
		}
	} else if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return bad("CELL_AGENT_URL", fmt.Errorf("not set, and CELL_AGENT_ADDR %q names no interface", c.AgentAddr))
	}
	return nil
}

func (c *Config) self() channel.Identity {
	return channel.Identity{Fleet: c.Fleet, Role: channel.RoleCell, Name: string(c.Cell)}
}

func baseURL(s string, schemes ...string) (string, error) {
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("%q is no URL", s)
	}
	ok := false
	for _, scheme := range schemes {
		ok = ok || u.Scheme == scheme
	}
	if !ok || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "" {
		return "", fmt.Errorf("%q is not %s://host:port", s, strings.Join(schemes, " or "))
	}
	return u.Scheme + "://" + u.Host, nil
}

// readKeys reads the admission keys.
func readKeys(path string) ([][]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("CELL_ADMISSION_KEY_FILE: %w", err)
	}
	var out [][]byte
	sc := bufio.NewScanner(bytes.NewReader(b))
	for n := 1; sc.Scan(); n++ {
		line := strings.TrimSpace(sc.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		k, err := hex.DecodeString(line)
		if err != nil || len(k) < 16 {
			return nil, fmt.Errorf("%w: CELL_ADMISSION_KEY_FILE %s: line %d is not at least 32 hexadecimal digits", cells.ErrInvalid, path, n)
		}
		out = append(out, k)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("%w: CELL_ADMISSION_KEY_FILE %s: %w", cells.ErrInvalid, path, err)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: CELL_ADMISSION_KEY_FILE %s holds no key", cells.ErrInvalid, path)
	}
	return out, nil
}

// Runner is something that runs until its context ends.
type Runner interface {
	Run(ctx context.Context) error
}

// Store is what a service that keeps state gives its member. The service stays
// its owner and closes it after [Member.Close].
type Store struct {
	// Keeper keeps the fences in the cell's database. Required.
	Keeper guard.Keeper
	// Agent moves tenants' rows. Nil: cells share one database, and nothing is ever
	// copied; a move that wants to is refused.
	Agent transfer.Agent
	// Relay, if set, publishes the outbox. It runs, and is started again when it
	// fails, from when the fences are reconciled until Close.
	Relay Runner
	// Tables are the service's tenant tables; Join has the Keeper protect them. They
	// must exist by then.
	Tables []guard.Table
	// Engine names the store: "sqlite", "postgres". Required.
	Engine string
	// Tenancy keeps the tenancy rows of a cell that is a whole deployment; a
	// guard/tenancy.Store does. Nil: the cell has none, and no tenant is moved to it or
	// from it between deployments.
	Tenancy TenancyRows
}

// TenancyRows are a cell's tenancy rows, as moves between deployments need them.
type TenancyRows interface {
	// Hold writes tenants' rows; idempotent.
	Hold(ctx context.Context, tenants ...cells.TenantID) error
	// Unhold removes the row of a tenant whose fence is closed here, at no higher epoch
	// than upto (0: at any); idempotent. An error that wraps [cells.ErrConflict] when it
	// is not.
	Unhold(ctx context.Context, tenant cells.TenantID, upto cells.Epoch) error
}

// Option adjusts [Join].
type Option func(*options)

type options struct {
	store     *Store
	check     func(context.Context) error
	log       *slog.Logger
	metrics   prometheus.Registerer
	every     time.Duration
	settle    time.Duration
	sweep     time.Duration
	unguarded func(string) bool
	listener  net.Listener
	table     cells.RoutingTable
	warm      func(context.Context, cells.TenantID) error
}

// WithStore says where the service keeps its state. Without it the service is
// stateless: it has gates, and no fences.
func WithStore(s Store) Option { return func(o *options) { o.store = &s } }

// WithCheck adds the service's own readiness: the member is ready only while check
// returns nil. It is called before each heartbeat and has a second.
func WithCheck(check func(context.Context) error) Option { return func(o *options) { o.check = check } }

// WithLogger sets the logger; the default is [slog.Default].
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// WithMetrics registers the member's and the channel's metrics; [Member.Close]
// unregisters them.
func WithMetrics(r prometheus.Registerer) Option { return func(o *options) { o.metrics = r } }

// WithHeartbeatEvery sets how often to report until the directory says otherwise;
// 500 ms by default.
func WithHeartbeatEvery(d time.Duration) Option { return func(o *options) { o.every = d } }

// WithReconcile sets how long after a route's last change its fence is looked at
// (2 s by default: in a move, the driver's orders come first and cost less), and
// how often all of them are (5 minutes).
func WithReconcile(after, every time.Duration) Option {
	return func(o *options) { o.settle, o.sweep = after, every }
}

// WithUnguarded lets through [Member.Handler], without a tenant, the paths for
// which f returns true. /livez and /readyz are answered by the member in any case.
func WithUnguarded(f func(path string) bool) Option { return func(o *options) { o.unguarded = f } }

// WithAgentListener gives the agent a listener instead of CELL_AGENT_ADDR. The
// member closes it.
func WithAgentListener(l net.Listener) Option { return func(o *options) { o.listener = l } }

// WithTable reads the routes from a table that the process reaches by itself,
// instead of through the directory. The caller stays its owner.
func WithTable(t cells.RoutingTable) Option { return func(o *options) { o.table = t } }

func buildOptions(opts []Option) (options, error) {
	o := options{log: slog.Default(), every: 500 * time.Millisecond, settle: 2 * time.Second, sweep: 5 * time.Minute}
	for _, f := range opts {
		f(&o)
	}
	if o.log == nil {
		o.log = slog.Default()
	}
	if s := o.store; s != nil && (s.Keeper == nil || s.Engine == "") {
		return o, fmt.Errorf("%w: member: a store needs a Keeper and the name of its engine", cells.ErrInvalid)
	}
	if o.every <= 0 || o.settle < 0 || o.sweep <= 0 {
		return o, fmt.Errorf("%w: member: intervals must be positive", cells.ErrInvalid)
	}
	return o, nil
}
