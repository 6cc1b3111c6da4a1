// SPDX-License-Identifier: Apache-2.0

// Package open opens the stores of a cell by their configuration, or as the
// environment says, for a service's processes and for the commands that an operator
// runs on a cell. Which stores a cell has is authoritative there and nowhere else; a
// process pairs them ([stores.Set.Pair]) before it serves.
//
// One store that cannot be opened fails the whole, and leaves none open. The errors
// name the store and never a secret: keys are in files.
package open
