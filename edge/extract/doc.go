// SPDX-License-Identifier: Apache-2.0

// Package extract finds the tenant that a request is for.
//
// A [List] asks its extractors in their order; the first that finds a tenant
// decides. An extractor looks at the request line and the headers only, never at
// the body, and never asks another system.
//
//	extractors:
//	  - header: X-Tenant                # exactly one value; more answer BAD_REQUEST
//	  - host: "{tenant}.example.com"    # one label, lower-cased; strict: true answers 421 to other hosts
//	  - path: "/t/{tenant}/"            # strip: true forwards what is behind the tenant
//	  - jwt: {claim: org}               # read without verification: it only names the tenant
//	  - jwt: {claim: org, jwks: /etc/edge/jwks.json, algorithms: [ES256], issuer: https://id.example.com}
//	  - issuers: {"https://id.acme.example": acme}
//	  - fixed: demo
//
// Nothing here authenticates anyone. A tenant that is named by a header, a host, a
// path or an unverified token is only a destination: the service behind the edge
// decides whether the caller may act for it. A verified token is checked here as
// well, which keeps strangers away from the cell; the service still checks it.
//
// What a request gets when no tenant is found, in this order: the refusal of an
// extractor that saw something malformed or was strict (at once), UNKNOWN_ISSUER
// when a token named an issuer that nobody lists, UNKNOWN_HOST when only hosts
// are asked, else BAD_REQUEST with the ways in which a tenant can be named.
//
// The configuration is parsed strictly: unknown fields, two kinds in one entry,
// malformed patterns and algorithms outside the list are refused before any
// request is served. A key set is read when the list is made, and again, at most every
// two seconds, when its file has changed. What cannot be read then is logged, and
// the keys that were read last stay in use.
package extract
