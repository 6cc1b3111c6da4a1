// SPDX-License-Identifier: Apache-2.0

// Package storestest is what every [stores.Store] has to do, as tests that run
// against the real thing: [Run]. Each case opens stores of its own. The cases are
// themselves tested against stores with a defect each.
package storestest
