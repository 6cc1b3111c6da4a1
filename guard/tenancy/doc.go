// SPDX-License-Identifier: Apache-2.0

// Package tenancy has the nouns and the rules of the rows that a deployment keeps
// about itself when the whole of it is one cell: whether it is the first cell, how
// strictly it keeps to its tenants, which configuration its processes may have, and
// which tenants it holds. There is no I/O here; postgres/tenancy of package guard
// keeps the rows, and member/tenancy is what a running process makes of them.
//
// # Who is authoritative
//
// The directory says which cell a tenant is placed in, once and for ever where the
// directory is pinned. The rows are the cell's own copy of what concerns it, in its
// own database, so that serving a tenant that it holds never depends on the
// directory. What the directory does not know yet (the tenants of a cell that is
// still recording) only the rows know.
//
// # The rows
//
//   - first: whether this is the first cell, and the cell's name; never changed.
//   - mode: "recording" or "enforced".
//   - self: the accepted fingerprint of the processes' configuration, and during a
//     change a second one.
//   - tenancy: one row for each tenant that the cell holds.
//   - heartbeats: what each live process runs with.
//
// # The states
//
// Read together, in one statement, the rows are one of four states ([Rows.State]):
//
//	Open       no first, mode or self row, and no tenancy row: a deployment that is
//	           no cell
//	Recording  (true, cell), recording, self: the first cell before it is attached
//	Enforced   first, mode and self, otherwise; a later cell's mode is enforced
//	           whatever its row says
//	Partial    anything else: some row of the state is there and not all are
//
//	Open --prepare--> Recording --attach--> Enforced --refused wait--> Recording
//	Open --prepare of a later cell--> Enforced
//	any --rows lost--> Partial --prepare again, restore--> what it was
//
// Open lets everybody through, which is right for a deployment that was never
// prepared, and is all that can be told of a database that was restored from before
// that. Recording serves every tenant and writes each new one down. Enforced serves
// the tenants that have a row. In Partial nothing is served and the store refuses as
// in Enforced.
//
// # What a process does with them
//
// [Gate] is the rule. A process that is told its cell (CELL) serves only in
// Recording and Enforced, with the cell's name in the first row and a configuration
// that matches one of the two fingerprints. A process that is not told serves only
// in Open and Recording, so one that lost the setting serves nothing where it would
// check nothing.
//
// # When something fails
//
// An unread row is no absent row: whoever has not read the rows does not call Gate
// with empty ones. A fingerprint that cannot be decoded is an error of the read, and
// the process keeps what it had for as long as it may.
package tenancy
