// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// damages are what may be wrong with one row of the target.
var damages = map[string]string{
	"lost":     `DELETE FROM item WHERE tenant = ?1 AND id = 'k00007'`,
	"changed":  `UPDATE item SET body = 'almost' WHERE tenant = ?1 AND id = 'k00007'`,
	"null":     `UPDATE item SET doc = NULL WHERE tenant = ?1 AND id = 'k00007'`,
	"bytes":    `UPDATE item SET ratio = ratio + 0.0000001 WHERE tenant = ?1 AND id = 'k00007'`,
	"too many": `INSERT INTO item (tenant, id, n) VALUES (?1, 'extra', 1)`,
}

// testDifferenceBefore damages the target while rows are copied.
func testDifferenceBefore(tb TB, h Harness) {
	for name, damage := range damages {
		w := newWorld(tb, h)
		w.fill(20)
		done := false
		v := h.agent(tb, w.b, transfer.WithFault(func(point string) error {
			if point == "batch" && !done && len(w.dump(w.b)) >= 20 {
				done = true
				w.must(w.b.Raw(tb.Context(), w.tenant, func(x Exec) error { return x(damage, string(w.tenant)) }))
			}
			return nil
		}))
		_, err := v.Prepare(tb.Context(), w.move("m1"), w.a.Source(), nil)
		if !done {
			tb.Fatalf("%s: nothing was damaged", name)
		}
		w.wantErr(name, err, transfer.ErrMismatch)
		if !strings.Contains(err.Error(), "item") || !strings.Contains(err.Error(), "roll the move back") {
			tb.Errorf("%s: %v", name, err)
		}
	}
}

// testDifferenceInCut damages a row that has changed since both sides were compared.
func testDifferenceInCut(tb TB, h Harness) {
	for name, damage := range damages {
		if name == "too many" {
			continue // a row that nobody wrote is not among the keys that changed
		}
		w := newWorld(tb, h)
		w.fill(20)
		m := w.move("m1")
		v := h.agent(tb, w.b, transfer.WithFollow(0))
		_, err := v.Prepare(tb.Context(), m, w.a.Source(), nil)
		w.must(err)
		w.write(func(x Exec) error { return putItem(x, w.tenant, "k00007", 77) })
		v = h.agent(tb, w.b, transfer.WithFault(func(point string) error {
			if point == "applied" {
				return w.b.Raw(tb.Context(), w.tenant, func(x Exec) error { return x(damage, string(w.tenant)) })
			}
			return nil
		}))
		_, err = w.cut(v, m, w.a.Source())
		w.wantErr(name, err, transfer.ErrMismatch)
		// Nothing is final: the source may reopen.
		w.must(w.a.Keeper().OpenFence(tb.Context(), cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}))
	}
}
