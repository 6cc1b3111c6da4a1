// SPDX-License-Identifier: Apache-2.0

// Package archtest keeps the house in order by tests over the whole repository:
// imports only point down the list of roles, package cells drags in nothing heavy,
// every file carries its licence, every package says what it is, no file grows past
// what can be read, and no test waits by sleeping.
//
// It has no state. The go command and the files of the repository are what it
// reads; a rule that it cannot check because one of them cannot be read is a
// failure, never a pass.
package archtest
