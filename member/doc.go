// SPDX-License-Identifier: Apache-2.0

// Package member: see the design.
package member
