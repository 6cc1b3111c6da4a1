// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"slices"
)

// section is a part of the suite; perIsolation ones run once for each isolation.
type section struct {
	name         string
	perIsolation func(e *env, isolation string)
	once         func(e *env)
}

var sections = []section{
	{name: "orders", once: testOrders},
	{name: "orders-model", once: testOrdersModel},
	{name: "orders-concurrent", once: testOrdersConcurrent},
	{name: "list", once: testList},
	{name: "admit", perIsolation: testAdmit},
	{name: "old-snapshot", perIsolation: testOldSnapshot},
	{name: "in-flight", perIsolation: testInFlight},
	{name: "paused-writer", perIsolation: testPausedWriter},
	{name: "late-writer", perIsolation: testLateWriter},
	{name: "savepoint", perIsolation: testSavepoint},
	{name: "pooled", perIsolation: testPooled},
	{name: "busy", perIsolation: testBusy},
	{name: "cancelled", once: testCancelled},
	{name: "epoch-zero", perIsolation: testEpochZero},
	{name: "protected", perIsolation: testProtected},
	{name: "imports", perIsolation: testImports},
	{name: "in-tx", once: testInTx},
	{name: "gapless", perIsolation: testGapless},
	{name: "interleavings", once: testInterleavings},
	{name: "events", once: testEvents},
	{name: "wait", once: testWait},
	{name: "relay-order", once: testRelayOrder},
	{name: "relay-pause", once: testRelayPause},
	{name: "relay-stuck", once: testRelayStuck},
	{name: "relay-two", once: testRelayTwo},
	{name: "relay-random", once: testRelayRandom},
	{name: "relay-crash", once: testRelayCrash},
	{name: "barrier-orders", once: testBarrierOrders},
	{name: "moved-events", once: testMovedEvents},
	{name: "prune", once: testPrune},
}

// Sections lists the names that [Harness.Only] takes.
func Sections() []string {
	var out []string
	for _, s := range sections {
		out = append(out, s.name)
	}
	return out
}

// Run runs the suite.
func Run(t T, h Harness) {
	for _, only := range h.Only {
		if !slices.Contains(Sections(), only) {
			t.Fatalf("there is no section %q", only)
		}
	}
	for _, s := range sections {
		if len(h.Only) > 0 && !slices.Contains(h.Only, s.name) {
			continue
		}
		t.Run(s.name, func(t T) {
			if s.once != nil {
				with(t, &h, s.once)
				return
			}
			with(t, &h, func(e *env) {
				for _, iso := range h.Isolations {
					e.Run(iso, func(t T) {
						sub := *e
						sub.T = t
						s.perIsolation(&sub, iso)
					})
				}
			})
		})
	}
}

const cannotOpen = "cannot open a "

// with runs f on a new database.
func with(t T, h *Harness, f func(*env)) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	db, err := h.Open(ctx)
	if err != nil {
		t.Fatalf(cannotOpen+"database: %v", err)
	}
	defer db.Close()
	e := &env{T: t, h: h, db: db, ctx: ctx}
	for _, p := range []*Process{&e.a, &e.b} {
		if *p, err = db.Process(ctx); err != nil {
			t.Fatalf(cannotOpen+"guard: %v", err)
		}
		defer func() { (*p).Close() }()
	}
	f(e)
}
