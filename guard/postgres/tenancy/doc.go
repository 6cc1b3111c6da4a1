// SPDX-License-Identifier: Apache-2.0

// Package tenancy keeps a cell's own rows in its Postgres, and the triggers that
// refuse rows of tenants that the cell does not hold to writers that do not know of
// the tenancy check. The rules are in guard/tenancy; [Store] is its Store.
//
// # Who is authoritative
//
// The rows, in the guard's schema ("cell" by default): own_first, own_mode,
// own_self, tenancy, heartbeats. They are read on the store's own connections, a few
// beside the service's pool, so that a pool that is full of requests delays no read
// of them.
//
// # The first row
//
// own_first is written once, in the transaction that writes own_mode. A row trigger
// refuses its update and delete and a statement trigger its truncate; both are
// enabled always, so session_replication_role changes nothing.
//
// # The tenant triggers
//
// On each ordinary table with a tenant column, an AFTER INSERT and an AFTER UPDATE
// row trigger call one function. Their WHEN skips a session with the marker
// (<schema>.tenancy_checked = 'on', see [Mark]), and an update that leaves the tenant
// alone. The function reads the state: it lets everything pass in Open and Recording,
// and otherwise refuses (SQLSTATE LT010) a row of a tenant without a tenancy row. It
// takes no row lock, so no write waits for a change of the mode. They are origin
// triggers: a logical replication's apply and session_replication_role = replica skip
// them. They are no privilege boundary; they stop an older build, an older command
// and a script.
//
// They are independent of the fence's triggers, which ask in the same table whether
// the transaction was admitted for the tenant: a row needs both to be content.
// Neither looks at the other's setting, and their order does not matter, since each
// only refuses.
//
//	no trigger --EnsureTriggers in Enforced--> origin --ALTER TABLE--> disabled, altered
//	                                             ^------EnsureTriggers-----+
//
// A leaf of a partitioned table is an ordinary table and gets the triggers; the
// partitioned table itself is reported as unsupported, since its next partition has
// none until the next run. So is a foreign table.
//
// # The write of the mode
//
// Record reads the mode row FOR SHARE in the statement that inserts; SetMode takes
// the table in EXCLUSIVE mode, which waits for running inserts and queues later ones,
// for at most a second a try. So an insert has either committed before the mode
// changed, or finds the changed mode and writes nothing. Server-side timeouts free
// the lock within seconds when whoever holds it stalls. After any error SetMode ends
// its own session, waits until it is gone and reads the mode back; a commit that was
// cut off while it waited for a standby is on the primary alone, and is written again.
//
// # When something fails
//
//   - The database is down: errors wrap cells.ErrUnavailable; nothing is taken for
//     absent.
//   - A table cannot be locked in three tries of 100 ms, or the role does not own it:
//     EnsureTriggers goes on and its report says so; the table is unguarded until a
//     later run.
//   - Connections through a pooler that refuses startup parameters: the marker cannot
//     be sent and connecting fails; let the pooler pass it
//     (ignore_startup_parameters must not name it), or connect directly.
package tenancy
