// SPDX-License-Identifier: Apache-2.0

// Package attach makes a whole deployment a cell of a directory of deployments, changes
// what it accepts, and writes back what a restore of its stores took.
//
// Who is authoritative: the directory for what a cell is, which values of its
// configuration count, where tenants are placed, when its attach began and which mode
// was raised or tried; the cell's own rows for the mode that its processes follow. A
// command keeps nothing of its own. It reads both and goes on from the first step that
// is not done, so one that was killed is run again.
//
//	Prepare   checks, registers the cell (attaching), writes first, mode and own row
//	Attach    of the first cell: refusals; the directory's transaction with every
//	          tenant it holds; their tenancy rows; the directory records enforced; the
//	          mode; every live process reports it, and as long as a cache and a request
//	          last; people; triggers; every transaction that could have read recording
//	          is over; what was written meanwhile is placed; serving
//	          of a later cell: refusals, among them that it holds nothing; the
//	          directory's transaction; tenancy rows; own row; people; serving
//	Update    directory, then own row, take a second configuration; finish and revert
//	          drop one of the two, in the own row first
//	Restore   fences, tenancy rows, absent state rows, the mode (only upward), own row
//	Place     the directory's placement, then the tenancy row
//
// Failures. A refusal is a [*cells.Answer] with CONFLICT that says what to do, or the
// router's own answer. Before the directory's transaction it leaves nothing behind but
// probes, and revocations that were asked for. A refusal between the mode and the end
// of the wait for the processes sets recording back; one after that leaves enforced,
// and the next run goes on from the wait. Stores or a router that cannot be reached end
// the command with [cells.ErrUnavailable]; a router's missing answer means that the
// step may have been done, and repeating it is safe.
package attach
