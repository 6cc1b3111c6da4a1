// SPDX-License-Identifier: Apache-2.0

// Package transfer: see the design.
package transfer
