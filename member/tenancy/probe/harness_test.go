// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
)

const childEnv = "CELL_TEST_PROBE"

func TestMain(m *testing.M) {
	if at := os.Getenv(childEnv); at != "" {
		os.Exit(child(at))
	}
	os.Exit(pgtest.Main(m))
}

// fake is a store that holds what a test says, and counts how often it is asked.
type fake struct {
	stores.Store // nil: a probe calls nothing else
	kind         stores.Kind
	at           stores.Location

	mu    sync.Mutex // guards all below
	id    stores.DeploymentID
	nonce stores.Nonce
	err   error
	reads int
}

func (f *fake) Kind() stores.Kind         { return f.kind }
func (f *fake) Location() stores.Location { return f.at }

func (f *fake) Identity(context.Context) (stores.Identity, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	return stores.Identity{Kind: f.kind, Deployment: f.id, Location: f.at}, f.err
}

func (f *fake) ReadNonce(context.Context) (stores.Nonce, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	if f.err == nil && f.nonce == "" {
		return "", stores.ErrNoNonce
	}
	return f.nonce, f.err
}

func (f *fake) set(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

const deployment stores.DeploymentID = "0123456789abcdef0123456789abcdef"

var quiet = slog.New(slog.DiscardHandler)

// fakes are the stores of a cell with a bucket.
func fakes(t *testing.T) (pg, s3 *fake, set *stores.Set) {
	t.Helper()
	pg = &fake{kind: stores.Postgres, id: deployment, nonce: stores.NewNonce()}
	s3 = &fake{kind: stores.S3, id: deployment, nonce: stores.NewNonce(), at: stores.Location{Bucket: "bucket", Prefix: "env/a"}}
	set, err := stores.NewSet(pg, s3)
	if err != nil {
		t.Fatal(err)
	}
	return pg, s3, set
}

func want(pg, s3 *fake) Want {
	return Want{Deployment: deployment, Location: s3.at, Nonces: map[stores.Kind]stores.Nonce{stores.Postgres: pg.nonce, stores.S3: s3.nonce}}
}

// pass lets a bubble's clock run on.
func pass(d time.Duration) { <-time.After(d) }
