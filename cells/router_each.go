// SPDX-License-Identifier: Apache-2.0

package cells

// Each calls f with every row that the router knows, tombstones included, in no
// order, until f returns false. Rows that change meanwhile may be given as they
// were or as they are. f owns what it gets.
func (r *Router) Each(f func(TenantRoute) bool) {
	r.view.each(func(route *TenantRoute) bool { return f(route.Clone()) })
}
