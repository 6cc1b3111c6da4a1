// SPDX-License-Identifier: Apache-2.0

// Package pki is a fleet's own certificate authority in a folder. It makes the
// certificates that package channel accepts, and the key that receipts are signed with.
//
// The folder is authoritative: whoever can read ca.key can be every member of
// the fleet, so it belongs on the machine of whoever operates the fleet, not on
// the cells'. It holds
//
//	ca.key       the CA's private key (ECDSA P-256, PKCS #8), mode 0600
//	ca.crt       its certificate: what every process has as CAFile
//	issued.jsonl one line for each certificate that was issued, never rewritten
//	revoked.txt  serials that no longer count: what every process has as RevokedFile
//	receipt.key  the private key of receipts (Ed25519, PKCS #8), mode 0600: for directories
//	receipt.pub  its public half, and those of older keys: for whoever verifies receipts
//
// # Failures
//
// No key is ever overwritten: files of keys are created exclusively, and a
// second NewAuthority or Issue to the same place is refused with [ErrExists].
// A certificate is recorded, durably, before it is written to its place, so a
// crash leaves a record without a certificate, never a certificate without a
// record. Certificates and the list of revoked serials are replaced atomically;
// processes that read them see the old file or the new one. A key without its
// certificate, left by a crash between the two, is completed by Renew.
package pki
