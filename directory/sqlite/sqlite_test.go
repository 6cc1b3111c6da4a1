// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/directory/sqlite"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func harness(t *testing.T) directorytest.Harness {
	path := filepath.Join(t.TempDir(), "directory.db")
	return directorytest.Harness{Open: func(ctx context.Context) (directory.Store, error) {
		return sqlite.Open(ctx, path)
	}}
}

func TestConformance(t *testing.T) { directorytest.Run(t, harness) }

func TestDeployments(t *testing.T) {
	deploytest.Run(t, func(t *testing.T) deploytest.Harness {
		path := filepath.Join(t.TempDir(), "directory.db")
		return deploytest.Harness{Open: func(ctx context.Context) (deploytest.Directory, error) { return sqlite.Open(ctx, path) }}
	})
}
