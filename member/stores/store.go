// SPDX-License-Identifier: Apache-2.0

package stores

import (
	"context"
	"errors"
)

// Sentinels beside those of package cells.
var (
	// ErrNoNonce: the store holds no nonce. Returned by ReadNonce.
	ErrNoNonce = errors.New("stores: no nonce")
	// ErrNoDeployment: the store carries no deployment id. Returned by Set.Deployment.
	ErrNoDeployment = errors.New("stores: no deployment id")
	// ErrMismatch: two stores that should belong to one deployment do not. Returned by
	// Establish, Set.Pair and Set.Deployment. Never retry unchanged.
	ErrMismatch = errors.New("stores: the stores belong to different deployments")
	// ErrShared: two cells reach one store. Returned by Isolated.
	ErrShared = errors.New("stores: two cells share a store")
)

// Kind names what a store is: lower case letters and digits, 1 to 32. A cell has at
// most one store of a kind.
type Kind string

// The kinds that have a variant here.
const (
	Postgres   Kind = "postgres"
	S3         Kind = "s3"
	ClickHouse Kind = "clickhouse"
)

// Identity is what a store says of itself.
type Identity struct {
	Kind Kind
	// Deployment is the id that the store carries; "" when it carries none yet.
	Deployment DeploymentID
	// Location is set for stores with a bucket.
	Location Location
}

// Store is one store of a cell. Every method is safe for concurrent use, asks the
// store itself each time, and ends with its context.
//
// Errors: [cells.ErrUnavailable] when the store cannot be asked, or what answers is
// a standby; [cells.ErrInvalid] when an argument or what is stored is malformed.
type Store interface {
	// Kind returns the store's kind.
	Kind() Kind
	// Location returns the bucket and prefix; the zero Location for a store without.
	Location() Location
	// Identity reads what the store carries.
	Identity(ctx context.Context) (Identity, error)
	// Establish makes the store carry id, unless it carries one already, and returns the
	// one that it carries. Of several callers at once all get the same answer. A store
	// that cannot decide between them and holds two different ids answers [ErrMismatch].
	Establish(ctx context.Context, id DeploymentID) (DeploymentID, error)

	// WriteNonce replaces the store's nonce.
	WriteNonce(ctx context.Context, n Nonce) error
	// ReadNonce reads the store's nonce now; [ErrNoNonce] when it has none.
	ReadNonce(ctx context.Context) (Nonce, error)
	// DeleteNonce removes the nonce; removing none is no error.
	DeleteNonce(ctx context.Context) error

	// Plant leaves a mark that everybody who reaches the store can see.
	Plant(ctx context.Context, m Mark) error
	// Visible reports whether a mark can be seen: anywhere below the prefix, for a store
	// with one, so that a cell whose prefix holds another's sees the other's marks.
	Visible(ctx context.Context, m Mark) (bool, error)
	// Remove removes a mark that was planted here; removing none is no error.
	Remove(ctx context.Context, m Mark) error

	// Empty reports whether the store holds nothing of any tenant: what this package
	// keeps does not count, what a cell with a prefix below keeps does. When it is not
	// empty, holds names one thing that was found, for people.
	Empty(ctx context.Context) (empty bool, holds string, err error)
}

// TenantLister is implemented by stores that can tell whose rows they hold.
type TenantLister interface {
	// Tenants returns every tenant that any table has a row of, sorted, without "", "-"
	// and "*". The caller owns the slice.
	Tenants(ctx context.Context) ([]string, error)
}
