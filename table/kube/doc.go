// SPDX-License-Identifier: Apache-2.0

// Package kube is a routing table in a Kubernetes API server: a TenantRoute object
// (cloister.dev/v1alpha1, [CRD]) for each tenant, in one namespace.
//
// # Who is authoritative, and who owns which field
//
// The API server's store. Reads are consistent reads; nothing is cached.
//
//   - metadata.name is the tenant's id, escaped ([Name]); spec.tenant is the id.
//     Whoever creates the object writes both, and they never change.
//   - spec.cell is a wish of people or of GitOps. The table never writes it and no
//     decision reads it; [Table.Wishes] lists those that are not fulfilled.
//   - status is the control plane's alone: the row, its format, and the
//     resourceVersion that the last change replaced. It is a subresource, so that a
//     role for GitOps need not be allowed to write it.
//   - the finalizer [Finalizer] is the table's: an object that has a row cannot be
//     pruned, because its epoch must not be forgotten. A tombstone keeps it.
//
// An object without status.route is no row: the tenant is not placed.
//
// # Compare-and-set
//
// An update of the status with the resourceVersion that was read; the API server
// refuses it when the object has changed. A row's revision is its object's
// resourceVersion, so an edit of the spec counts as a change too: a driver that
// meets one reads again. The first change of a tenant creates the object, then
// writes the status; an object without a row in between is harmless. The schema's
// rules (CEL) refuse on the server what [cells.ValidateChange] refuses here, so they
// also hold for kubectl. Fields that an older CRD does not know are refused, not
// dropped.
//
// When the answer to a change is lost, the row is read: if it follows the same
// resourceVersion it is the one that won, and it is this caller's if, and only if,
// it is equal in every field and carries a Stamp. Everything else says that the
// outcome is unknown.
//
// # The order of revisions
//
// Revisions are resourceVersions compared as integers. Kubernetes allows that for
// objects of one resource type as of 1.35 ("Resource versions" in its API concepts:
// a resourceVersion that is a decimal integer without leading zeros may be compared
// with others of the same resource); package
// k8s.io/apimachinery/pkg/util/resourceversion has the rule. Before, it was so for
// every server that keeps its objects in etcd. One that is not of that form is
// refused with [cells.ErrInvalid].
//
// # Listing and watching
//
// The API server lists in the order of names, and names are in the order of tenants.
// A list goes on with the server's own continue token, hence at the first page's
// revision; the table keeps the tokens of the walks that are under way, and walks
// from the start where it has none (any more).
//
// Each watch asks for bookmarks, and for a short period ([WithWatchPeriod]), at the
// end of which the server sends one: that is the sign of life, and says how far the
// view is. The next period goes on from there. A watch that begins at 0 lists first.
// So does one whose bookmarks stand still for three periods while the server's
// revision grows, as they do where etcd gives the server no progress notifications
// (--watch-progress-notify-interval, 5 s in most clusters).
//
// # Failures
//
//   - No answer, a server that is overloaded or shuts down: [cells.ErrUnavailable],
//     and for a change what is said above.
//   - 410 Gone (Expired), a revision ahead of the server's, a row that was removed in
//     spite of its finalizer: [cells.ErrCompacted].
//   - The CRD is not installed, or the role does not suffice: [cells.ErrUnavailable],
//     with what the server said.
//   - A status that is not a row of a known format, a name that is not the tenant's:
//     [cells.ErrInvalid]; nothing is written over it.
package kube
