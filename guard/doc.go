// SPDX-License-Identifier: Apache-2.0

// Package guard is the inner of the layers that keep a tenant's data to one
// writer: the fence (L3), checked inside the tenant's own database transaction,
// and the event barrier (L4), which numbers, orders and stops what a tenant's
// transactions tell the world. It has the contracts, the relay and the in-process
// publisher; the stores are in postgres and sqlite below it, and guardtest is the
// suite that they pass.
//
// # Who is authoritative
//
// The routing table decides which cell may write for a tenant, and at which
// epoch. The tenant's fence row in the cell's database is what a transaction
// obeys: it follows the table by orders (OpenFence, CloseFence), each of which is
// refused unless it is newer than the row. So orders may arrive late, twice or
// from several drivers. A row is written only after the table has decided, and a
// fence that is behind is always behind on the safe side for closing: nothing is
// opened anywhere before CloseFence has returned.
//
//	no row = open at 0 --open(e)--> open from floor to e --close(e+1)--> closed at e+1, by a move
//	                                     ^                                    |        |
//	                                     +------------- open(e+2) ------------+        +--close(higher)
//
// An admission at epoch n is good while the fence is open and floor <= n <= epoch.
// The floor is below the epoch only after moves that were given up before their
// fence step, during which the cell never stopped being the writer.
//
// # Writing
//
// A service calls InTx of its store's guard with the context of the request. The
// admission that the gate put there says the tenant and the epoch; the guard
// locks the fence, checks it, and lets fn write:
//
//	err := g.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
//		if _, err := tx.Exec(ctx, `UPDATE accounts ...`); err != nil {
//			return err
//		}
//		_, err := g.Emit(ctx, tx, "account.changed", change)
//		return err
//	})
//
// CloseFence waits until every transaction that was admitted has ended, and when
// it has returned nil no further one commits, at any isolation level, whatever
// snapshot it has. Its wait is bounded; when it fails, the fence is as it was.
//
// Rows are imported and removed in transactions of AdmitClosed, which hold the
// fence closed at exactly one epoch: an import that arrives after the tenant was
// opened is refused in its own transaction.
//
// # Events
//
// Emit writes an event into the outbox, in the writing transaction, with the
// tenant's next event_seq. The numbers have no gaps, since the counter is a row
// that is rolled back with the transaction; transactions of one tenant that emit
// therefore commit one after the other. Events stay as history for streams
// ([Outbox]) until they are pruned.
//
// A [Relay] in each process publishes them: in order, at least once, one process
// at a time for a tenant, and only while the fence is open and the tenant is not
// paused. PauseEvents persists the pause, ends the publication in flight and
// returns when there is none. The outbox and how far it was published travel with
// the tenant's rows; the pause does not. StartEvents at the new cell numbers on.
//
// # When something fails
//
//   - The process dies in a transaction: the database rolls it back and frees the
//     fence. Prepared transactions (two-phase commit) hold it until they are ended.
//   - A writer hangs in a transaction: CloseFence fails after its bound, names the
//     session on Postgres, and the move is rolled back by its driver.
//   - The connection is lost during a commit: [ErrCommitUnknown]; everything else
//     that InTx returns has written nothing ([NothingWritten]).
//   - The process dies while publishing: another one, or the next one, publishes
//     the same events again; consumers drop them by id or number.
//   - A process is stopped while publishing and goes on later: it keeps the turn,
//     so nobody else publishes, PauseEvents fails after its bound and the move is
//     rolled back, until the process is ended.
//   - A database that was restored from a backup may have an open fence of an old
//     epoch: its fences have to be raised from the routing table before anything
//     writes there; members do that when they start.
package guard
