// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells"
)

// maxTokens bounds the tenants whose headers are remembered.
const maxTokens = 1 << 16

// tokens makes and remembers what is said to a cell about a tenant. A token is the
// same for as long as the route stands.
type tokens struct {
	master []byte
	keys   sync.Map // cells.CellID -> []byte
	known  atomic.Pointer[sync.Map]
	count  atomic.Int64
}

// said are header values, shared by requests: never changed.
type said struct {
	cell                 cells.CellID
	epoch                cells.Epoch
	tenant, number, mint []string
}

func newTokens(master []byte) *tokens {
	t := &tokens{master: master}
	t.known.Store(new(sync.Map))
	return t
}

func (t *tokens) get(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) *said {
	known := t.known.Load()
	v, ok := known.Load(tenant)
	if ok {
		if s := v.(*said); s.cell == cell && s.epoch == epoch {
			return s
		}
	}
	s := &said{cell: cell, epoch: epoch, tenant: []string{string(tenant)}, number: []string{strconv.FormatUint(uint64(epoch), 10)}}
	if len(t.master) > 0 {
		s.mint = []string{cells.MintToken(t.key(cell), tenant, cell, epoch)}
	}
	if !ok && t.count.Add(1) > maxTokens {
		// Start anew: whoever is active is back at once.
		t.count.Store(1)
		known = new(sync.Map)
		t.known.Store(known)
	}
	known.Store(tenant, s)
	return s
}

func (t *tokens) key(cell cells.CellID) []byte {
	if k, ok := t.keys.Load(cell); ok {
		return k.([]byte)
	}
	k := cells.DeriveCellKey(t.master, cell)
	t.keys.Store(cell, k)
	return k
}
