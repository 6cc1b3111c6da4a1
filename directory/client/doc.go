// SPDX-License-Identifier: Apache-2.0

// Package client calls a directory: [Client] for operators, [Edge] for edges.
// Routes are not here: an edge and a cell read them with package table/remote.
//
// # Errors
//
// A refusal of the directory is a [*cells.Answer]; nothing was changed. An error
// that wraps [cells.ErrUnavailable] and is no [UnknownOutcomeError] means that
// the directory was never reached, or that a call which changes nothing failed.
// An [UnknownOutcomeError] means that a change was sent and that its answer is
// missing, or came from something that is not the directory: the change may have
// been made. A caller that gave an operation id may send the same request again
// and is told what the first one did; the client itself never repeats a change.
//
// # Credentials
//
// The operator credential is sent over https only, or over http to a loopback
// address; anything else is refused before a connection is made. Redirects are not
// followed, and the environment's proxy is not used.
package client
