// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"slices"
)

// warmSQL has the server compile what a guarded write calls. Both calls are refused, and
// their refusals caught: nothing is admitted or written.
const warmSQL = `DO $$ BEGIN
	BEGIN PERFORM @s.admit('-', -1); EXCEPTION WHEN OTHERS THEN NULL; END;
	BEGIN PERFORM @s.emit('', NULL); EXCEPTION WHEN OTHERS THEN NULL; END;
END $$`

// Warm opens connections until the pool has n of them, at most half of what it may
// have, and has the server load in each new one what the guard's statements need. A
// tenant that arrives by a move brings all its clients at once: without it the first
// request of each waits for a connection of its own. Up to n connections are held
// while it runs. It returns at once when there are n already.
//
// Errors wrap [cells.ErrUnavailable]; what was opened until then stays.
func (g *Guard) Warm(ctx context.Context, n int) error {
	st := g.pool.Stat()
	return g.warm(ctx, n, int(st.TotalConns()), int(st.MaxConns()), func() (warming, error) {
		c, err := g.pool.Acquire(ctx)
		if err != nil {
			return warming{}, err
		}
		return warming{pgxQuerier{c}, func() error { c.Release(); return nil }}, nil
	})
}

// Warm is [Guard.Warm] for database/sql. A pool without SetMaxOpenConns has no limit
// to take the half of; one that keeps fewer than n idle connections closes the rest
// again.
func (g *SQL) Warm(ctx context.Context, n int) error {
	st := g.db.Stats()
	return g.warm(ctx, n, st.OpenConnections, st.MaxOpenConnections, func() (warming, error) {
		c, err := g.db.Conn(ctx)
		if err != nil {
			return warming{}, err
		}
		return warming{sqlQuerier{c}, c.Close}, nil
	})
}

// warming is a connection that is held.
type warming struct {
	querier
	free func() error
}

// warm holds connections until there are n: there were open before, limit may be (0: any
// number).
func (c *core) warm(ctx context.Context, n, open, limit int, acquire func() (warming, error)) (err error) {
	if limit > 0 {
		n = min(n, limit/2)
	}
	if open >= n {
		return nil
	}
	var held []warming
	defer func() {
		// The last first: a pool takes the one that was given back last.
		for _, w := range slices.Backward(held) {
			err = errors.Join(err, w.free())
		}
	}()
	for range n {
		w, err := acquire()
		if err != nil {
			return ended(ctx, unavailable(err))
		}
		held = append(held, w)
		if err := w.exec(ctx, c.q(warmSQL)); err != nil {
			return ended(ctx, translate(err))
		}
	}
	return nil
}
