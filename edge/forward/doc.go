// SPDX-License-Identifier: Apache-2.0

// Package forward carries one request to one process of a cell, and tells exactly
// what may have happened when that fails. It knows no routes and holds nothing
// back; package edge decides where a request goes and whether it goes again.
//
//   - [Body] lets a request be sent a second time: it records what an attempt reads,
//     up to a limit, and never lets two attempts read at once.
//   - [Pools] keeps connections to the processes of each cell: HTTP/1.1 with
//     keep-alive, and HTTP/2 (prior knowledge, or TLS) for gRPC. [Pools.Send] fails
//     with a [*NotSentError] exactly when no byte of the request can have reached a
//     process; net/http's own repeats of requests that may have run are disabled.
//   - [CleanRequest] drops what a client may not say (Cell-*, X-Forwarded-*), and
//     [Reserved] finds paths under /cells/ in every spelling that a server could
//     take for one.
//
// Failures: a refused connection is a NotSentError and the next process is tried; a
// connection that breaks after a byte was written is an error that is never
// repeated here, as the request may be running.
package forward
