// SPDX-License-Identifier: Apache-2.0

// Package hostname has the one spelling of a host that the platform compares: what a
// directory records, what a request's Host says, what a public URL names. Two hosts
// are the same exactly if [Normalize] gives the same string for both.
//
// It has no state and asks no resolver. What it cannot make sense of it refuses, and
// whoever asked takes that for a host that nobody has: an address in another notation
// than the usual one, a zone, user information, a percent-encoded byte, a label that
// only pretends to be encoded.
package hostname
