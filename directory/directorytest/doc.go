// SPDX-License-Identifier: Apache-2.0

// Package directorytest is the conformance suite of [directory.Store]. Every
// implementation passes [Run] against the real thing.
//
// Each case gets an empty store of its own, which it may open several times at
// once: those handles stand for several directory processes. A case fails through
// [TB], so that the suite itself can be run against broken stores and seen to
// fail.
package directorytest
