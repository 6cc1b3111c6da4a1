// SPDX-License-Identifier: Apache-2.0

// Package api holds the nouns and the paths of the control plane's two HTTP
// interfaces, shared by the directory, its stores and its clients.
//
// The routes themselves are [cells.TenantRoute] and stay in the routing table,
// which is authoritative for who owns a tenant. What is here describes the rest:
// which cells exist, which processes live, what moves did, and who asked for it.
// Nothing in this package decides anything; it imports package cells only.
//
// Durations travel as integers in nanoseconds, times as RFC 3339. Fields marked
// read-only are ignored (set to zero by the directory) in requests.
package api
