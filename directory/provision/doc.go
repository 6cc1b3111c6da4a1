// SPDX-License-Identifier: Apache-2.0

// Package provision has the nouns of version-pinned cells: what a cell should be
// ([Spec]), what it is ([Status]), which versions there are ([Version]), who makes the
// one into the other ([Provisioner]), and the loop that has it done ([Reconciler]).
//
// # Who is authoritative
//
// The directory's store is authoritative for what is wanted: specs, their
// generations, and the catalogue. The machine (processes and files, or the objects of a
// cluster) is authoritative for what is there. A status is only a report of it: the
// directory keeps the last for people, for the state of the cell (attaching becomes
// serving with the first ready process) and for removing a cell that is reported
// retired; nothing that is safety rests on it. Who may commit a tenant's writes is
// the routing table's and the fences', as ever: a provisioner that is wrong costs
// availability, and no write.
//
// # States
//
//	          provision             drain                retire
//	(nothing) ---------> serving ----------> drained ------------> retired
//	                      ^  |  \__upgrade__/^  |                     |
//	                      |  +---------------|--+ serve again         |
//	                      +------------------|------ provision -------+
//
// Retire is refused while the directory knows of a tenant in the cell (routes,
// residues, undo windows, moves, claims under way), or the cell's own processes do (open
// fences, rows in tenant tables). Its check and its decision are one
// compare-and-set on the spec, with the cell closed: nobody can put a tenant there in
// between.
//
// # The reconciler
//
// It watches the specs, has one worker for each cell, and calls Provision, Upgrade,
// Drain or Retire until the status says that the spec is reached; then it looks
// again from time to time. A newer generation interrupts a call for an older one.
//
// # Failures
//
// Reconciler killed: the next start reads all specs and repeats the calls, which
// are idempotent. Directory down: what runs goes on running, calls that wait for
// processes to be ready wait on, and statuses are reported when it is back. A call that
// fails is reported as failed with its reason and repeated with backoff, up to half a
// minute. Two reconcilers for the same machine are kept apart by the lock of the state
// folder; two for the same cluster do the same work twice, which harms nothing.
// A status of an older generation that comes late is ignored.
package provision
