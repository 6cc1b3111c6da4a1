// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/cloister-dev/cloister/cells"
)

// format is the version of the values that this package writes, and the newest
// that it reads.
const format = 1

// envelope is a value.
type envelope struct {
	V     int             `json:"v"`
	Route json.RawMessage `json:"route"`
}

// encode returns the value of a row; its revision is the key's and not in it.
func encode(r cells.TenantRoute) ([]byte, error) {
	r.Revision = 0
	enc, err := cells.EncodeRoute(r)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(envelope{V: format, Route: enc})
	if err != nil {
		return nil, fmt.Errorf("%w: %v", cells.ErrInvalid, err)
	}
	return b, nil
}

// decodeValue reads what encode wrote, strictly.
func decodeValue(b []byte) (cells.TenantRoute, error) {
	// The version first: of a newer format nothing else is known.
	var version struct {
		V *int `json:"v"`
	}
	if err := json.Unmarshal(b, &version); err != nil || version.V == nil || *version.V < 1 {
		return cells.TenantRoute{}, fmt.Errorf("%w: not a row of a routing table", cells.ErrInvalid)
	}
	if *version.V > format {
		return cells.TenantRoute{}, fmt.Errorf("%w: written in format %d by a newer version, this one reads up to %d; upgrade this program",
			cells.ErrInvalid, *version.V, format)
	}
	var e envelope
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		return cells.TenantRoute{}, fmt.Errorf("%w: %v", cells.ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return cells.TenantRoute{}, fmt.Errorf("%w: something follows the row", cells.ErrInvalid)
	}
	return cells.DecodeRoute(e.Route)
}

// decode makes a row of a key and its value.
func (t *Table) decode(kv *mvccpb.KeyValue) (cells.TenantRoute, error) {
	tenant := string(bytes.TrimPrefix(kv.Key, []byte(t.routes)))
	r, err := decodeValue(kv.Value)
	switch {
	case err != nil:
		return cells.TenantRoute{}, fmt.Errorf("row of %q: %w", tenant, err)
	case string(r.TenantID) != tenant || kv.ModRevision <= 0:
		return cells.TenantRoute{}, fmt.Errorf("%w: the row of %q holds tenant %q", cells.ErrInvalid, tenant, r.TenantID)
	case kv.Lease != 0:
		return cells.TenantRoute{}, fmt.Errorf("%w: the row of %q hangs on lease %x and would vanish with it; write it again without one",
			cells.ErrInvalid, tenant, kv.Lease)
	}
	r.Revision = cells.Revision(kv.ModRevision)
	return r, nil
}
