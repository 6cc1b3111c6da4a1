// SPDX-License-Identifier: Apache-2.0

package sqlite

// WithLockSQL replaces the statement that takes the write lock, for mutation
// checks.
func WithLockSQL(s string) Option { return func(c *config) { c.lockSQL = s } }

// Admitted counts the transactions that the guard remembers.
func (g *Guard) Admitted() (n int) {
	g.admitted.Range(func(any, any) bool { n++; return true })
	return n
}
