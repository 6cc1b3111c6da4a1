// SPDX-License-Identifier: Apache-2.0

// Package member is what a process of a cell links: its identity in the fleet,
// its gates, its heartbeats, and the agent that carries out the steps of moves in
// the cell's own database. [AgentClient] is the other end: how the directory
// gives those agents their orders.
//
//	cfg, on, err := member.FromEnv() // on is false: run as an ordinary service
//	m, err := member.Join(ctx, cfg, member.WithStore(store))
//	srv.Handler = m.Handler(mux)
//	defer m.Close(ctx)
//
// # Who is authoritative
//
// The routing table decides who owns a tenant; this process only has a view of it.
// The fence in the cell's database decides whether a write commits; this process
// only carries orders to it. Liveness (heartbeats) chooses addresses and ends
// waits. Nothing here decides safety, so a member that is late, paused or cut off
// can do no harm: its requests are refused by the gate or by the fence.
//
// # States
//
//	JOINING --routes read, fences reconciled, the service's check passes--> READY
//	READY <--the service's check fails, passes--> NOT READY
//	READY <--the store fails for 2 s, answers twice--> NOT READY (store down)
//	any --Close, Retire--> LEAVING
//
// A member admits nothing and publishes no events before its fences are
// reconciled: a database that was restored from a backup may bring back open
// fences of old epochs, and those are raised from the routes first. The routes may
// come from the signed snapshot in the state folder when the directory is down;
// then a fence that is older than the snapshot says it was (which is what a
// restored database looks like) keeps the member from being ready until the
// routes were read from the table.
//
// # Reconciliation
//
// For each route that concerns the cell: ACTIVE or COMMITTING here opens the fence
// at the route's epoch and floor; COPYING, DELETING and DELETED here close it at the
// route's epoch; a residue here closes it at the residue's epoch; a route of
// another cell closes a fence that is open here at a lower epoch. All of it is
// safe for whoever has read the route, because a fence refuses what is not newer.
// A fence is opened as a driver opens it: events start after the route's mark first.
// It runs at the start, a while after each change of a route (the driver of a move
// normally was there first), and every few minutes.
//
// # The agent
//
// It listens on its own address, loopback by default, and speaks mutual TLS only.
// Whoever holds a directory's certificate may order fences and moves there, and
// whoever holds a cell's certificate may read exactly those tenants' rows that the
// routes say are moving to that cell in that move. It must be reachable from the
// directory and from the other cells, and from nobody else.
//
// # Failures
//
// Directory down: the member serves on from what it knows, and beats on; a view
// that is old is no reason not to be ready, since epochs are compared and not
// times. Database down: orders fail with "unavailable" and are repeated by their
// driver; a member that starts is not ready, and one that was is no longer when the
// store has refused for 2 s, or has not answered for 15 s: it says so in its
// heartbeats, and answers requests that still come with what its service says.
// The process dies in a step: the step is repeated in another process of
// the cell, or in the next one. A caller that goes away cancels its step; steps
// are resumable. A member that leaves answers "unavailable" to the steps that it
// cuts off. Revoked or expired certificates, of either side, end calls at the next
// request.
package member
