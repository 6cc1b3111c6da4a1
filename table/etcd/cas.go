// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/cloister-dev/cloister/cells"
)

// settleVersions bounds how far back a row's history is followed.
const settleVersions = 16

// CompareAndSet implements [cells.RoutingTable]. An error that wraps neither
// [cells.ErrConflict] nor [cells.ErrInvalid] leaves the outcome unknown.
func (t *Table) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	next = cells.CanonicalRoute(next)
	next.Revision = 0
	if err := cells.ValidateRoute(next); err != nil {
		return cells.TenantRoute{}, err
	}
	enc, err := encode(next)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	cur, err := t.read(ctx, next.TenantID)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	if cur.Revision != old {
		return cells.TenantRoute{}, fmt.Errorf("%w: %s is at revision %d, not %d", cells.ErrConflict, next.TenantID, cur.Revision, old)
	}
	if err := cells.ValidateChange(cur, next); err != nil {
		return cells.TenantRoute{}, err
	}
	revision, err := t.swap(ctx, t.routes+string(next.TenantID), int64(old), enc)
	if err != nil {
		if t.life.Err() != nil {
			return cells.TenantRoute{}, errTableClosed
		}
		if revision, err = t.settle(ctx, next, int64(old), enc, err); err != nil {
			return cells.TenantRoute{}, err
		}
	}
	if revision == 0 {
		return cells.TenantRoute{}, fmt.Errorf("%w: %s has left revision %d", cells.ErrConflict, next.TenantID, old)
	}
	next.Revision = cells.Revision(revision)
	return next, nil
}

// swap sends the transaction, once. It returns the revision of the write, 0 if the
// key was at another one, or the client's error.
func (t *Table) swap(ctx context.Context, key string, old int64, enc []byte) (int64, error) {
	c, done := t.call(ctx)
	defer done()
	res, err := t.client.Txn(c).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", old)).
		Then(clientv3.OpPut(key, string(enc))).
		Commit()
	if err != nil || !res.Succeeded {
		return 0, err
	}
	return res.Header.Revision, nil
}

// settle finds out what became of a transaction whose answer was an error: the
// revision of its write, 0 if another write won, or an error that says that the
// outcome is unknown.
func (t *Table) settle(ctx context.Context, next cells.TenantRoute, old int64, enc []byte, cause error) (int64, error) {
	unknown := t.failed(ctx, "changing the route of "+string(next.TenantID)+", whose outcome is unknown", cause)
	if ctx.Err() != nil || next.Stamp == "" {
		return 0, unknown
	}
	key := t.routes + string(next.TenantID)
	cur, err := t.version(ctx, key, 0)
	for range settleVersions {
		if err != nil || cur == nil || cur.ModRevision <= old {
			return 0, unknown // not now; it may still be carried out
		}
		var before *mvccpb.KeyValue
		if cur.Version > 1 {
			if before, err = t.version(ctx, key, cur.ModRevision-1); err != nil {
				return 0, unknown
			}
		}
		if before == nil && old == 0 || before != nil && before.ModRevision == old {
			// cur is what followed old: nothing else can follow it any more.
			if bytes.Equal(cur.Value, enc) {
				return cur.ModRevision, nil
			}
			return 0, nil
		}
		cur = before
	}
	return 0, unknown
}

// version returns the key as it was at a revision (0: now), nil if it was not there.
func (t *Table) version(ctx context.Context, key string, at int64) (*mvccpb.KeyValue, error) {
	c, done := t.call(ctx)
	defer done()
	res, err := t.client.Get(c, key, clientv3.WithRev(at))
	if err != nil || len(res.Kvs) == 0 {
		return nil, err
	}
	return res.Kvs[0], nil
}
