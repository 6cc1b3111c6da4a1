// SPDX-License-Identifier: Apache-2.0

// Package tenancy is what a process of a deployment that is one cell makes of the
// cell's own rows: the gate on the whole process, the check of each request's
// tenant, its placement through the directory, heartbeats, and workers that stand
// aside. The rules and the rows are in guard/tenancy.
//
//	p, err := tenancy.New(tenancy.Config{Cell: "a", Store: store, Fingerprint: fp, ...})
//	err = p.Start(ctx)                  // the first read; before anything is served
//	srv.Handler = p.Handler(mux, tenancy.HTTP{Resolve: verify})
//	go p.RunWorkers(ctx, passes)
//	defer p.Close(ctx)
//
// # Who is authoritative
//
// The cell's own rows, in its database, for everything here; the directory for
// whose a tenant is that the cell has no row for. A tenant that the cell holds needs
// no call, so the directory's absence changes nothing for it.
//
// # The gate
//
//	unread --a read lands--> open or gated, by the rows --stale too long--> gated
//
// A gated process answers AUTH_UNAVAILABLE to everything but health and the probe, is
// not ready and says why, and runs no worker. With a cell (CELL set) the rows are
// used for at most Config.CacheFor, and kept for at most Config.MaxStale while they
// cannot be read; past that the process is gated until a read lands. Without one the
// process keeps its verdict through failed reads for as long as they fail, as a
// single deployment rides out an outage of its database.
//
// A failed first read fails Start, and with it the boot, unless Config.AllowUnread
// says that the process may boot gated (its migrations are pending, or it is a child
// of one that reads for itself).
//
// # The check
//
// It runs after the credential was verified and before anything is written for the
// tenant ([Process.EnsureHeld]):
//
//   - who may not act in the tenant is refused first (FORBIDDEN), records nothing and
//     learns nothing;
//   - a tenant with a row is served;
//   - in Recording the row is written, while the directory answers that the cell is
//     being attached; otherwise BACKEND_UNAVAILABLE;
//   - in Enforced a principal scoped to the tenant has it placed: the winner's cell
//     serves it. Another cell's name is WRONG_CELL, this cell's under another
//     deployment id is TENANCY_REFUSED, no answer is BACKEND_UNAVAILABLE; in each case
//     nothing was written. Any other principal is refused (WRONG_CELL).
//
// An insert that finds that the mode was enforced meanwhile writes nothing, and the
// request goes on to the placement.
//
// # When something fails
//
//   - The database does not answer: requests wait for at most one read, then for none
//     until one lands; tenants that were seen as held are served for MaxStale.
//   - The directory does not answer within RouterTimeout: that request gets 503, and
//     a retry is safe, since a placement is read back.
//   - A heartbeat cannot be written: it is logged once and tried again; whoever waits
//     for this process's heartbeat waits on.
//   - The process is paused and goes on later: the age of what it read counts from
//     when the read began, so it reads before it decides.
package tenancy
