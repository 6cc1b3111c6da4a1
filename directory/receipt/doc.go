// SPDX-License-Identifier: Apache-2.0

// Package receipt writes and verifies the receipts of moves: what was moved, how it
// ended, what it cost, and who asked for it, signed by the directory.
//
// # Who is authoritative
//
// The route is, for where a tenant lives; the move's record, for people. A receipt is
// evidence: a list of statements, each signed when it was made, of which none is ever
// changed. The first tells the outcome; later ones that rows were removed, and what
// edges reported after the outcome was told. Each names the SHA-256 of the one before,
// so that none can be taken out or put in between. The last one, of kind end, says that
// nothing follows: a receipt without it is either not whole yet or was cut, and is never
// taken for a whole one. Which of both it is tells the directory, whose copy goes on
// where the cut one ends. The end is written some time after the last thing that has to be
// told, so that edges which report late are heard; those that are later still are not in
// the receipt, only in the budget.
//
// # What is signed
//
// A statement is a JSON object in the canonical form of [Canonical]: members in order
// of their names, no white space, integers only. The signature is Ed25519 over the
// line "cloister-receipt-v1" and the canonical bytes, so a receipt that was indented
// or reordered still verifies, and one in which any value was changed does not. A
// signature names its key by [KeyID]; whoever verifies brings the public keys.
//
// # What happens on a failure
//
// A directory without a key makes no receipts. The outcome is written before the
// record says that the move is over, and a driver that dies in between is followed by
// another, which finds the statement or makes it: a move that is over has its receipt.
// If the driver died between the decision and the writing of its record, the receipt
// lacks the comparisons, and says so.
package receipt
