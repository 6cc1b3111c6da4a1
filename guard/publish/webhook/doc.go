// SPDX-License-Identifier: Apache-2.0

// Package webhook publishes events by HTTP POST, one request for each event, as
// the Standard Webhooks specification says (version 1.0.0), with the tenant and
// the sequence added.
//
// # Who is authoritative
//
// The outbox is for what is still to be sent; a receiver is for what it has
// processed. An event is accepted when the receiver answers 2xx within the
// timeout, and the next one is sent only then. Anything else (another status, a
// redirect, no answer) is a failure: the relay sends the same event again later,
// with the same id and sequence and a new timestamp. A receiver therefore drops
// what it has seen by webhook-id, or everything of a tenant whose webhook-sequence
// is not above the last one. That also protects it from a sender that was stopped
// in the middle of a request and goes on after the tenant has moved.
//
// # Signatures
//
// Each request is signed by every key of the configuration: a v1 signature
// (HMAC with SHA-256) by each secret (whsec_), a v1a one (Ed25519) by each private
// key (whsk_). To replace a key, sign with both, wait until all receivers know the
// new one, and take the old one away. [Verify] is for receivers.
//
// # States of an endpoint
//
//	open --410--> gone (until Reopen, or a new process)
//	open --Retry-After--> throttled (for all tenants) --time--> open
//
// While it is gone or throttled nothing is sent and nothing is dropped: events stay
// in the outbox.
//
// # Where requests go
//
// The address is the operator's, never a tenant's: nothing in an event chooses it,
// and redirects are not followed, so a receiver cannot send the relay elsewhere.
// Plain http is refused but to this machine. PublicOnly refuses private, loopback
// and link-local addresses when the connection is made, after the name was
// resolved, so that neither a name nor a later change of it leads inside. Where a
// service lets its customers choose addresses, set it, or run all requests through
// a filtering proxy in the Client.
package webhook
