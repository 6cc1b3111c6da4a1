// SPDX-License-Identifier: Apache-2.0

// Package spec holds the TLA+ model of how a tenant is placed, moved, rolled back
// and deleted: CellMove.tla, with a configuration for each aspect. README.md says
// what is modelled, how to run it and what was measured. There is no Go code
// here; the tests check that the model and package cells use the same names and,
// where TLC is at hand, that it accepts the model and refuses the weakened ones.
package spec
