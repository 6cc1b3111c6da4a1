// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

func TestConformanceWAL(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	guardtest.Run(guardtest.Wrap(t), harness("WAL"))
}

// Without the write-ahead log readers and the writer wait for each other.
func TestConformanceRollbackJournal(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	h := harness("DELETE")
	// An exclusive transaction would keep the suite from reading as well.
	h.Isolations = []string{"immediate", "deferred"}
	h.Interleavings = 30
	h.Only = []string{"admit", "old-snapshot", "in-flight", "paused-writer", "late-writer", "savepoint", "epoch-zero", "imports", "gapless", "interleavings", "relay-pause"}
	guardtest.Run(guardtest.Wrap(t), h)
}

func TestMutants(t *testing.T) {
	literals := guardtest.Literals{True: "1", False: "0"}
	for _, m := range guardtest.Mutants(literals, "immediate") {
		m.Check(t, harness("WAL"))
	}
	// In a transaction that was begun as immediate the lock is there already; in a
	// deferred one the fence would be looked at with no lock.
	guardtest.Mutant{Name: "no lock", Only: []string{"paused-writer", "late-writer", "savepoint", "in-flight"}}.Check(t, func() guardtest.Harness {
		h := harness("WAL", sqlite.WithLockSQL("SELECT 1"))
		h.Isolations = []string{"deferred"}
		return h
	}())
}
