// SPDX-License-Identifier: Apache-2.0

// Package webhook publishes events by HTTP POST, one request for each event, in
// the form of the Standard Webhooks specification with the sequence added.
//
// The outbox is authoritative for what is still to be sent; a receiver is for
// what it has processed. An event is accepted when the receiver answers 2xx
// within the timeout, and the next one is sent only then. Anything else (another
// status, a redirect, no answer) is a failure: the relay sends the same event
// again later, with the same id and sequence. A receiver therefore drops what it
// has seen by Webhook-Id, or everything of a tenant whose Webhook-Sequence is not
// above the last one. It also protects it from a sender that was stopped in the
// middle of a request and goes on after the tenant has moved.
package webhook
