// SPDX-License-Identifier: Apache-2.0

// Package pgcluster starts and stops private Postgres clusters from Debian's
// binaries: for cell dev on one machine, and for tests. The cluster's own data
// folder is authoritative; a cluster whose process is gone is started again
// from it. As root the server runs as the unprivileged user "postgres" or
// "nobody", since Postgres refuses to run as root.
package pgcluster
