// SPDX-License-Identifier: Apache-2.0

package rows

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Catching is one way of taking a backlog of changes.
type Catching struct {
	Took time.Duration `json:"took_ns"`
	// CPU is all that was spent: agents, programs and Postgres.
	CPU time.Duration `json:"cpu_ns"`
}

// CatchUpReport has the rounds of all ways, which alternated.
type CatchUpReport struct {
	Rows    int `json:"rows"`
	Size    int `json:"row_bytes"`
	Changes int `json:"changes"`
	// Move is the target's agent, Native a subscription with a row filter, Decode
	// pg_recvlogical, which throws away what it is sent.
	Move   []Catching `json:"move"`
	Native []Catching `json:"native"`
	Decode []Catching `json:"decode"`
}

// Clean is true: a run whose rows differ has failed.
func (r *CatchUpReport) Clean() bool { return true }

// publication is the peers' own.
const publication = "bench_native"

// CatchUp measures how fast a backlog of changes, each of one row in a transaction of its
// own, is applied.
func (b Bench) CatchUp(ctx context.Context, changes int) (*CatchUpReport, error) {
	rep := &CatchUpReport{Rows: b.Rows, Size: b.Size, Changes: changes}
	b.OnStep(fmt.Sprintf("a cluster with %d rows of %d bytes", b.Rows, b.Size))
	p, err := start(ctx, b.Rows, b.Size, b.Log)
	if err != nil {
		return rep, err
	}
	defer p.end()
	n, err := p.native(ctx)
	if err != nil {
		return rep, err
	}
	defer n.Close()
	for i := range b.Rounds {
		b.OnStep(fmt.Sprintf("round %d of %d: a backlog of %d changes", i+1, b.Rounds, changes))
		if err := b.catch(ctx, p, n, i, rep); err != nil {
			return rep, err
		}
	}
	return rep, nil
}

// native makes the peer's database, with the tenant's rows.
func (p *pair) native(ctx context.Context) (*pgxpool.Pool, error) {
	if err := p.cluster.CreateDatabase(ctx, "native"); err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, p.cluster.URL("native"))
	if err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, "CREATE TABLE item "+table)
	if err == nil {
		err = pipe(ctx, p.from.url, p.cluster.URL("native"), "item")
	}
	if err == nil {
		_, err = pool.Exec(ctx, "ANALYZE item")
	}
	if err == nil {
		_, err = p.from.pool.Exec(ctx, fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE item WHERE (tenant = '%s')", publication, tenant))
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// backlog changes rows at random, and at last the first one, whose version then is mark.
const backlog = `DO $$ DECLARE k text; BEGIN
	SET synchronous_commit = off;
	FOR i IN 1..%[2]d LOOP
		PERFORM set_config('cell.admitted', pg_current_xact_id()::text || ' %[1]s', true);
		k := 'row-' || lpad((2 + floor(random() * %[3]d))::int::text, 9, '0');
		UPDATE item SET version = version + 1, at = clock_timestamp() WHERE tenant = '%[1]s' AND id = k;
		COMMIT;
	END LOOP;
	SET synchronous_commit = on;
	PERFORM set_config('cell.admitted', pg_current_xact_id()::text || ' %[1]s', true);
	UPDATE item SET version = %[4]d WHERE tenant = '%[1]s' AND id = 'row-000000001';
	COMMIT;
END $$`

// catch has all three take one backlog.
func (b Bench) catch(ctx context.Context, p *pair, native *pgxpool.Pool, round int, rep *CatchUpReport) error {
	m := cells.MoveRef{ID: cells.MoveID(fmt.Sprintf("m%d", round)), Tenant: tenant, Source: p.from.id, Target: p.to.id, Base: base + cells.Epoch(2*round)}
	if _, err := p.move(ctx, m, b.Log); err != nil {
		return err
	}
	for _, slot := range []string{"bench_native", "bench_decode"} {
		if _, err := p.from.pool.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot); err != nil {
			return err
		}
	}
	mark := -1 - int64(round)
	if _, err := p.from.pool.Exec(ctx, fmt.Sprintf(backlog, tenant, rep.Changes-1, max(1, rep.Rows-1), mark)); err != nil {
		return err
	}
	var end string
	if err := p.from.pool.QueryRow(ctx, "SELECT pg_current_wal_flush_lsn()::text").Scan(&end); err != nil {
		return err
	}

	ways := []func() error{
		func() error {
			return p.caught(&rep.Decode, func() error {
				out, err := exec.CommandContext(ctx, "pg_recvlogical", "-d", p.from.url, "--slot=bench_decode", "--start", "--endpos="+end, "-f", "/dev/null",
					"-o", "proto_version=1", "-o", "publication_names="+publication).CombinedOutput()
				if err != nil {
					err = fmt.Errorf("pg_recvlogical: %w: %s", err, out)
				}
				return err
			})
		},
		func() error {
			if _, err := native.Exec(ctx, fmt.Sprintf("CREATE SUBSCRIPTION bench CONNECTION '%s' PUBLICATION %s WITH (create_slot = false, copy_data = false, enabled = false, slot_name = 'bench_native')",
				p.from.url, publication)); err != nil {
				return err
			}
			err := p.caught(&rep.Native, func() error {
				if _, err := native.Exec(ctx, "ALTER SUBSCRIPTION bench ENABLE"); err != nil {
					return err
				}
				return reached(ctx, native, mark)
			})
			for _, q := range []string{"ALTER SUBSCRIPTION bench DISABLE", "ALTER SUBSCRIPTION bench SET (slot_name = NONE)", "DROP SUBSCRIPTION bench"} {
				_, qerr := native.Exec(ctx, q)
				err = errors.Join(err, qerr)
			}
			return err
		},
		func() error {
			v := transfer.New(p.to.store, p.to.store, transfer.WithFollow(0), transfer.WithLogger(b.Log))
			prepared := make(chan error, 1)
			err := p.caught(&rep.Move, func() error {
				go func() { _, err := v.Prepare(ctx, m, p.source, nil); prepared <- err }()
				return reached(ctx, p.to.pool, mark)
			})
			return errors.Join(err, <-prepared, v.Close())
		},
	}
	for i := range ways {
		if err := ways[(i+round)%len(ways)](); err != nil {
			return err
		}
	}
	for _, pool := range []*pgxpool.Pool{native, p.to.pool} {
		if err := sameRows(ctx, p.from.pool, pool, "item"); err != nil {
			return err
		}
	}
	for _, slot := range []string{"bench_native", "bench_decode"} {
		if _, err := p.from.pool.Exec(ctx, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL", slot); err != nil {
			return err
		}
		if err := p.dropSlot(ctx, slot); err != nil {
			return err
		}
	}
	if err := p.empty(ctx, "item"); err != nil {
		return err
	}
	return p.forget(ctx, m)
}

// dropSlot waits until nobody reads the slot any more.
func (p *pair) dropSlot(ctx context.Context, slot string) error {
	return poll(ctx, "slot "+slot+" to be free", func() (bool, error) {
		_, err := p.from.pool.Exec(ctx, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NULL", slot)
		if err != nil {
			return false, err
		}
		var left int
		err = p.from.pool.QueryRow(ctx, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", slot).Scan(&left)
		return left == 0, err
	})
}

// caught measures f.
func (p *pair) caught(to *[]Catching, f func() error) error {
	before, err := p.usage()
	if err != nil {
		return err
	}
	began := time.Now()
	if err := f(); err != nil {
		return err
	}
	x := Catching{Took: time.Since(began)}
	after, err := p.usage()
	if err != nil {
		return err
	}
	spent := after.minus(before)
	x.CPU = spent.agents + spent.programs + spent.postgres
	*to = append(*to, x)
	return nil
}

// reached waits until the last change of a backlog is there.
func reached(ctx context.Context, pool *pgxpool.Pool, mark int64) error {
	return poll(ctx, "the last change", func() (bool, error) {
		var there bool
		err := pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM item WHERE tenant = $1 AND id = 'row-000000001' AND version = $2)", string(tenant), mark).Scan(&there)
		return there, err
	})
}

// poll asks until it is so, for ten minutes.
func poll(ctx context.Context, what string, f func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, fmt.Errorf("waited in vain for %s", what))
	defer cancel()
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for {
		ok, err := f()
		if ok || err != nil {
			return err
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
