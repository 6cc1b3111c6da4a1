// SPDX-License-Identifier: Apache-2.0

// Package topology tells an edge which processes of a cell can be reached, and
// where. The directory is authoritative; this is one edge's view of it.
//
// A [Watcher] follows the directory's stream of topologies and keeps the last one
// in memory and, signed, in a file:
//
//	unknown --first topology--> following --stream breaks--> last known, trying again
//	   |                                                        |
//	   +--directory down, file good--> last known (snapshot) ---+--> following
//
// While the directory cannot be reached the last known topology stays in use,
// however old; its age is in [Status]. That is safe: an address that has passed to
// another process only costs an attempt, as every cell's gate checks that a
// request was meant for it. A file that is torn, signed with another key or of a
// newer version is ignored, never half used: the directory is asked, and only when
// that cannot be reached either does the start fail.
//
// A directory that was started anew has heard no heartbeats yet and may name no
// process of a cell: the addresses that the directory before it named are used
// until it does.
//
// [Static] is for fleets without a directory, and for tests.
package topology
