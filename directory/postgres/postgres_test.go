// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/directory/postgres"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

func TestMain(m *testing.M) {
	code := pgtest.Main(m)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func TestConformance(t *testing.T) {
	url := pgtest.DB(t)
	var n atomic.Int64
	open := func() func(context.Context) (*postgres.Store, error) {
		schema := fmt.Sprintf("s%d", n.Add(1))
		return func(ctx context.Context) (*postgres.Store, error) {
			return postgres.Open(ctx, url, postgres.Options{Schema: schema, AllowAsynchronous: true, Connections: 6})
		}
	}
	directorytest.Run(t, func(t *testing.T) directorytest.Harness {
		open := open()
		return directorytest.Harness{Open: func(ctx context.Context) (directory.Store, error) { return open(ctx) }}
	})
	deploytest.Run(t, func(t *testing.T) deploytest.Harness {
		open := open()
		return deploytest.Harness{Open: func(ctx context.Context) (deploytest.Directory, error) { return open(ctx) }}
	})
}
