// SPDX-License-Identifier: Apache-2.0

// Package hold is the waiting room of an edge: where requests wait while their
// tenant is between two cells.
//
// The room only counts. It knows nothing of routes: a request takes a [Ticket]
// when it first has to wait, keeps it through all its waits, and gives it back
// when it goes on or gives up. The room is bounded in requests, in bytes of
// buffered bodies and in time, as a whole and for each tenant, so that a tenant
// whose move hangs takes neither the edge's memory nor the places of others: the
// last eighth of the room is kept for tenants that hold little of it.
//
// A request that gets no place fails at once (OVERLOADED at the edge); one whose
// time is up fails then (MOVING). Nothing of either has run anywhere. After a
// crash of the edge the room is empty, as the connections are gone too.
package hold
