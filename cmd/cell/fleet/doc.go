// SPDX-License-Identifier: Apache-2.0

// Package fleet starts a whole fleet on one machine: the directory, an edge, and
// the processes of every cell with their own stores, for cell dev, for the
// benchmarks and for tests that kill them.
//
// The state folder is authoritative for what survives: the CA and certificates,
// the operator credential, the directory's database and the cells' stores. A
// fleet that is started again on the same folder has the same tenants. A lock
// on the folder keeps a second fleet out. fleet.json says where the listeners
// are, and counts only while the process that it names runs.
//
// Nobody but the user who started the fleet can look into the state folder. When
// root started it, Postgres runs as another user below postgres/: the way there can
// be walked, and nothing on it be listed. A Postgres server asks for the password
// that is in its own folder; no command line has it.
//
// Cells are made by a provisioner (package directory/provision/process) from the specs in
// the directory. The fleet file's cells become specs at the start, unless an operator has
// changed them since; cells that an operator has made are started with them. A left-out
// cell of the file is not.
//
// Every process is a child of the starting one and is started again when it
// ends by itself (package internal/supervise), Postgres servers too; ports stay the
// same across restarts, unless another program has taken one of a cell's process.
// Each has CELL_DEV_PROCESS in its environment, by which [Info.Kill] finds it. When the starting process
// is killed, the kernel ends them all.
//
// Everything listens on 127.0.0.1 unless the fleet file names another address
// for the edge.
package fleet
