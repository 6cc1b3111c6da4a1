// SPDX-License-Identifier: Apache-2.0

// Package supervise keeps a set of child processes running: for cell dev and for
// the tests that kill them.
//
// The supervisor is authoritative on what should run; the operating system on
// what does. A process is starting, up, or waiting to be started again:
//
//	(start) -> running -> exited -> backoff -> running ...
//	                 \-> stopped (asked to)
//
// A process that exits by itself, whatever its status, is started again after a
// backoff that grows to two seconds and is reset by ten seconds of life. Stop
// sends SIGTERM to the process group, and SIGKILL after a grace period. Children
// get SIGKILL from the kernel when the supervisor dies (Pdeathsig), so a killed
// supervisor leaves nothing behind. Output goes to one file for each process.
package supervise
