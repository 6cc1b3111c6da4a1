// SPDX-License-Identifier: Apache-2.0

// Package httpapi serves a router's own paths: lookups, the placement API, a cell's
// state read and the operator API of the directory of deployments. [Handler] is mounted
// by every router replica below /cells/; they share the store and nothing else.
//
// # Who may do what
//
// Lookups want no credential: which cell a tenant is in is public, as a host name is.
// A cell's credential (lcr_) names one cell, by the hash that the directory records for
// it, and may place tenants for that cell and read its state. The operator credential
// (lco_) is in the router's configuration by its SHA-256 and never in the directory; it
// may change everything. Both are compared as hashes. Refusals of the operator API are
// not rate-limited: 512 bits are not guessed, and a limit would let a stranger lock
// operators out.
//
// # What is cached
//
// The cells, with the hashes of their credentials, for Cache: a credential that is
// recorded is accepted everywhere within that time, one that is dropped is refused
// within it. A placement that is new is judged on the cell's locked row, credential
// included, never on the cache. Lookups cache tenants that are placed, so that they are
// answered while the directory is down; a tenant that is placed nowhere is asked for
// each time. In a pinned directory a placement is cached for ever, in a movable one for
// Cache.
//
// # Failures
//
// The directory cannot be read: placements, state reads, lookups of tenants that are
// not cached, and every operator call answer BACKEND_UNAVAILABLE; lookups of cached
// tenants go on. A change that was answered so may have been made; its answer says so,
// and repeating it is safe. Nothing waits longer than Timeout.
// A cell past its pace gets OVERLOADED (503) with Retry-After of at most a minute, its
// operators are not counted; a client past that of lookups RATE_LIMITED (429).
package httpapi
