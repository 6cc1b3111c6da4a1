// SPDX-License-Identifier: Apache-2.0

// Package transfer moves one tenant's rows from one cell's database to another's
// while they are written to.
//
// The target's agent pulls: a [Mover] at the target reads from a [Source], which
// is the source's database in process or, over the channel, the agent of any
// process of the source cell ([Handler], [NewRemoteSource]). Rows never pass the
// control plane. Packages sqlite and postgres are the stores; transfertest is the
// suite that they pass.
//
// # Who is authoritative
//
// The route decides who owns the tenant, and this package never sees it. What it
// has are fences: every transaction that imports or removes rows checks, under
// lock and in itself, that the fence of its own database is closed at exactly the
// epoch of the move's step, by the move. A driver or an agent that slept cannot
// write once the fence has passed. How far an import is stands in the target's
// database and changes in the same transaction as the rows, so there is nothing
// else to be consistent with.
//
// # Steps
//
//	source                         target
//	                               Import   claim the fence closed at Base+1; are the rows ours?
//	Begin    capture changes
//	View     at a position P  -->  copy what P shows, in key order, table by table
//	                               compare all rows with those of P
//	Changes  after P          -->  apply as they come; compare the keys that changed, if many
//	  (Prepare returns; the changes go on being applied; the cut begins; the fence closes)
//	Final    at the mark M    -->  apply up to M, compare the keys that changed since the last time
//	                               record M: nothing is imported after it
//	Release
//
// # The way back
//
// A move with Keep can be undone for a while. Its target begins to capture the
// tenant's changes in Prepare; the transaction that finishes the import fixes the
// first position of that way back. After the commit the source, whose fence stays
// closed at Base+1 by the move, applies them round by round ([Agent] Return), under
// the guard of every import. An undo is a move whose Prepare adopts both ends: the
// import at its target and the capture at its source get its id, each in one
// transaction, so that only what changed since the last round travels. All rows are
// compared once more before its cut, if they are not too many.
//
// [cells.ErrReturnLost] says that changes were missed: the capture is gone, a schema
// has changed, too much was kept. Rounds end then; an undo that has begun copies.
// Sweep leaves a way back alone until the owner's fence has passed it; Free ends it.
//
// # Why the copy is exact
//
// A [State] claims one thing: the rows of the tables that are begun are those of
// the source at exactly the position Applied: all rows of a finished table; of
// the table that is being copied, all rows up to the key After, and of the rows
// behind it a subset (those that changes have touched). Every step keeps it:
//
//   - Copying reads a [View], which shows exactly what was committed up to its
//     position, and happens only while Applied is that position. Rows are inserted
//     over what is there, so the subset behind After does not matter.
//   - Changes are applied from Applied on, in commit order, whole transactions at a
//     time; the position moves in the same transaction. Changes of tables that are
//     not begun are left out. A change of a row behind After that is not there adds
//     the row as it is at the new position, or nothing.
//   - When a view is lost (its process was killed, its age is bounded), a new one is
//     opened at a later position, the import is brought to exactly that position by
//     [View.Changes], and copying goes on behind After.
//
// So the target is at every commit a state that the source has had (restricted to
// what is begun). Unique values never collide inside the tenant, and foreign keys
// hold, because tables are copied in the order of their references. Nothing has
// to be repaired later, and the two sides can be compared at any view, exactly.
//
// A change may lack a value: Postgres does not log a large value that an update
// left alone. If the row is at the target it has the value. If it is not (it came
// from beyond the row filter, or moved from a key behind After to one before it), the
// key is noted, and the row is fetched from the next view, at its position.
//
// # Groups
//
// Moves that are prepared with a group in their context ([ContextWithGroup]) may be
// captured together, where a store has something to share. Nothing else of a move changes:
// it has its own import, fence, mark and comparison, and ends when it ends.
//
// # Comparing
//
// All rows are compared once, after the copy, at the copy's view. From then on the
// target notes the key of each change in the transaction that applies it. While there
// are many, both sides are asked between two transactions, and keys whose rows are equal
// are settled: the view is behind what is applied, so a key that changed in between
// either differs or is noted again when that change comes. What is not settled is
// compared in the cut, at one position, so that the pause does not grow with the tenant.
// Digests are computed by the databases, over every column, and do not depend on order.
//
// # What happens when
//
//   - A process of the source is killed: its views are lost, its streams are cut off.
//     The step is begun again, with the next process, after a short while; ten
//     failures in a row without getting further end it.
//   - The target's agent, or the driver, is killed at any point: the next Prepare,
//     Finish or Discard goes on from what the database says.
//   - Two drivers: the second waits for the first, then finds little to do. A run that
//     a prepared move has left behind, waiting for its Finish, gives way at once.
//   - The capture is lost (a slot was dropped): Begin gives another first position,
//     the target removes what it has brought, and starts over.
//   - A listed table of either side is altered, made anew, truncated or rewritten:
//     [ErrSchemaChanged], found by the [Shape] that was recorded when the capture and
//     the import were begun, at each view, at the end of Prepare and in Finish. The
//     driver rolls back.
//   - The source keeps more changes for the move than its [Limits] allow: [ErrRetention],
//     found by whoever prepares the move, every few seconds, and by the source itself
//     in Sweep, which ends the capture though nobody drives the move any more.
//   - The capture was lost twice, or is lost when the cut needs it: [ErrRetention],
//     [cells.ErrNotApplicable]. The driver rolls back.
//   - Standbys are further behind than the limits allow: copying waits. What it waits
//     for, and the transactions that a view waits for, are in the progress
//     ([cells.Progress], Waiting).
//   - The two sides differ: [ErrMismatch], with the table and the counts. Nothing is
//     committed; the driver rolls back.
//   - The move was rolled back: the target's rows are removed by Discard; the source's
//     capture is ended by Sweep, which [Mover.Run] calls every minute, once the
//     source's fence is open at the move's OpenEpoch.
//   - The fence has passed: [cells.ErrStaleOrder], and nothing is written.
//
// # Exposure
//
// Handler hands out a tenant's rows to whoever its authorize function lets in. It
// is meant for the channel's listener only, where the peer is known.
package transfer
