// SPDX-License-Identifier: Apache-2.0

// Package census is a test helper that fails a service which has a route, a request
// field or a command that nobody has sorted: into those that the tenancy check looks
// at, and those that act for no tenant, with the reason. The service itself is
// authoritative for what it has (its mux's patterns, its request types, its
// commands); the table in the test says what each is. A new one fails the test until
// somebody has decided, and so does an entry of the table that is not there any more.
//
// There are no states and nothing is kept between runs.
package census
