// SPDX-License-Identifier: Apache-2.0

// Package s3 is a prefix of a bucket, in anything that speaks S3, as a
// [stores.Store].
//
// # Who is authoritative
//
// The bucket. The id of the deployment is the object _cell_deployment below the
// prefix, written only where there is none (If-None-Match); the nonce is
// _cell_probe, and the marks are _cell_isolation/<mark>. Reads ask caches not to
// answer, and the objects forbid them to.
//
// # What the bucket has to do
//
// Reads and listings show what has been written before, as S3 does since 2020. The
// credential may list the bucket below the prefix: without that, S3 answers a read of
// an object that is not there with 403, and this package with an error. On a server
// that refuses If-None-Match, the id is written after a look and read back; two
// processes that start a new deployment at the same moment may then see one of their
// ids change once, and the one that does not find its own ends.
//
// Visible lists the prefix until it finds the mark, so it takes a request for every
// thousand objects when it finds none. What has been deleted from a bucket with
// versions counts as gone.
//
// # Failures
//
// No answer, 5xx and SlowDown are [cells.ErrUnavailable], after three tries. A bucket
// that is not there, or a credential that may not, is [cells.ErrInvalid].
package s3
