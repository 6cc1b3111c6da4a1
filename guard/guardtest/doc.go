// SPDX-License-Identifier: Apache-2.0

// Package guardtest is the conformance suite of guards: fences at every isolation
// level a store has, with writers that are in flight, late, paused and resumed;
// imports; the outbox and its relay. A store's tests call [Run] with a [Harness];
// its mutation checks call [Record] with a broken one and expect a failure.
//
// What is checked throughout is the promise of a fence: what a database holds of
// a tenant when CloseFence returns is what it holds until the fence is opened,
// whatever transactions do that were begun before.
package guardtest
