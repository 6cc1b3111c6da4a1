// SPDX-License-Identifier: Apache-2.0

// Package cells pins each tenant of a service to one of several independent
// deployments of it (cells) and moves a tenant from one to another while it is
// being used.
//
// It is the nouns, the rules and the engine: routes and the tables that hold them,
// the router and the gates on a request's path, the pure function [Next] that owns
// the protocol of a move, and the controller that performs its effects. It knows
// no database; what a cell does with its rows is behind [Fencer], [EventBarrier]
// and [DataMover], each of which may be nil for a service that owns no state.
//
// # Who is authoritative
//
// The [RoutingTable] is, and only its compare-and-set is: which cell has a tenant,
// at which epoch, is decided there and nowhere else. A [Router] is a view of it
// that may be late. [Gates] decide by that view. A cell's fence is the last word on
// a write: it is raised only by orders that follow a decision of the table, and it
// admits a transaction by its epoch, whatever the view of the process said.
//
// So a late view costs a retry and never a write in two cells:
//
//	layer       decides                          by                 if it is late
//	L1 router   where a request is sent          its view           the gate says STALE_ROUTE or WRONG_CELL
//	L2 gate     whether it begins here           its view           the fence refuses the transaction
//	L3 fence    whether a transaction commits    the epoch in it    it is never late: it is in the same database
//	L4 events   whether an event is published    the mark           likewise
//
// Epochs, revisions and event numbers decide. Times never do: they bound waits,
// budgets and drains. A cut with a [BudgetMeter] is given up when it is not decided
// within what it has reserved of its tenant's budget.
//
// # States of a route
//
//	           claim
//	(absent) --------> ACTIVE(A,N) <------------------------------------------+
//	    ^                | begin: ACTIVE with a move, A serves                |
//	    |                v quiesce                                            |
//	 tombstone       QUIESCING(A,N) --> DRAINING(A,N) --> COPYING(A,N+1)      |
//	    |                |                  |                 |  commit       |
//	    |                +------------------+-----------------+----------+    |
//	    |                           rollback |                           v    | opened
//	 DELETED(N+1) <-- DELETING(A,N+1)        +------> COMMITTING(A or B,N+2) -+
//
// ACTIVE serves. From QUIESCING to COMMITTING nobody begins anything: edges hold
// requests and gates refuse them with MOVING. COMMITTING is the decision: it only
// goes on to ACTIVE, in its cell. DELETED is a tombstone: it keeps the epoch, and
// such a tenant is unknown, not the default cell's.
//
// A move may be asked to be undoable for a while ([MovePlan] UndoWindow). Then its
// entry in Residue is held when it becomes ACTIVE at its target: the source keeps its
// rows and the target's changes flow back to it ([Returner], [MoveController.Tend]).
// Until the hold is let go, by a compare-and-set that an undo races, the move can be
// taken back by another move that needs no copy ([MoveController.Undo]). Any other
// move, and a deletion, let go of it in their first write.
//
// # The view
//
// A [Router] holds every row in memory. Reading takes no lock and allocates
// nothing. For one tenant the view never goes back: a row replaces another only at
// a higher revision, and a row with a lower epoch, or with an epoch that another
// cell was given, is refused and counted. What is not there is decided by one rule:
//
//	row ACTIVE ... COMMITTING    "route": its cell, at its epoch
//	row DELETING, DELETED        unknown
//	no row, a default cell       "default": the default cell, at epoch 0
//	no row, no default cell      unknown
//	nothing loaded yet           not known: BACKEND_UNAVAILABLE, never "unknown"
//
// # Gates
//
// One function, [Gates.Admit], decides for HTTP requests, gRPC calls, streams and
// jobs; [HTTPMiddleware] and the interceptors only translate. In order:
//
//	malformed tenant                           INVALID_TENANT
//	a Cell-* header twice, a bad epoch,
//	a token that is missing or not good        BAD_REQUEST
//	the epoch is newer than the view           read the row from the table, decide again
//	    the table cannot be read, or is older  BACKEND_UNAVAILABLE
//	no cell has the tenant                     UNKNOWN_TENANT
//	another cell has it                        WRONG_CELL
//	it is between two epochs                   MOVING
//	the epoch is below the route's floor       STALE_ROUTE
//	the fence could not be raised              BACKEND_UNAVAILABLE
//
// An admission counts as in flight until it is done, exactly once, also when the
// handler panics or has taken over the connection. It is counted in under the
// tenant's lock after the view was read again, and the view never goes back:
// therefore, once [Gates.Drain] has told the view about a route and has seen the
// count at zero, nothing admitted at the route's epoch is in flight any more.
// Requests are waited for. Streams and jobs are told: their context is cancelled
// with an [*Answer] as its cause that wraps [ErrGateClosed], as soon as the view
// learns that the gate is closed.
//
// # Policies and plans
//
// A [Policy] says where each tenant belongs: round robin, an even spread by tenants,
// rows, bytes or load, hot tenants apart, groups apart, shuffle shards, a drained
// cell. [PlanFromPolicy] makes the moves of it, in an order in which each finds room
// when its turn comes. It is pure and deterministic, and it alone is what keeps to
// jurisdictions, closed cells and limits: a policy that wants to break one leaves its
// tenant in [CampaignPlan.Stays], with the reason. A plan is an intention: every move
// of it is checked again when it is made. A [Campaign] makes them in this process;
// package directory makes them in a fleet, and outlives whoever asked.
//
// # What happens when something fails
//
//   - A watch breaks: the router watches again from its revision, with growing
//     pauses. [Router.Status] counts it, and says how old the view is by then.
//   - A watch stays open and delivers nothing: after a third of the bound of
//     [WithStaleAfter] the table is asked for its revision; if it is ahead, the
//     watch counts as broken.
//   - A watch cannot go on from its revision ([ErrCompacted]): the table is listed
//     anew. A row that is gone, which no table does, is an unknown tenant from
//     then on and is reported.
//   - The table cannot be read: lookups go on from the view. Requests that were
//     routed by something newer get BACKEND_UNAVAILABLE. [Router.Wait] reads the
//     tenant's row itself each second, so that it misses nothing the table has.
//   - The table cannot be read at the start: the router starts from its signed
//     snapshot, and from nothing else. A snapshot that is torn, signed with another
//     key, or of a newer version is refused and said to be.
//   - The table is older than the view (restored from a backup): the view keeps what
//     it has, and says that it is stale until the table has passed it. Restart the
//     processes, without their snapshots, to accept such a table.
//   - A process dies: what it had in flight is gone with it. What it had admitted
//     and not committed is behind the fence.
//   - A drain finds a request that does not end: it returns a [*DrainError] that
//     names it, and the move rolls back at its deadline.
//   - A driver dies: the route is the recovery state. Resume reads it and goes on;
//     before the commit, past the deadline, it rolls back.
//   - A write of the table has an unknown outcome: its writer reads the row and
//     recognises its own by Stamp.
//   - An opener fails: the admissions that wait for it get BACKEND_UNAVAILABLE, and
//     the next one tries again.
//
// # Exposure
//
// The package listens nowhere. Headers of the Cell-* family are believed as they
// come: either only an edge can reach the process, or [WithAdmissionKey] is set, or
// whoever can reach it may name any tenant.
package cells
