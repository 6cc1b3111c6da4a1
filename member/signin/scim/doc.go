// SPDX-License-Identifier: Apache-2.0

// Package scim serves a cell's /scim/v2: its identity provider's application writes
// the cell's people and the groups of its tenants.
//
// The provider is authoritative for who is active, the cell's database for what was
// written; the router holds none of it. elimity-com/scim speaks the protocol (RFC 7643,
// 7644); what it hands over is applied here, and a resource is stored only as its schema
// allows.
//
// # A user
//
//	active --PATCH, PUT--> inactive --PATCH, PUT--> active
//	either --DELETE--> its email is kept as deleted --POST of the email--> active, another id
//
// A user is known by one email: the one marked primary, else the userName if it is one,
// else the first. No two users have one. A user that gets another leaves the one before
// as deleted.
//
// # Credentials
//
// Users take a SCIM token only. [Tokens] says whose: one place compares it, in constant
// time. Groups take a SCIM token too, with the tenant in X-Tenant (or the only one that
// the cell is configured with); a bearer token that is scoped to a tenant may read them,
// and writes none: what a tenant's token wrote would be no word of the provider. Either
// way the tenant is checked before anything is read or written.
//
// # When something fails
//
//   - The store, the cell's first row or the tenancy cannot be read: 503 with
//     Retry-After, and the provider sends it again. Nothing was written.
//   - Two writes of one resource meet: the later is tried again on what the first left,
//     three times, then 503.
//   - Another cell's token, a malformed one that names a cell, none: 401.
//   - A token that names another cell in the settings: the process does not boot.
package scim
