// SPDX-License-Identifier: Apache-2.0

// Package idp is an OpenID Provider for tests and trials: zitadel/oidc's provider over
// users and one client that it is told of, in memory. A cell has one of its own.
//
// It is authoritative for who its users are; a cell asks it for nothing but its keys.
// Access tokens are JWTs with the user's tenant and email. The client is public and
// native: the authorization code with PKCE to a loopback address, or the device flow.
// Users sign in with a name and a password at /login, which a form or a test posts.
//
// Keys rotate by [Provider.Rotate]; what an earlier key signed verifies until
// [Provider.Retire] drops it. All of it is lost when the process ends: its tokens
// are then nobody's, and users sign in again. It keeps passwords as they are, and is
// nothing to put before people.
package idp
