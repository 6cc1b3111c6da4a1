// SPDX-License-Identifier: Apache-2.0

// Package postgres is the guard on Postgres (14 or newer): fences, the write
// guard and the outbox, for services that use pgx ([New]) or database/sql
// ([NewSQL]).
//
// The rows in the guard's schema ("cell" by default) are authoritative, for all
// processes of the cell:
//
//	cell.fence             one row a tenant: open from floor to epoch, or closed at epoch by a move
//	cell.outbox_head       the last event_seq given out
//	cell.outbox            the events; travels with the tenant
//	cell.outbox_published  how far they were published; travels with the tenant
//	cell.outbox_barrier    the relay's last order; stays
//
// # Locks
//
// An admission takes a shared advisory lock of the transaction on the tenant's
// key and then reads the fence; an order takes the exclusive one. The queue for
// that lock is fair, so writers cannot starve a close. Above READ COMMITTED the
// transaction's snapshot may be older than the lock: there the row is read FOR
// SHARE too, which fails if it has changed since (the transaction is run again).
// docs/decisions/0002-fence-locking.md has the alternatives and the numbers.
//
// The turn of a relay is an advisory lock of a transaction that stays open while
// the publisher is called. It holds no snapshot and no row, and ends with its
// connection.
//
// # The write guard
//
// [Guard.Install] puts triggers on the service's tables, enabled always (so also
// for replication's apply workers): a row may be inserted, changed or deleted only
// by a transaction that is admitted for the tenant of the old and of the new row.
// All others get SQLSTATE LT001, TRUNCATE always does. What admits is a setting
// of the transaction that contains its id, so that it means nothing in another
// one. It stops writers that do not know of cells, not one that means harm: a
// role that may write the tables can also set the setting or drop the trigger.
//
// Other languages, psql and migrations call the functions:
//
//	BEGIN;
//	SELECT cell.admit('acme', 7);          -- as the request says; or
//	SELECT cell.admit_current('acme');     -- at whatever the fence is open at
//	UPDATE accounts SET ... WHERE tenant = 'acme';
//	SELECT cell.emit('account.changed', '{"id": 1}');
//	COMMIT;
//
// # Caveats
//
//   - Transactions that emit for one tenant commit one after the other. At
//     REPEATABLE READ and SERIALIZABLE those that overlap fail with 40001 and are
//     run again: use READ COMMITTED for them, and emit last.
//   - The advisory locks count against max_locks_per_transaction, one or two for
//     each open transaction.
//   - A partition that is created later has the row triggers from the start, the
//     one against TRUNCATE from the next Install on.
//   - Behind a pooler in transaction mode everything works but LISTEN: give the
//     guard a direct connection string, or streams poll.
//   - A server that fails over to a standby forgets the locks, and with them ended
//     the transactions that held them. A standby that is not synchronous may have
//     lost an order: raise the fences from the routing table after a failover.
package postgres
