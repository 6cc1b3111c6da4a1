// SPDX-License-Identifier: Apache-2.0

// Package load drives a fleet as its clients do, through the edge, and keeps the
// books: which writes were acknowledged, what each request took, which events
// arrived. It talks to the memory service of the services module over HTTP and
// knows nothing of cells; what it finds missing in the end is missing.
//
// The books are authoritative only for what was acknowledged: a request whose
// answer never came may or may not have run, and is counted apart.
package load
