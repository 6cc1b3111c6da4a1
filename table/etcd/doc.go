// SPDX-License-Identifier: Apache-2.0

// Package etcd is a routing table in an etcd cluster: any number of processes, a
// key for each tenant below a prefix, <prefix>routes/<tenant>.
//
// # Who is authoritative
//
// The cluster's majority. Reads are linearizable, so they see every change that
// was acknowledged anywhere; nothing is cached. Revisions are etcd's store
// revisions: a row's is its key's mod revision, the table's is the store's, which
// also grows with what others write in the same cluster.
//
// # Compare-and-set
//
// One transaction, If(mod revision = old) Then(put). The rules that need the row
// before (epochs never fall) are checked on a read of the same mod revision, so
// they hold for the row that is replaced. The client never sends a transaction
// twice. When its answer is lost (a leader went away, a connection broke) the row's
// history is read: the version that followed old is the one that won, and the write
// is acknowledged if, and only if, that version is byte for byte what was to be
// written and carries a Stamp. Another writer's row is a conflict. A row that is
// still at old decides nothing, because the transaction may yet be carried out:
// the error wraps [cells.ErrUnavailable] and says that the outcome is unknown.
//
// # Watching
//
// Each watch has a stream of its own, so none waits for another. Signs of life are
// etcd's progress notifications, asked for when the stream is quiet: they say that
// everything up to a revision has been delivered. A stream without any for a while
// ([WithSilence]) is broken: [cells.ErrUnavailable], also where the client would
// connect again for ever. A watch of which nobody calls Next keeps a bounded number
// of rows ([WithWatchQueue]); beyond it the stream is given up, and begun anew from
// there when they were taken.
//
// # Failures
//
//   - No leader, no majority, no connection: [cells.ErrUnavailable], and for a
//     compare-and-set what is said above. Watches require a leader, so one that hangs
//     on a member cut off from the others ends.
//   - The history from the wanted revision on was compacted: [cells.ErrCompacted]. So
//     is a revision ahead of the store (it was restored from a copy), and a row that
//     was removed, by hand or with a lease: the table never removes any.
//   - A value that is not a row, a row of another format, or one that hangs on a
//     lease and would vanish: [cells.ErrInvalid]; nothing is written over it.
//
// # Exposure
//
// Whoever may write below the prefix decides where tenants are. Give the control
// plane a user that may, and everybody else one that may only read; use TLS.
package etcd
