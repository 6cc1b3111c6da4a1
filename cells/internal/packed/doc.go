// SPDX-License-Identifier: Apache-2.0

// Package packed maps short keys to small records in memory that holds no pointers,
// so that a collector has nothing to do for ten million of them.
//
// The table that a view of routes was loaded from is authoritative; this is a copy
// that can be filled again.
//
// # Layout
//
// A table has 256 shards, chosen by the key's hash. The hash has a seed of its own in
// each table: who chooses keys cannot choose collisions. A shard is one state:
//
//	index   []uint32   open addressing; a slot is empty, deleted, or 8 bits of the
//	                   hash and where in the arena a record is
//	arena   []byte     records, one behind the other: the key and varints
//
// # Readers and writers
//
// Readers take no lock and never wait. They load the shard's state, then a slot, then
// the record that it names. A record is never changed: a writer puts a new one behind
// the last, where no published slot points to, and then stores the slot. So a reader
// finds a key's old record or its new one, whole, and never an older one than it, or
// anybody whose answer it has heard of, has seen before. A key that is there throughout
// is found throughout.
//
// Writers of one shard take turns. What a change leaves behind (a replaced record, a
// deleted slot) is dropped when the shard's arena or index is full: a writer then
// copies what is live into a new state with a quarter of room and publishes it.
// Readers of the old state finish with it, and the collector takes it. A change thus
// costs the same whatever the number of keys, on average.
//
// # What can fail
//
// Nothing but memory. A shard that outgrows what a slot can address counts its arena in
// larger units. Keys have at most 255 bytes; a longer one is a mistake of the program
// and panics.
package packed
