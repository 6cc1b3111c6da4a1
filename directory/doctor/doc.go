// SPDX-License-Identifier: Apache-2.0

// Package doctor examines a fleet, or deployments that are cells, and names what is
// wrong and what to do about it. It is a list of checks ([Checks]); each looks at a few
// of the [Sources] and finds something, finds nothing, or was not run, with the reason.
// It changes nothing.
//
// # Who is authoritative
//
// Each source for itself: the directory for who owns a tenant, a cell's database for its
// fences and its own rows, a router for what it has seen, a file for a certificate. The
// checks compare them. What can differ for a moment while a fleet works (a move that is
// under way between two reads) is read again, and is a finding only if it stays.
//
// # States
//
//	check --every source answered--> ok | finding
//	      --a source did not-------> not run, or finding with the reason why it saw only a part
//
// A check is never ok for what it could not read. [Report.Exit] is 1 when there is a
// finding that is an error or a warning, else 2 when a check was not run, else 0.
//
// # Failures
//
//   - The directory is down: checks that need it are not run. Certificates, routers and
//     what is left in cells' databases are still examined.
//   - A cell's database is down, or nobody said where it is: the checks of its rows are
//     not run for it, and name it.
//   - A source hangs: each is given [Options.Timeout].
package doctor
