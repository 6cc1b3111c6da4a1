// SPDX-License-Identifier: Apache-2.0

// Package sqlstore is signin.Store in SQL that Postgres and SQLite both run; the
// packages postgres and sqlite beside it open it.
//
// The database is authoritative. Each write is one transaction; two that want the same
// name, email or challenge meet in a unique index or a row, and one of them wins. A
// user's row and the mark of a deleted email change together, so an email is never in
// neither. Errors of the driver end here: what it says of uniqueness is ErrTaken, and
// anything else is cells.ErrUnavailable, with which a caller refuses nobody and passes
// nobody.
package sqlstore
