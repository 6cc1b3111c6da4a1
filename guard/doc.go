// SPDX-License-Identifier: Apache-2.0

// Package guard: see the design.
package guard
