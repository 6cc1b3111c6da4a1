// SPDX-License-Identifier: Apache-2.0

// Package process makes cells of processes on this machine: a [provision.Provisioner]
// that gives each cell its own store, certificate, admission key and processes.
//
// # Who is authoritative
//
// What runs is what package supervise runs: every process is a child of this one, is
// started again when it ends by itself, and dies with this one. So a provisioner that
// is killed leaves no process, and the next one starts all of them from the specs; what
// survives is in files: the stores, the certificates, the keys. A process is ready
// when the directory hears it say so, at the address that it was given here.
//
// # An upgrade
//
// One process more than the spec asks for, for as long as it takes: a process of the
// new version is started and waited for, then one of the old is told to leave (SIGTERM,
// upon which a member has edges stop sending, and ends what it has begun), and so on. A
// version that does not become ready is stopped again, and the old one serves on. An
// upgrade that is cut off goes on with what is there.
//
// # Files
//
// All are below the folders that a [Layout] names. A cell that is retired leaves its
// logs, and its certificate's serial on the list of revoked ones; its certificates,
// keys and store are removed, or with KeepStore the store is put aside in Layout.Retired.
//
// # Failures
//
// A program that cannot be started, or ends again and again, fails the call with the
// last that it wrote. A directory that is down fails what waits for readiness, and
// stops nothing. A full disk, or a Postgres server that does not start, fails the
// call; all calls may be repeated.
package process
