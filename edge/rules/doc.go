// SPDX-License-Identifier: Apache-2.0

// Package rules decides which cell a request goes to when whole deployments are the
// cells and one router stands in front of them. It is pure: no clock, no I/O; a table
// and a request in, a decision out.
//
// # Who is authoritative
//
// The directory is, for the cells, their hosts, issuers, upstream addresses and states
// ([Table]). The shared host and the address of the deployment that the router was put
// in front of are the router's own configuration ([Config]). A cell verifies whatever
// reaches it: what is read of a token here names a destination and proves nothing.
//
// # The rules, in order
//
//	/cells/            is the platform's, on every host, in every spelling: NOT_SERVED
//	1 host             another cell's own host, or an alias of it: that cell
//	                   neither that nor the shared host or an alias: UNKNOWN_HOST
//	  -- on the shared host, and its aliases --
//	  until the first cell is serving: rule 4's cell takes everything
//	2 SCIM             the first cell, but groups with a JWT go by its issuer (rule 3)
//	  discovery        the first cell, whatever token comes along
//	3 issuer           a bearer JWT: the one cell that lists its iss claim, which is read
//	                   without verification; nobody lists it, or two do: UNKNOWN_ISSUER
//	4 everything else  the first cell; a revoked JWT goes by its issuer (rule 3)
//
// Rule 4's cell is the first cell, or, before it is registered, the deployment behind
// the router, which becomes the first cell at that very address. So nothing changes
// for that deployment's clients before it serves as the first cell.
//
// # Failures
//
// A cell without an upstream address, or with one that leads back to the router, gets
// BACKEND_UNAVAILABLE. Whatever a table says twice holds for nobody: a host of two
// cells is UNKNOWN_HOST, an issuer of two is UNKNOWN_ISSUER, and with two first cells
// rules 2 to 4 answer BACKEND_UNAVAILABLE. [Index.Problems] names all of it. The shared
// host is never answered UNKNOWN_HOST, whatever a table holds.
//
// What cannot be understood is refused, not guessed: hosts that are none
// (package hostname), two credentials in one request, a token whose claims say two
// things. A bearer token that is no JWT names no issuer and goes by rule 4.
package rules
