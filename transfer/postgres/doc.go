// SPDX-License-Identifier: Apache-2.0

// Package postgres moves tenants between Postgres databases: a [Store] is one
// cell's database as the source and as the target of package transfer. It needs
// Postgres 15 or later.
//
// The database itself is authoritative for everything: captures, and how far an
// import is, are tables (transfer_*) in the guard's schema, and change in the same
// transactions as the rows.
//
// # Capture
//
// Begin makes a publication of the listed tables, with a row filter on the tenant,
// and a logical slot with pgoutput. Both are named by a hash of the database and
// the move. The slot keeps the server's log from being removed until the target
// has applied it; its position moves only with what the target says is durable. The
// row that names the capture comes before the slot, so that a sweep finds whatever a
// crash leaves. A slot that the server has dropped or invalidated is made anew once,
// with another first position; the second time the move is given up.
//
// Check tells how much log the server keeps for the slot. Sweep ends captures for which
// it is more than the move's limit.
//
// # Groups
//
// Moves of a group ([transfer.GroupID]) between the same two cells share one slot and one
// publication, whose row filters list their tenants. Their rows in transfer_capture name
// the row of transfer_group; both are there before the slot is. The last member that is
// released takes slot, publication and row along; Sweep does it for who was killed.
//
// A move joins at any time. First its row is written, so that nothing is forgotten that it
// may need; then the filters are altered; then a slot is made, and its consistent point is
// where the member begins: whatever was open when the filters changed has ended before. The
// snapshot of that point is exported for the first views of all that join at the same time.
// The slot is the group's own for the first members and a temporary one for later ones.
//
// A hub reads the group's slot, decodes once and hands out by tenant; there is one in one
// process. It keeps for each member what it has not read, within bounds: who comes late or
// goes back is read for anew, from what the slot still has. That is everything behind the
// least position that any member has applied, which is what the server is told. What members
// have applied is kept in their rows for the next hub, in this process or another.
//
// A member that holds up the others (it does not read, or too slowly) is detached: the
// group's slot is copied for it, and it reads that alone, through the group's publication.
// So does a member that is asked of a process while another one reads, if the one that
// reads cannot be asked ([transfer.ErrElsewhere], [transfer.ContextAlone]). A group that is
// full, whose slot is gone, or whose tenants cannot be told apart by text is not joined: the
// move is captured alone.
//
//	reader killed     -> the slot is free: the next process that is asked opens a hub
//	member lost       -> its own row: rolled back, undone or swept, the others go on
//	slot lost         -> each member begins anew, once, with a slot of its own
//	killed in joining -> a row without a position holds the slot until its move goes on or ends
//
// # Views and positions
//
// A position is an LSN. A view is made by a temporary logical slot: the server
// exports the snapshot that belongs to the slot's consistent point C. Decoding from
// C yields exactly the transactions whose commit record begins at or after C; the
// snapshot shows exactly those before. So the changes "up to the view" are the
// transactions with a commit record before C, and the stream is cut there, not
// where a clock or a guess says.
//
// The end of a stretch is found by a message in the log (pg_logical_emit_message),
// written behind the view, in a transaction of its own: its commit flushes the log,
// which wakes the server's sender. Nothing waits for a timer. The mark of the cut is
// found in the same way: the message is written when the fence is closed and the
// tenant's events are paused, so nothing of the tenant commits behind it.
//
// Making a slot waits for the transactions that are open and have written, in the
// whole server. A preflight names those that have been open for long.
//
// # Import
//
// Rows of a copy travel as COPY writes them, in binary if all columns have types that are
// the same in every database, else in text, and are read by COPY: first
// directly, and if a row is there already, through a temporary table and INSERT ...
// ON CONFLICT. Changes are gathered, many transactions in one: what each key is at
// the end is written by a few statements for each table, upserts in the order of
// references, then deletes in the reverse order. If a unique or a foreign key does not
// allow that order, the same changes are applied one after the other in the
// source's order, which it does allow. Deferrable constraints are deferred.
//
// A transaction that is too large to gather is applied in parts inside one
// transaction of the target.
//
// session_replication_role is left alone, except where it must not be: if foreign
// keys form a circle, or the service has triggers that would run on imported rows.
// Then the agent's role needs the right to set it, and a preflight says so. The
// guard's own triggers run always.
//
// All other values are text. The store's connections set what text depends on (dates,
// time zone, float digits, bytea), so that both sides read and hash the same.
//
// Processes take turns by an advisory lock of the connection that writes: who loses
// the lock has lost the connection. A generation number in the import's row refuses
// one that has been overtaken all the same. Whoever asks for the changes gets the
// slot: a reader in the same process is ended, one in another process terminated.
//
// # Failures
//
// A lost connection, a deadlock, a server that shuts down are [cells.ErrUnavailable];
// the step is tried again. A value that must be unique and belongs to another
// tenant at the target is [cells.ErrInvalid]: the move cannot succeed. A table that
// is altered, made anew, truncated or rewritten (VACUUM FULL, CLUSTER) during a move
// ends it with [transfer.ErrSchemaChanged]: the catalog's description of each table, its
// file node included, is recorded at the beginning on both sides and compared. A rewrite
// and TRUNCATE empty a table in the eyes of older snapshots, which a comparison of keys
// that changed would not show. Indexes may come and go.
package postgres
