// SPDX-License-Identifier: Apache-2.0

// Package postgres is the guard on Postgres (13 or newer): fences, the write
// guard and the outbox, for services that use pgx ([New]) or database/sql
// ([NewSQL]).
package postgres
