// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"strings"
)

// digestHeader says that the caller understands digests of a kind (kind:sum). Agents of
// earlier builds neither send it nor look at it, and have only plain ones.
const digestHeader = "Cell-Transfer-Digests"

// formHeader names the form in which the caller takes rows besides the plain one.
const formHeader = "Cell-Transfer-Rows"

type plainKey struct{}

// ContextWithPlainDigests asks a store for the digests that agents of earlier builds
// compute, where it has others.
func ContextWithPlainDigests(ctx context.Context) context.Context {
	return context.WithValue(ctx, plainKey{}, true)
}

// PlainDigests reports whether [ContextWithPlainDigests] was called.
func PlainDigests(ctx context.Context) bool {
	plain, _ := ctx.Value(plainKey{}).(bool)
	return plain
}

// kind is how the digest was computed; "" for a plain one.
func (d Digest) kind() string {
	kind, _, ok := strings.Cut(d.Sum, ":")
	if !ok {
		return ""
	}
	return kind
}
