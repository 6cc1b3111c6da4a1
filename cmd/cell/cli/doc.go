// SPDX-License-Identifier: Apache-2.0

// Package cli is the command line of the program cell: every operator command,
// and the wiring of the processes that it can be.
//
// The directory is authoritative for whatever a command shows or changes; an edge
// for what explain says. A command holds no state of its own: interrupting one
// never undoes what was asked for.
//
// Exit codes tell a script what happened: 0 done, 1 failed, 2 wrong command line
// (nothing was done), 3 refused with a code of the closed list, 4 the connection
// broke and the change may have been made, 5 a move was rolled back. With --json
// answers and errors are JSON documents, answers on standard output and errors on
// standard error.
package cli
