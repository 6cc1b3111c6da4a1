// SPDX-License-Identifier: Apache-2.0

// Package probe lets a deployment say which deployment it is, and prove that its
// running processes use the stores that an operator means.
//
// # Two places
//
// [IDHandler] answers at [Path] on the service's own port with the deployment id
// that the process verified when it started, held in memory: whatever the request's
// Host, without a credential, without a limit, and without touching a store, so that
// no flood there can keep anybody from learning the id.
//
// A [Listener] answers at the same path on a port of its own, with everything: the
// id as the authority holds it now, the bucket and prefix, and the nonce of each
// store, read from the process's own connection to the primary for that very
// request. It is off unless CELL_PROBE_PORT is set. It binds every address of the
// host: who may reach it is for the network's policy to say, and no ingress and no
// router leads there. Nothing that it answers is secret.
//
// # Who is authoritative
//
// The stores. The listener remembers nothing between two answers; neither does the
// [Client] that reads it.
//
// # Failures
//
// The listener takes [Rate] requests a second with bursts of [Burst], in each
// process, and answers more with 429 RATE_LIMITED and Retry-After. A store that
// cannot be read, whose deployment id is not the one of the start, or that holds
// something else than a nonce makes the answer 503 BACKEND_UNAVAILABLE; there are no
// partial answers. A gate that refuses everything else leaves both places open: they
// are how a gated process is reached.
//
// The [Client] tells apart what may pass and what will not. PROBE_BUSY and
// PROBE_UNREACHABLE are waited for ([Wait]); an answer that is not a probe's, or
// another deployment's ([Want.Check]), is refused at once.
package probe
