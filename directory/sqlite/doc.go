// SPDX-License-Identifier: Apache-2.0

// Package sqlite keeps a directory's records in one SQLite file. What it reads and
// writes there is the SQL of package directory/sqlstore; this package opens the file
// and migrates it.
//
// The file is opened in WAL mode with synchronous=FULL: a change that was answered
// survives a crash of the machine. Writes go through one connection, each in
// an immediate transaction, so several processes on the file exclude each other
// and none deadlocks; reads use a small pool beside it. A write that cannot
// get the file within five seconds, a full disk and an I/O error are reported as
// [cells.ErrUnavailable]; what such a call changed is unknown to its caller.
//
// The schema is migrated on Open, forward only. A file that a newer build has
// migrated is used if its meta table says that this build may (needs_schema), else
// refused with [cells.ErrInvalid] and left alone, and so is one that is not a
// database. A migration of this package has its twin in
// directory/postgres, with the same number, tables and columns.
package sqlite
