// SPDX-License-Identifier: Apache-2.0

// Package cells: see the design.
package cells
