// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
)

// TableSQL creates the service's table that the suite writes to.
const TableSQL = `CREATE TABLE guardtest_rows (tenant TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (tenant, key))`

// Table names it.
var Table = guard.Table{Name: "guardtest_rows", TenantColumn: "tenant"}

// Harness is a store as the suite sees it.
type Harness struct {
	// Isolations names the isolation levels (or kinds of transactions) that the
	// store has; Begin takes them.
	Isolations []string
	// Open makes a new database with [Table], protected.
	Open func(ctx context.Context) (Database, error)
	// Child is a command that runs a relay on the database of db until it is
	// killed, with a webhook publisher to url and [ChildKey]; nil: the
	// crash test is left out.
	Child func(db Database, url string) *exec.Cmd
	// Unprotected: the store cannot refuse writes that carry no admission.
	Unprotected bool
	// Interleavings is how many random ones are run; 0 means 200.
	Interleavings int
	// Lanes is how many of them run at the same time; 0 means 8.
	Lanes int
	// Patience bounds every wait that should end by itself; 0 means 20 s.
	Patience time.Duration
	// Only, if not empty, names the sections to run.
	Only []string
}

// ChildKey signs the webhooks of [Harness.Child].
func ChildKey() webhook.Key {
	k, err := webhook.Secret([]byte("guardtest-guardtest-guardtest"))
	if err != nil {
		panic(err)
	}
	return k
}

// Database is one cell's database.
type Database interface {
	// Process returns a guard with its own pool of connections, as a further
	// process of the cell would have. Its orders wait at least 15 s.
	Process(ctx context.Context) (Process, error)
	Close()
}

// Process is one process's guard.
type Process interface {
	guard.Keeper
	guard.RelayStore
	Prune(ctx context.Context, tenant cells.TenantID, upto cells.EventSeq) (int64, error)
	// Begin begins a transaction that is not admitted.
	Begin(ctx context.Context, isolation string) (Tx, error)
	// InTx is the guard's, for the context's admission.
	InTx(ctx context.Context, isolation string, fn func(ctx context.Context, tx Tx) error) error
	// Rows returns the tenant's rows of [Table], by key.
	Rows(ctx context.Context, tenant cells.TenantID) (map[string]string, error)
	Close()
}

// Tx is a transaction. One goroutine uses it.
type Tx interface {
	// Read reads the table, which fixes the snapshot where there is one.
	Read(ctx context.Context) error
	Admit(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch) error
	AdmitClosed(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error
	// Exec runs one statement of the service's; placeholders are $1, $2, ...
	Exec(ctx context.Context, query string, args ...any) error
	Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error)
	// Commit and Rollback are the driver's; not inside InTx.
	Commit(ctx context.Context) error
	Rollback()
}

func put(ctx context.Context, tx Tx, tenant cells.TenantID, key, value string) error {
	return tx.Exec(ctx, `INSERT INTO guardtest_rows (tenant, key, value) VALUES ($1, $2, $3)
		ON CONFLICT (tenant, key) DO UPDATE SET value = excluded.value`, string(tenant), key, value)
}

// patience bounds every wait that should end by itself; see [Harness.Patience].
const patience = 20 * time.Second

func (e *env) patience() time.Duration {
	if e.h.Patience > 0 {
		return e.h.Patience
	}
	return patience
}

// blocked is how long something must not have ended to count as waiting.
const blocked = 60 * time.Millisecond

var tenants atomic.Int64

// env is one section's: a database and two processes on it.
type env struct {
	T
	h    *Harness
	db   Database
	a, b Process
	ctx  context.Context
}

// newTenant names a tenant that no other test uses.
func newTenant() cells.TenantID {
	return cells.TenantID(fmt.Sprintf("t%d", tenants.Add(1)))
}

func admission(tenant cells.TenantID, epoch cells.Epoch) guard.Admission {
	return guard.Admission{Tenant: tenant, Epoch: epoch, Cell: "here"}
}

func (e *env) as(tenant cells.TenantID, epoch cells.Epoch) context.Context {
	return guard.ContextWith(e.ctx, admission(tenant, epoch))
}

func (e *env) must(err error, what string, args ...any) {
	e.Helper()
	if err != nil {
		e.Fatalf(what+": %v", append(args, err)...)
	}
}

func (e *env) wantErr(err, want error, what string, args ...any) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf(what+": %v, want %v", append(args, err, want)...)
	}
}

// refused checks that a transaction was refused, in whichever way isolation
// makes it show, and that the guard says that nothing was written.
func (e *env) refused(err error, what string) {
	e.Helper()
	if err == nil {
		e.Errorf("%s succeeded", what)
		return
	}
	if !guard.NothingWritten(err) || !errors.Is(err, cells.ErrFenced) && !errors.Is(err, guard.ErrContended) {
		e.Errorf("%s: %v, want one that says fenced or contended", what, err)
	}
}

func (e *env) open(tenant cells.TenantID, epoch cells.Epoch) {
	e.Helper()
	e.must(e.a.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: epoch, Floor: epoch}), "open %s at %d", tenant, epoch)
}

func (e *env) close(tenant cells.TenantID, epoch cells.Epoch) {
	e.Helper()
	e.must(e.b.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: epoch, Move: "m"}), "close %s at %d", tenant, epoch)
}

func (e *env) fence(tenant cells.TenantID) guard.Fence {
	e.Helper()
	f, err := e.a.Fence(e.ctx, tenant)
	e.must(err, "fence of %s", tenant)
	return f
}

// state is everything that the database holds of the tenant.
func (e *env) state(tenant cells.TenantID) string {
	e.Helper()
	rows, err := e.a.Rows(e.ctx, tenant)
	e.must(err, "rows of %s", tenant)
	events, err := e.a.Events(e.ctx, tenant, 0, 10000)
	e.must(err, "events of %s", tenant)
	seqs := make([]cells.EventSeq, len(events))
	for i, ev := range events {
		seqs[i] = ev.Seq
	}
	return fmt.Sprint(rows, seqs)
}

// call is something that runs beside the test.
type call struct {
	done chan struct{}
	err  error // valid once done is closed
}

func async(f func() error) *call {
	c := &call{done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.err = f()
	}()
	return c
}

// ended reports whether the call ends within d.
func (c *call) ended(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.done:
		return true
	case <-t.C:
		return false
	}
}

// wait returns the call's result.
func (c *call) wait(e *env, what string) error {
	e.Helper()
	if !c.ended(e.patience()) {
		e.Fatalf("%s has not ended after %s", what, e.patience())
	}
	return c.err
}

// eventually waits until cond holds.
func (e *env) eventually(what string, cond func() bool) {
	e.Helper()
	deadline := time.Now().Add(e.patience())
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			e.Fatalf("%s: not after %s", what, e.patience())
		}
		<-tick.C
	}
}

// group runs functions at the same time; the first error counts.
func group(n int, f func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
