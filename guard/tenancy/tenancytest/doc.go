// SPDX-License-Identifier: Apache-2.0

// Package tenancytest is the suite that every [tenancy.Store] passes, and the broken
// variants that it fails. The store under test is authoritative for nothing but
// itself: the suite writes rows behind its back, through sessions that a [Database]
// gives it, in every state of the first row's rule (open, recording, enforced and the
// partial ones).
//
// A section that cannot open a database fails; it is never passed over.
package tenancytest
