// SPDX-License-Identifier: Apache-2.0

// Package edge is the router in front of the cells: it finds the tenant of each
// request, forwards it to the cell that holds the tenant, and holds it while the
// tenant is between two cells.
//
// # Who is authoritative
//
// The routing table is, for which cell holds a tenant; the edge has a view of it
// (a [cells.Router]). The cell's gate has the last word on every request: it
// admits, or refuses before anything has run. The edge is never part of what makes
// a move safe; an edge with a view of any age can only cause detours. The directory
// is authoritative for which processes a cell has (package topology). When either
// cannot be read, the last known one stays in use, also after a cold start, from a
// signed file each.
//
// # A request
//
//	own path --> answered here; everything else under /cells/ is NOT_SERVED
//	   |
//	tenant (package extract) --none--> BAD_REQUEST, INVALID_TENANT, UNKNOWN_HOST, UNKNOWN_ISSUER
//	   |
//	route: none --> the table is asked once --> UNKNOWN_TENANT
//	   |   QUIESCING..COMMITTING --> held until the view has a newer route
//	   |   ACTIVE, or the default cell
//	a process of the cell --connection refused--> another one, else held for ConnectWait --> CELL_UNREACHABLE
//	   |                  --broken after a byte was sent--> CELL_UNREACHABLE, never sent again
//	gate: MOVING, STALE_ROUTE, WRONG_CELL, BACKEND_UNAVAILABLE: nothing ran
//	   |      --> the table is asked, and the request sent again, or held
//	answer, as the service gave it
//
// A held request waits at most Hold.Time, all its waits together; then it gets
// MOVING (or what its gate said last) with Retry-After. When the room is full it
// gets OVERLOADED at once (package hold).
//
// A request is sent a second time only if the first one was refused by a gate or
// never left: then nothing of it has run. For that its body is recorded, up to
// ReplayBytes; a longer one asks the gate before it is sent. Should a gate refuse
// what can no longer be sent again, its refusal is passed on: it says that nothing
// has run. Nothing else is ever repeated, idempotent or not.
//
// Asking first has one effect that a service can see: over HTTP/1.1, a handler that
// begins its answer before it has read anything of a body of unknown length gets no
// body, as the answer came instead of 100 Continue. Handlers that talk both ways at
// once read first, or are reached by HTTP/2 (HTTP2ToCells, gRPC).
//
// # Whole deployments as cells
//
// Made by [NewDeployment] a server is the router in front of deployments that know of no
// routes and no gates. The rules of package rules take the place of the tenant and the
// route; package celltable is the view of the directory.
//
//	/cells/, /livez, /readyz --> answered here, on every host; what nobody serves is NOT_SERVED
//	   |
//	table --not read yet--> BACKEND_UNAVAILABLE
//	   |
//	rules --> UNKNOWN_HOST, UNKNOWN_ISSUER, BAD_REQUEST; BACKEND_UNAVAILABLE for a cell without an address
//	   |
//	the deployment --connection refused for ConnectWait--> CELL_UNREACHABLE
//	   |           --broken after a byte was sent--> CELL_UNREACHABLE, never sent again
//	answer, as the deployment gave it, its own refusals included
//
// Everything else of this page holds: one request is sent once, the headers are changed
// in the same way, but that no Cell-Tenant, -Epoch and -Admission are set. A
// revocation's form is read before it is known where it goes (64 KiB, within
// ReadHeaderTimeout); every other body streams.
//
// # What clients saw of a move
//
// A [Witness] notes which requests were refused because of a move, and from when to
// when, and reports it to the directory over the channel: that is what the tenant's
// budget is charged with. While the directory is away reports wait; what a killed
// process had not reported is lost, and the driver's own pause is charged if no other
// edge has reported.
//
// # The fast path
//
// With Config.FastPath the public listeners without TLS give their connections to
// package fastpath first. It forwards what is common and unambiguous with the same
// decisions, headers and counts, and hands every other connection to net/http with the
// bytes that it has read: what it cannot read in one way alone, what has to wait, what a
// gate has refused. Its records in the log lack the client's address.
//
// # What is changed on the way
//
// The method, the raw path and query, the Host, the body and its trailers go as the
// client sent them. Headers of the connection (and those that Connection names)
// are dropped, X-Forwarded-For, -Host and -Proto replaced by the edge's own view
// (that of TrustedProxies, if one of them sent the request; never of X-Forwarded-Host),
// Cell-* dropped in every spelling, and Cell-Tenant, Cell-Epoch and Cell-Admission
// set. Every header line of the answer is kept but Cell-Admission.
//
// Paths under /cells/ (percent-encoded once or more, with other slashes, dots, path
// parameters or letter case, and also behind a stripped tenant prefix) belong to
// the platform and are never forwarded.
//
// # Listeners and their exposure
//
//   - Public (Addr, TLSAddr): meant for everyone. HTTP/1.1, HTTP/2 with or without
//     TLS, and WebSockets over HTTP/1.1; other upgrades are taken for requests that do
//     not ask for one, as what they carry could not be checked. It serves /livez and /readyz
//     (a word, no details) besides the tenants. It authenticates nobody.
//   - Admin (AdminAddr): for the operator's machines only. /livez, /readyz with
//     details, /metrics, and GET /cells/v1/explain. No authentication: it binds
//     127.0.0.1 unless told otherwise, and must not be reachable by clients, as it
//     tells which tenants exist and where.
//
// # The end
//
// When its context ends the server reports itself unready, stops accepting, ends
// server-sent events and upgraded connections after StreamGrace (the former with a
// whole chunk, so that clients reconnect elsewhere with their Last-Event-ID) and
// waits for the rest for DrainTimeout. gRPC streams that are left then get
// UNAVAILABLE; other requests are cut.
package edge
