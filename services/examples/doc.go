// SPDX-License-Identifier: Apache-2.0

// Package examples has no code: the folders below it are small services, each a
// program that runs two cells and an edge in one process and moves a tenant between
// them. docs/examples.md says what each shows and how to run it; their tests run
// them as they are.
package examples
