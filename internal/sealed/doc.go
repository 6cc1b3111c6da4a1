// SPDX-License-Identifier: Apache-2.0

// Package sealed keeps a document in a file that only the holder of a key can have
// written: what a process knew last, for when it starts while nobody can tell it
// anything newer.
//
//	cloister-topology 1
//	{"seen_at":"..."}
//	mac 9f86...
//
// A file is replaced as a whole: a crash leaves the old one or the new one. One that
// is torn, changed, of another kind or version, or signed with another key is refused
// as a whole. The seal says who wrote the file and not when: whoever can write to the
// folder can put an older one back.
package sealed
