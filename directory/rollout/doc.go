// SPDX-License-Identifier: Apache-2.0

// Package rollout brings a new version to a fleet in waves, compares each wave with
// the rest, and takes it back when it is worse.
//
// # Who is authoritative
//
// The record of a rollout and its units, in the directory's store, say how far it is;
// [Next] says what becomes of it by what happens, and has no clock and reads nothing.
// The routing table says where a tenant is, the provisioner which version a cell has:
// where a unit's state and these differ, they are right, and the unit is brought up to
// them. A [Driver] does the work, one persisted step after the other. It keeps nothing
// in memory: whoever drives on after a crash finds the last step and does the next. Two
// drivers at once repeat each other's steps, which changes nothing.
//
// # States
//
//	OBSERVING --the old version is measured--> CHANGING
//	CHANGING  --every unit of the wave has it--> BAKING       (failed units: paused)
//	BAKING    --healthy for the bake time------> CHANGING of the next wave, or DONE
//	CHANGING, BAKING --worse--> RETURNING --everything is back--> HALTED
//	any       --abort---------> RETURNING --everything is back--> ABORTED
//	any       --abort, keep---> what is under way ends --------> ABORTED
//
// It observes before a last wave that nothing was compared before, as in a rollout of a
// single wave: nothing is left of the old version then. Otherwise the last wave is
// compared with what was measured beside the one before, unless the old version still
// gets more requests than that.
//
// By upgrade it goes on to BAKING only [Driver].Lag after the last change: what a cell's
// processes of before have counted must not arrive as the new version's.
//
// Paused is not a state: it begins nothing and goes on to no other wave, in any state.
// Health is judged all the same, and bad health ends the pause and returns the wave. A
// rollout pauses by itself when units have failed and when it lacks data for longer
// than its patience.
//
//	unit: PENDING -> CHANGING -> CHANGED -> RETURNING -> RETURNED
//	         ^          |  \-> FAILED --retry--> PENDING, --skip--> LEFT, --return--> RETURNING
//	         \--dropped-/       (GONE: deleted, or moved elsewhere by somebody)
//
// The waves are made when the rollout starts, of all units that there are, by [Waves]:
// the same units, canaries and seed give the same waves. By move, tenants that come to
// the old version's cells later are of the last wave.
//
// # How versions change
//
// By move, the tenants of cells with the old version are moved to cells with the new
// one, by campaigns, each of which is named by the rollout and a number that is
// persisted before it. A return undoes the last move of each tenant while that can be
// undone, so that what was written meanwhile goes back with it, and is a move
// otherwise, which loses nothing either. Returns may exceed budgets.
//
// By upgrade, whole cells are given the new version, a few at once, and the one they
// had when they are returned, all at once. The provisioner does it without refusing a
// request. A cell that takes too long has failed.
//
// # Health
//
// What edges and what cells counted (package member/vitals) is compared for two groups
// of cells over the same time: those with the new version, and those with the old one.
// For each of those who measure:
//
//   - errors: the shares of bad requests (failed or refused) of both sides. Worse is a
//     share above the old version's by more than ErrorFloor, when the difference is at
//     least Sigma standard errors of the pooled share (a two-proportion z-test).
//   - latency: worse is a 99th percentile above a limit, the old version's times
//     LatencyRatio and at least LatencyFloor more, when of the new version's requests so
//     many took longer than the limit that one in a hundred would not explain it, by at
//     least Sigma standard errors of the binomial. Only requests in buckets wholly above
//     the limit count as longer.
//   - budget: the bad requests beyond the old version's share, of all waves together.
//     More than the budget is worse, whatever the size of the sample.
//
// Fewer than MinRequests on a side, in errors or in latencies, say nothing: the wave
// bakes on, and is never taken for healthy. It is looked at about twenty times in the
// bake time; Sigma is as high as it is because each look may err. While tenants are
// being moved only errors are looked at, and only to halt.
//
// # Failures
//
// Store down: nothing is persisted, so nothing goes on; what runs elsewhere ends by
// itself. Directory down: another one, or the next start, drives on. Edges or cells
// that do not report: data is missing, and the rollout pauses. A process that is killed
// takes with it what it had not reported, at most a second or a heartbeat. A tenant
// that cannot be returned (its old cell is full, or gone) is tried again for as long as
// the rollout returns; an abort that keeps ends that. Clocks decide for how long a wave
// bakes and when something is tried again, and no more; one that goes back makes a wave
// bake anew. How long a cell takes is measured by the driver's own time, which does not
// jump: a clock that does neither fails a cell that is being upgraded nor leaves one that
// is stuck waiting for longer. A driver that takes over gives it its whole time again.
package rollout
