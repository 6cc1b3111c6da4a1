// SPDX-License-Identifier: Apache-2.0

// Package e2e has the tests of whole fleets: real processes, real sockets, real
// stores, killed with SIGKILL. It has no code of its own outside of tests.
//
// The harness is authoritative for what clients were told (package load); a
// fleet's state after a test is what its directory, its edge and its cells say
// through their public interfaces.
package e2e
