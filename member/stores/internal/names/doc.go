// SPDX-License-Identifier: Apache-2.0

// Package names is the part of [stores.Store] that is the same for every store
// which keeps reserved values by name: the nonce of a probe and the marks of the
// isolation check.
//
// # Who is authoritative
//
// The store. Nothing is kept here: each call reads or writes it, through [Names.Get],
// [Names.Put] and [Names.Drop].
//
// # States and failures
//
// A name is absent or has a value. A nonce or mark that is malformed is refused before
// the store is asked, and a nonce that is read so is an error, never an answer. What
// the store answers with an error is passed on as it is.
package names
