// SPDX-License-Identifier: Apache-2.0

// Package celltable keeps a router's view of the cells of a directory: their hosts,
// issuers, upstream addresses and states, ready for package rules.
//
// # Who is authoritative
//
// The directory is. A [Watcher] reads its table once in each interval, in the
// background, and requests are decided by the last table that was read, whatever its
// age: a directory that hangs or cannot be read delays no request and changes no route.
//
//	unknown --a read--> directory --reads fail--> directory, ageing --a read--> directory
//	   |                                                               ^
//	   +--no read within Patience, a good file--> snapshot ------------+
//
// While nothing is known requests get BACKEND_UNAVAILABLE.
//
// # The snapshot
//
// Each replica keeps the last table, signed, in a file of its own in a folder on
// storage that the replicas share; it is written when the table changes. A replica that
// starts while the directory cannot be read goes on from the newest file of the folder
// that carries the seal and is of the same shared host, whoever wrote it. The key
// is known to the replicas alone. A file that is torn, changed, or of another key is
// passed over. Files that were not written for [KeepFiles] are removed.
//
// # Failures
//
// A read that fails, or takes longer than Timeout, leaves the table as it is; the next
// one follows at the next interval. So does a read that lacks a cell which was serving,
// or is of an older revision than the last: a cell never leaves a directory, so that is
// another directory, or an old copy of it. Whoever put an old copy in place on purpose
// removes the snapshots and starts the routers again.
// Rows that are malformed or contradict each other affect themselves only (package
// rules); they are logged when they change.
package celltable
