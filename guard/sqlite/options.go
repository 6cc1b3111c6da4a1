// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Option changes a guard's defaults.
type Option func(*config)

type config struct {
	cell         cells.CellID
	withoutCells bool
	lockWait     time.Duration
	commitWait   time.Duration
	retries      int
	poll         time.Duration
	log          *slog.Logger
	lockSQL      string // another one only in mutation checks
}

func newConfig(opts []Option) (config, error) {
	c := config{lockWait: 10 * time.Second, commitWait: 10 * time.Second, retries: 8, poll: 200 * time.Millisecond, log: slog.Default(),
		lockSQL: `DELETE FROM cell_outbox_turn WHERE tenant IS NULL`}
	for _, o := range opts {
		o(&c)
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

// WithCell names this cell: orders for other cells are refused.
func WithCell(cell cells.CellID) Option { return func(c *config) { c.cell = cell } }

// WithoutCells is for a service that runs on its own: a transaction whose
// context carries no admission is admitted at epoch 0 for the tenant of
// guard.WithTenant.
func WithoutCells() Option { return func(c *config) { c.withoutCells = true } }

// WithLockWait bounds how long an order waits for the writer or for a
// publication when its context does not end sooner; 10 s by default.
func WithLockWait(d time.Duration) Option { return func(c *config) { c.lockWait = d } }

// WithCommitWait bounds a commit, which goes on when the context of the
// transaction ends; 10 s by default.
func WithCommitWait(d time.Duration) Option { return func(c *config) { c.commitWait = d } }

// WithRetries is how often InTx runs a transaction again that found the
// database busy; 8 by default, 0 never. Each try waits for the busy_timeout of
// the connection.
func WithRetries(n int) Option { return func(c *config) { c.retries = n } }

// WithPoll is how often this process looks for what other processes have
// written or paused, while somebody waits or publishes; 200 ms by default.
func WithPoll(d time.Duration) Option { return func(c *config) { c.poll = d } }

// WithLogger takes the guard's log lines; slog.Default() by default.
func WithLogger(l *slog.Logger) Option { return func(c *config) { c.log = l } }
