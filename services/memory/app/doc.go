// SPDX-License-Identifier: Apache-2.0

// Package app is the program memory: its flags, its listeners, and how it joins a
// cell. The environment is authoritative for whether it does: with CELL_ID it is a
// process of that cell and answers only what an edge admitted there, without any
// CELL_ variable it is an ordinary service.
//
// With CELL, which needs Postgres and --issuers, it is a process of a deployment that
// is one cell, with or without CELL_ID: the tenant is that of a verified bearer token,
// and the cell's own rows say whether it is served (package member/tenancy). Without
// CELL they are read as well, and gate the process on a cell that checks. The relay
// stands aside while the process is gated.
//
//	starting -> reconciling fences -> ready -> retiring -> ended
//
// A failure before ready ends the program; whoever supervises it starts it again.
// While it serves, a directory or database that is away is ridden out: see packages
// member and memory. SIGTERM retires the process: edges stop sending, what runs
// ends, then it leaves the cell.
//
// --listen takes tenants' requests and must be reachable by edges only (127.0.0.1
// by default); --admin-listen has health and metrics and no tenant's data. With
// --store postgres the first also says at /v1/health/deployment, to anybody, which
// deployment the process belongs to, and CELL_PROBE_PORT opens the probe listener on
// every address of the host: see package probe. Stores that belong to different
// deployments end the program before it serves.
package app
