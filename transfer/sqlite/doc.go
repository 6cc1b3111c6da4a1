// SPDX-License-Identifier: Apache-2.0

// Package sqlite moves tenants between SQLite databases: a [Store] is one cell's
// database as the source and as the target of package transfer.
//
// The database itself is authoritative for everything: captures, the change log,
// and how far an import is are tables (cell_transfer_*) beside the service's own,
// and they change in the same transactions as the rows.
//
// # Capture
//
// A change log is written by triggers on the tenant tables. They exist while a
// move out of this cell is under way, and only note rows of tenants that are being
// moved. Permanent triggers were the other choice: they would cost every write of
// every tenant a lookup for ever, and would go stale with each migration of the
// service, whereas those are made from the tables' shape when a move begins. Making
// them is one short write transaction; other connections prepare their statements
// again by themselves.
//
// The log notes the table and the key of a row that has changed, in the storage
// classes of the key's own columns, and not how. Rows are read when the
// changes are asked for, in the same read transaction as the number of the log's
// last entry. What is handed over is therefore not a history but a difference: it
// takes a copy that equals the source at one number to one that equals it at
// another. A row that changed a hundred times travels once, and nothing is copied
// into the log that the table already has. Since SQLite has one writer at a time,
// the numbers of the log are in commit order.
//
// A difference can be applied in pieces and again: each key is set to what it is
// at the end, or removed. A row that stands in the way of a unique value has given
// that value up in the same difference; rows that stand in each other's way are put
// aside until the rest is applied. Nothing is ever replaced but by its key, since a
// row with the same unique value may be another tenant's. The position is only
// moved with the last piece.
//
// There is one log, and its entries name the tenant: each move reads its own tenant's by
// an index, and what the log holds goes as soon as nobody needs it. Moves of a group
// ([transfer.GroupID]) therefore have nothing more to share, and a group does nothing.
//
// # Views
//
// A view is a read transaction of WAL mode. It never blocks a writer, and keeps
// the WAL from being reset while it lives, so the agent bounds its age.
//
// # Import
//
// Imports write with foreign keys off, on connections of the store's own: the
// tables reach a consistent state together, and no action of a foreign key runs.
// Transactions are small (at most a thousand rows of a copy), and a pause follows
// each, because SQLite's waiting writers would lose against a steady one. Processes
// take turns by a lock on a file beside the database (name.import-*), which ends
// with its holder; a generation number in the import's row refuses one that has
// been overtaken all the same.
//
// # Failures
//
// A listed table that is altered or made anew during a move ends it with
// [transfer.ErrSchemaChanged]: its text, its triggers (at the source those of the capture
// too) and its number in sqlite_master are recorded at the beginning on both sides and
// compared. VACUUM numbers anew, so it has to wait until no move is under way.
//
// A process that is killed leaves at most a transaction that SQLite rolls back. The
// next one finds the import's row and goes on behind the last key, at a new view,
// after applying the difference up to it. A capture whose move was rolled back is
// ended by Sweep once the fence is open at the move's OpenEpoch. A full disk or a
// busy database is [cells.ErrUnavailable]; the step is tried again.
//
// Only files can be moved, not ":memory:".
package sqlite
