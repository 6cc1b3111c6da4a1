// SPDX-License-Identifier: Apache-2.0

// Package nats publishes events to a NATS JetStream stream, each exactly once and
// in the order of its tenant.
//
// # Who is authoritative
//
// The outbox, for what there is to publish; the stream, for what it holds. Each
// tenant has one subject, <prefix>.<tenant>. The last message of a subject says how
// far the stream has the tenant, whoever put it there: the publisher reads it (or
// remembers what it has put there itself) and gives its sequence as
// Nats-Expected-Last-Subject-Sequence. So a message is stored only behind the one
// that it follows, and two relays, or one that was stopped in the middle and goes
// on after the tenant has moved, cannot store anything twice or out of order: what
// comes late is refused. Where the stream allows it (allow_atomic, which the
// publisher sets on streams that it makes) a batch is stored at once or not at all. In
// a cluster the stream should not allow direct reads, which replicas answer that may
// be behind.
//
// Nats-Msg-Id is the event's id, which moves with the outbox: the stream drops
// repetitions in its duplicate window as well. It is not made of tenant and
// event_seq, because a tenant that was deleted and is made again counts from 1.
//
// # States
//
//	unknown --read the subject's last message--> at a sequence --stored--> at a higher one
//	   ^                                               |
//	   +------- refused, timed out, disconnected ------+
//
// # When something fails
//
//   - The server is away, restarts, or answers too late: an error; the relay tries
//     again. Nothing is buffered while there is no connection.
//   - An acknowledgement is lost: the next attempt finds the message in the stream
//     and counts it as accepted.
//   - The tenant is paused: what is in flight has Settle to be acknowledged; then
//     the connection is dropped, and what arrives all the same is refused if the
//     tenant went on meanwhile.
//   - The stream has dropped the subject's last message (limits, a purge): only the
//     duplicate window is left to recognise a repetition. Consumers drop by id.
//   - The stream is further than what is to be published (a relay that is far behind
//     another one, an outbox that was restored): its messages of these numbers are
//     looked up, and only events whose ids it does not have are stored.
//   - The stream is full and discards new messages: an error; the outbox keeps them.
package nats
