// SPDX-License-Identifier: Apache-2.0

// Package publish is what the publishers below it have in common: how an event
// travels through a broker. nats (JetStream), kafka and webhook are publishers for
// [guard.Relay]; publishertest is the suite that they pass.
//
// # Who is authoritative
//
// The outbox of the cell that has the tenant is authoritative for which events
// there are and how far they were published. A broker is authoritative for what it
// has stored. A publisher says that an event is accepted only when the broker has
// acknowledged it; the relay records that in the outbox, which travels with the
// tenant. What happens between the two is the only source of repetitions:
//
//	outbox --publish--> broker --ack--> publisher --record--> outbox
//	             lost: sent again        lost: sent again
//
// # What each of them promises
//
//	           order per tenant   repetitions                              late arrivals
//	nats       always             none in the stream (see its doc)         refused by the stream
//	kafka      always             after a lost session or relay fail-over  behind newer ones, rarely
//	webhook    always             whenever an answer is lost               behind newer ones, rarely
//
// Every repetition carries the same id and event_seq. A consumer that drops what is
// not above the last event_seq of its tenant sees each event once, in order, from
// each of them, across moves.
//
// # A pause waits for acknowledgements
//
// The cut of a move pauses a tenant's events: the context of the publication ends,
// and the pause waits until Publish has returned. A publisher must therefore not
// return while something that it has sent may still be stored: [Settle] gives what
// is in flight a bounded time to be acknowledged, after which the publisher takes
// its connection, or its session with the broker, away from it.
package publish
