// SPDX-License-Identifier: Apache-2.0

// Package rows measures how fast the rows of one tenant get from one Postgres database to
// another: [Bench.Copy] beside psql's COPY from one end of a pipe to the other, and
// [Bench.CatchUp] changes beside the server's own subscriptions. All databases are of one private cluster that is made for the run, with fsync on; nothing else
// uses them.
//
// Both agents run in this process and talk over the fleet's channel, mutual TLS 1.3; what
// they take of the processors is this process's. What Postgres takes is that of the cluster's
// processes, the ended ones included. The peer writes a table without the guard's triggers,
// which a service's table has.
//
// A run fails if the rows at the target are not those of the source.
package rows
