// SPDX-License-Identifier: Apache-2.0

// Package pgcluster starts and stops private Postgres clusters from Debian's
// binaries: for cell dev on one machine, and for tests. The cluster's own data
// folder is authoritative; a cluster whose process is gone is started again
// from it. As root the server runs as the unprivileged user "postgres" or
// "nobody", since Postgres refuses to run as root.
//
// Only the superuser's password opens it, over TCP and over the socket: the port is
// open to every user of the machine, and a superuser of Postgres runs programs. The
// password is made with the data, and is in a file beside it that the server's user
// alone can read. [Cluster.Supervise] starts a server again that ended by itself; the
// data that a crash left is recovered by Postgres.
package pgcluster
