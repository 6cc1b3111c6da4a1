// SPDX-License-Identifier: Apache-2.0

// Package sqlite is the guard on SQLite through database/sql: fences and the
// outbox of a cell whose service keeps its data in one SQLite file.
package sqlite
