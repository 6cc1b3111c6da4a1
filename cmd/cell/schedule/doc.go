// SPDX-License-Identifier: Apache-2.0

// Package schedule runs moves through random trouble: a world of three cells with
// real SQLite stores, guards and transfers, two drivers and clients that write, all in
// one process, and a schedule made from a seed that moves, rolls back and resumes
// tenants while it crashes cells at their worst points, stops drivers, loses calls
// and answers, repeats orders late, cuts cells off from each other and moves clocks.
//
// When a schedule is over everything is healed and the tenants are resumed until
// nothing is left to do. Then each tenant must have one home with every acknowledged
// write in it, once, its events must be whole and in order, all other cells must be
// empty of it, tenants that nobody moved must have seen no failure, and what the
// drivers did must be a behaviour of the protocol ([cells.CheckTrace]).
//
// A seed fixes what is done, not how goroutines interleave with it: a seed that has
// failed fails again often, not always. What a schedule did is in [Result.Log].
//
// The rows of the cells' files and the in-memory routing table are authoritative. A
// crash is the end of a process's contexts and the closing of its files: what SQLite had
// committed stays. The package has no state between runs.
package schedule
