// SPDX-License-Identifier: Apache-2.0

// Package kafka publishes events to a Kafka topic, in the order of their tenant.
//
// # Who is authoritative
//
// The outbox, for what there is to publish and how far it was published. The topic
// only has what it was given: Kafka has no way to store a record on the condition of
// another one, so what a session does not know it cannot keep out.
//
// The key of a record is the tenant, so that a tenant's events are in one partition;
// changing the number of partitions of the topic moves tenants to other ones, and
// with that loses their order at that moment. The value is the event as JSON; its
// id, tenant, event_seq, epoch and cell are headers as well. An event is sent when
// the one before it is acknowledged by all replicas in sync, so that no failure in
// the middle leaves a gap; tenants are published side by side.
//
// # What is guaranteed
//
//   - At least once and in order, from one relay to the next and across moves:
//     whoever drops what is not above the last event_seq of its tenant sees each
//     event once, in order.
//   - Exactly once within a producer session: the producer is idempotent, its own
//     retries (lost acknowledgements, broken connections, a new leader) are stored once.
//
// # What is not
//
//   - A relay that ends, or whose session ends, before it has recorded what was
//     acknowledged is followed by one that publishes the same events again, with the
//     same ids and numbers.
//   - A publication that is paused or times out while the broker does not answer is
//     given up after Settle, and its session ends: the next record has a higher
//     producer epoch. What was on its way may still be stored, in rare cases behind
//     what another cell has published since.
//
// # States
//
//	sending --acknowledged--> accepted
//	   |
//	   +-- context ends --> settling --acknowledged--> accepted
//	                            |
//	                            +-- Settle is over --> given up: the session ends
//
// Topics are the operator's to make. A broker that is away makes publications fail;
// the outbox keeps the events.
package kafka
