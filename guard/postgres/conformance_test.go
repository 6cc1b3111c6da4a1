// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/guard/guardtest"
)

func TestConformancePgx(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), ignoreCluster)
	guardtest.Run(guardtest.Wrap(t), harness(t, false, nil))
}

func TestConformanceSQL(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), ignoreCluster)
	guardtest.Run(guardtest.Wrap(t), harness(t, true, nil))
}

// The shared cluster's process is waited for until the test binary ends.
var ignoreCluster = goleak.IgnoreAnyFunction("github.com/cloister-dev/cloister/internal/pgcluster.wait")
