// SPDX-License-Identifier: Apache-2.0

// Package sqlstore is the SQL of a directory's records, written once for every
// database that keeps them. Packages directory/sqlite and directory/postgres open
// the database, migrate it and say in a [Dialect] what differs; each has the schema
// in its own types, with the same tables and columns.
//
// # Changes
//
// A change is one transaction, alone among all changes of all processes: whoever
// reads in it sees every change that ended before, and nothing comes between what
// it reads and what it writes. SQLite gives that with immediate transactions,
// Postgres with one advisory lock that each change begins with ([Dialect.Begin]).
// The price is that changes commit one after the other. Reads take no lock.
//
// # Statements
//
// Placeholders are written ? or ?1, and translated; flags are integers, so that
// "active = 1" is good everywhere; a column that an upsert changes is named with
// its table; numbers that are made by the database are read with RETURNING.
//
// # Failures
//
// Errors of the driver are translated by the dialect: a constraint is
// [cells.ErrConflict], no row is [cells.ErrNotFound], a file that is no database is
// [cells.ErrInvalid], everything else is [cells.ErrUnavailable]. A change that
// ended with ErrUnavailable may have been made: its commit was perhaps under way.
package sqlstore
