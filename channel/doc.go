// SPDX-License-Identifier: Apache-2.0

// Package channel is the mutual TLS 1.3 connection between the processes of a
// fleet: cells among each other, and cells, edges and operators with the
// directory. It says who the peer is; what a peer may do is decided by whoever
// serves the request.
//
// # Who is authoritative
//
// The fleet's issuing CA is. A peer is who its certificate says, and a
// certificate counts only when all of this holds:
//
//   - it was issued directly by a CA of Config.CAFile: certificates that the
//     peer sends along are not used, so a chain through anybody else's
//     intermediate, or through another process's own certificate, never counts;
//   - it is inside its validity, for the usage at hand (client or server, both
//     written out), for digital signatures, and it is no CA itself;
//   - it has exactly one subject alternative name, and that is a URI
//     cell://<fleet>/<role>/<name>, read byte by byte from the certificate:
//     no second name of any kind, no user, port, query, fragment or escape;
//   - the fleet is ours, and Config.Known knows the role and name;
//   - its serial is not in Config.RevokedFile;
//   - for a client: it is one of the identities that the caller wants to reach.
//     Host names play no part.
//
// # When it is checked
//
// The server's handshake verifies the chain, and VerifyConnection, which also
// runs for resumed sessions, verifies everything again. Session tickets are off
// on both sides. [Channel.Require] looks once more at every request, and the
// client at every answer, because connections outlive a revocation or a
// certificate.
//
// # Files and failures
//
// All files are re-read when a connection or a request needs them, at most once
// in Config.ReloadEvery, and a changed file takes effect at once: rotation
// needs no restart. A file that cannot be read, a certificate that does not fit
// its key (half of a rotation), or one that names another identity leaves the
// last good state in force; the failure is logged and counted, and tried again.
// Our own certificate that has expired stays in use: peers refuse it, and
// [Channel.NotAfter] and the metrics show it long before.
//
// The package opens no listener; the ones that use it say what they expose.
package channel
