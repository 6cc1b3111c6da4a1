// SPDX-License-Identifier: Apache-2.0

// Package tabletest is the conformance suite of [cells.RoutingTable]: what every
// table must do, whatever it is stored in.
//
//	func TestTable(t *testing.T) {
//		tabletest.Run(t, tabletest.Harness{Open: func(tb tabletest.TB) cells.RoutingTable { ... }})
//	}
//
// The store under test is authoritative; the suite only calls the interface, and
// it needs no clock and no particular speed. Each case gets a fresh table and may
// run alone. A case fails through [TB], so that a test can run the suite on a
// table that is broken on purpose and require that it fails.
package tabletest
