// SPDX-License-Identifier: Apache-2.0

// Package publishertest is the suite that every publisher of events passes,
// against a broker that really stores: order, repetitions, lost acknowledgements,
// restarts, slow brokers, a pause, and a move between two cells with real fences
// and relays. It talks to the broker through a [Link] that can hold up or lose what
// goes over it.
//
// The broker's own log is authoritative for every check; what publishers say is
// held against it. The suite reports through guardtest.T, so that it can be run on
// publishers that are broken on purpose, and must fail there.
package publishertest
