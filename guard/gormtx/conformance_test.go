// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/guard/guardtest"
)

func TestConformanceSQLite(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	guardtest.Run(guardtest.Wrap(t), sqliteHarness(Config{}))
}

func TestConformancePostgres(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), goleak.IgnoreAnyFunction("github.com/cloister-dev/cloister/internal/pgcluster.wait"))
	guardtest.Run(guardtest.Wrap(t), postgresHarness(t, Config{}))
}

// The suite notices what is broken on the way through GORM.
func TestMutants(t *testing.T) {
	for _, m := range guardtest.Mutants(guardtest.Literals{True: "1", False: "0"}, "immediate") {
		switch m.Name {
		case "a transaction that commits what failed", "close that does not close", "events that skip":
			m.Check(t, sqliteHarness(Config{}))
		}
	}
	// Without both of its checks SQLite lets every row through.
	guardtest.Mutant{Name: "no checks", Only: []string{"protected"}}.Check(t, sqliteHarness(Config{noCheck: true, noTriggers: true}))
	// The text alone tells a TRUNCATE and an outbox from the service's own rows.
	guardtest.Mutant{Name: "no look at statements", Only: []string{"protected"}}.Check(t, sqliteHarness(Config{noCheck: true}))
}
