// SPDX-License-Identifier: Apache-2.0

// Package login signs a person in from a command line, at the host of the cell that
// holds a tenant.
//
//	host given --lookup--> cell's host --its metadata--> provider --a fresh flow--> token
//
// # Who is authoritative
//
// The router says which cell, the cell's own host says which provider, the provider
// says who it is. A flow begins at the cell's host and ends there: nothing of it is
// carried from one cell to another.
//
// # The lookup
//
//   - A host: the flow is that cell's.
//   - NO_CELL, or 404 from a deployment that has no router: the host that was given.
//   - 429: it is asked again after its Retry-After, for at most Config.Wait, and then
//     refused as a refusal for the pace.
//   - Anything else: refused, naming the router. No flow begins at a cell that may not
//     hold the tenant.
//
// # What a provider says
//
// Its document's addresses are checked before one is asked, shown or opened
// ([CheckAddress]), answers are bounded at 1 MiB, and its texts are shown without what a
// terminal would act on ([Printable]); so is every error's text.
//
// # When something fails
//
// No token is returned that was not verified: state and nonce are this flow's, the code
// is redeemed with its verifier (PKCE), the identity token is the provider's and for this
// client. A browser that comes back with another state is answered and ignored. What was
// begun is abandoned when the context ends; nothing is stored then.
package login
