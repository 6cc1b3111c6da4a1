// SPDX-License-Identifier: Apache-2.0

// Package postgres moves tenants between Postgres databases. Its doc follows.
package postgres
