// SPDX-License-Identifier: Apache-2.0

package rows

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Bench is what is measured: rows of Size bytes of one tenant among others, Rounds times.
type Bench struct {
	Rows, Size, Rounds int
	Log                *slog.Logger
	// OnStep is told what is being done.
	OnStep func(string)
}

// Round is one way of getting the rows over.
type Round struct {
	// Copied is how long the rows took; Whole adds everything else that a move does before
	// its cut: the capture, the comparison of both sides, catching up. The same for a peer.
	Copied time.Duration `json:"copied_ns"`
	Whole  time.Duration `json:"whole_ns"`
	// Agents, or the peer's programs, and Postgres: processor time, for Whole.
	Agents   time.Duration `json:"agents_ns"`
	Postgres time.Duration `json:"postgres_ns"`
}

// CopyReport has the rounds of both, which alternated.
type CopyReport struct {
	Rows  int     `json:"rows"`
	Size  int     `json:"row_bytes"`
	Moves []Round `json:"moves"`
	Peer  []Round `json:"psql"`
}

// Clean is true: a run whose rows differ has failed.
func (r *CopyReport) Clean() bool { return true }

// Copy measures copies beside psql's.
func (b Bench) Copy(ctx context.Context) (*CopyReport, error) {
	rep := &CopyReport{Rows: b.Rows, Size: b.Size}
	b.OnStep(fmt.Sprintf("a cluster with %d rows of %d bytes", b.Rows, b.Size))
	p, err := start(ctx, b.Rows, b.Size, b.Log)
	if err != nil {
		return rep, err
	}
	defer p.end()
	for i := range b.Rounds {
		b.OnStep(fmt.Sprintf("round %d of %d", i+1, b.Rounds))
		x, err := p.measured(ctx, "bare", func() (time.Duration, error) { return 0, p.psql(ctx) }, nil)
		if err != nil {
			return rep, err
		}
		rep.Peer = append(rep.Peer, x)
		m := cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("m%d", i)), Tenant: tenant, Source: p.from.id, Target: p.to.id, Base: base + cells.Epoch(2*i)}
		x, err = p.measured(ctx, "item", func() (time.Duration, error) { return p.move(ctx, m, b.Log) }, func() error { return p.forget(ctx, m) })
		if err != nil {
			return rep, err
		}
		rep.Moves = append(rep.Moves, x)
	}
	return rep, nil
}

// measured runs one way into a table of the target, which is empty and is emptied again.
// A move is forgotten afterwards.
func (p *pair) measured(ctx context.Context, into string, f func() (copied time.Duration, _ error), forget func() error) (x Round, err error) {
	if _, err := p.to.pool.Exec(ctx, "CHECKPOINT"); err != nil {
		return x, err
	}
	before, err := p.usage()
	if err != nil {
		return x, err
	}
	began := time.Now()
	x.Copied, err = f()
	x.Whole = time.Since(began)
	if err != nil {
		return x, err
	}
	if x.Copied == 0 {
		x.Copied = x.Whole
	}
	after, err := p.usage()
	if err != nil {
		return x, err
	}
	spent := after.minus(before)
	x.Agents, x.Postgres = spent.programs, spent.postgres
	if forget != nil {
		x.Agents = spent.agents
	}
	if err := p.same(ctx, into); err != nil {
		return x, err
	}
	if err := p.empty(ctx, into); err != nil {
		return x, err
	}
	if forget != nil {
		err = forget()
	}
	return x, err
}

// empty empties a table of the target. The guard refuses TRUNCATE, and the table must not
// have grown for the next round.
func (p *pair) empty(ctx context.Context, into string) error {
	for _, q := range []string{"ALTER TABLE item DISABLE TRIGGER zz_cell_guard_truncate", "TRUNCATE " + into, "ALTER TABLE item ENABLE ALWAYS TRIGGER zz_cell_guard_truncate"} {
		if _, err := p.to.pool.Exec(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

const checksum = "SELECT count(*)::text || ' ' || coalesce(sum(hashtextextended(ROW(t.*)::text, 0)), 0)::text FROM %s AS t WHERE tenant = $1"

// same fails unless the rows of the tenant are the same on both sides.
func (p *pair) same(ctx context.Context, into string) error {
	return sameRows(ctx, p.from.pool, p.to.pool, into)
}

func sameRows(ctx context.Context, from, to *pgxpool.Pool, into string) error {
	var want, got string
	if err := from.QueryRow(ctx, fmt.Sprintf(checksum, "item"), string(tenant)).Scan(&want); err != nil {
		return err
	}
	if err := to.QueryRow(ctx, fmt.Sprintf(checksum, into), string(tenant)).Scan(&got); err != nil {
		return err
	}
	if want != got {
		return fmt.Errorf("the target has %s, the source %s", got, want)
	}
	return nil
}

func (p *pair) psql(ctx context.Context) error { return pipe(ctx, p.from.url, p.to.url, "bare") }

// pipe pipes one psql's binary COPY of the tenant's rows into another's.
func pipe(ctx context.Context, from, to, into string) error {
	out := exec.CommandContext(ctx, "psql", "-X", "-q", "-d", from, "-c", fmt.Sprintf("COPY (SELECT * FROM item WHERE tenant = '%s') TO STDOUT (FORMAT binary)", tenant))
	in := exec.CommandContext(ctx, "psql", "-X", "-q", "-d", to, "-c", "COPY "+into+" FROM STDIN (FORMAT binary)")
	var outErr, inErr strings.Builder
	out.Stderr, in.Stderr = &outErr, &inErr
	stream, err := out.StdoutPipe()
	if err != nil {
		return err
	}
	in.Stdin = stream
	if err := out.Start(); err != nil {
		return err
	}
	err = in.Run()
	if err = errors.Join(err, out.Wait()); err != nil {
		return fmt.Errorf("psql: %w: %s%s", err, outErr.String(), inErr.String())
	}
	return nil
}

// move prepares a move, as far as its cut. It returns how long the rows took.
func (p *pair) move(ctx context.Context, m cells.MoveRef, log *slog.Logger) (copied time.Duration, err error) {
	v := transfer.New(p.to.store, p.to.store, transfer.WithFollow(0), transfer.WithLogger(log))
	defer func() { err = errors.Join(err, v.Close()) }()
	var from, to time.Time
	_, err = v.Prepare(ctx, m, p.source, func(pr cells.Progress) {
		switch {
		case pr.Phase == "catchup" && from.IsZero():
			from = time.Now()
		case pr.Phase == "verify" && to.IsZero():
			to = time.Now()
		}
	})
	return to.Sub(from), err
}

// forget ends a move as a rollback does.
func (p *pair) forget(ctx context.Context, m cells.MoveRef) error {
	err := p.from.guard.OpenFence(ctx, cells.FenceOrder{Cell: p.from.id, Tenant: tenant, Epoch: m.OpenEpoch(), Floor: base, Move: m.ID})
	if err == nil {
		err = p.from.store.Sweep(ctx)
	}
	if err == nil {
		err = p.to.store.Discard(ctx, tenant, cells.Residue{Cell: p.to.id, Epoch: m.OpenEpoch(), Move: m.ID},
			transfer.RemoveOptions{BatchRows: 5000, Pace: func(context.Context, int64) error { return nil }, Progress: func(cells.Progress) {}})
	}
	return err
}
