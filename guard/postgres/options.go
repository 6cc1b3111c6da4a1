// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Option changes a guard's defaults.
type Option func(*config)

type config struct {
	schema       string
	cell         cells.CellID
	withoutCells bool
	lockWait     time.Duration
	commitWait   time.Duration
	retries      int
	poll         time.Duration
	log          *slog.Logger
}

func newConfig(opts []Option) (config, error) {
	c := config{schema: "cell", lockWait: 10 * time.Second, commitWait: 10 * time.Second, retries: 8, poll: time.Second, log: slog.Default()}
	for _, o := range opts {
		o(&c)
	}
	if err := checkSchema(c.schema); err != nil {
		return c, err
	}
	if c.cell != "" {
		if err := c.cell.Validate(); err != nil {
			return c, err
		}
	}
	if c.lockWait <= 0 || c.commitWait <= 0 || c.poll <= 0 || c.retries < 0 {
		return c, fmt.Errorf("%w: a duration or count of the guard's options is not positive", cells.ErrInvalid)
	}
	return c, nil
}

func checkSchema(s string) error {
	ok := len(s) > 0 && len(s) <= 40 && (s[0] == '_' || s[0] >= 'a' && s[0] <= 'z')
	for i := range len(s) {
		ok = ok && (s[i] == '_' || s[i] >= 'a' && s[i] <= 'z' || s[i] >= '0' && s[i] <= '9')
	}
	if !ok {
		return fmt.Errorf("%w: schema %q; want [a-z_][a-z0-9_]{0,39}", cells.ErrInvalid, s)
	}
	return nil
}

// WithSchema names the schema of the guard's tables and functions, and the
// prefix of its settings and channels; "cell" by default.
func WithSchema(name string) Option { return func(c *config) { c.schema = name } }

// WithCell names this cell: orders for other cells are refused.
func WithCell(cell cells.CellID) Option { return func(c *config) { c.cell = cell } }

// WithoutCells is for a service that runs on its own: a transaction whose
// context carries no admission is admitted at epoch 0 for the tenant of
// guard.WithTenant.
func WithoutCells() Option { return func(c *config) { c.withoutCells = true } }

// WithLockWait bounds how long an order waits for open transactions or
// publications when its context does not end sooner; 10 s by default.
func WithLockWait(d time.Duration) Option { return func(c *config) { c.lockWait = d } }

// WithCommitWait bounds a commit, which goes on when the context of the
// transaction ends; 10 s by default. A commit that takes longer fails with
// guard.ErrCommitUnknown.
func WithCommitWait(d time.Duration) Option { return func(c *config) { c.commitWait = d } }

// WithRetries is how often InTx runs a transaction again that was given up by
// the server in favour of another; 8 by default, 0 never.
func WithRetries(n int) Option { return func(c *config) { c.retries = n } }

// WithPoll is how often waiting streams look for events that no notification
// announced (written by another process through cell.emit); 1 s by default.
func WithPoll(d time.Duration) Option { return func(c *config) { c.poll = d } }

// WithLogger takes the guard's log lines; slog.Default() by default.
func WithLogger(l *slog.Logger) Option { return func(c *config) { c.log = l } }
