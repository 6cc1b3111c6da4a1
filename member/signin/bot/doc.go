// SPDX-License-Identifier: Apache-2.0

// Package bot lets a machine identity of a cell prove itself with a key: the
// break-glass bot, which reaches a cell whose provider or SCIM is broken, and the one
// that cell each works with.
//
//	client                                cell
//	  challenge of NAME  ------------->   random, single use, one minute
//	  signs it, for this cell's address
//	  the signature      ------------->   key of NAME? address? challenge unused? audit
//	                     <-------------   a token, five minutes
//
// # Who is authoritative
//
// The cell's database for its bots' public keys; the operator's secret store for the
// private ones. The directory records each bot's name and the thumbprint of its key, and
// holds no cell's credential.
//
// # What a proof is good for
//
// One cell: the address that it is signed for is the one that the client was told, never
// one that a server names, so what is given to a wrong server is worth nothing at the
// right one. Once: the challenge is used up in the transaction that keeps the token.
// Soon: it says when it was signed, and is refused a minute later.
//
// # When something fails
//
//   - The audit cannot be written: no token is given, and no request with one is
//     served. Each use is in the audit before it has an effect.
//   - The store does not answer: AUTH_UNAVAILABLE.
//   - The name is unknown, the key another, the challenge used or old: UNAUTHENTICATED,
//     all alike, so that nothing is learned of names.
//   - Challenges of a name are asked for too fast from one address: RATE_LIMITED, of a
//     name that is no bot's alike. Others that ask do not keep a bot from its challenge, but
//     for those behind the same address: a break-glass bot asks at an address of its own
//     network ([Proof], Address), and not through a router.
package bot
