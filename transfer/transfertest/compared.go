// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// proved asks for what a finished move compared, as a driver does that repeats the
// step, and checks that it covers every row: whole tables once, all of them, and
// then only keys that changed, no later than the mark.
func (w *world) proved(v *transfer.Mover, m cells.MoveRef, mark string) {
	w.tb.Helper()
	again, list, err := v.FinishProved(w.tb.Context(), m, w.a.Source(), nil)
	w.must(err)
	if again != mark {
		w.tb.Errorf("the mark was %s, and then %s", mark, again)
	}
	survey, err := w.b.Sink().Survey(w.tb.Context(), m.Tenant)
	w.must(err)
	whole, last := map[string]int{}, ""
	for _, c := range list {
		if c.Position < last || c.Position > mark || c.Sum == "" || c.Whole != (c.Keys == 0) {
			w.tb.Errorf("comparison %+v after one at %s, with the mark at %s", c, last, mark)
		}
		last = c.Position
		if c.Whole {
			whole[c.Table]++
		}
	}
	for _, t := range survey.Tables {
		if whole[t.Name] != 1 {
			w.tb.Errorf("table %s was compared %d times as a whole: %+v", t.Name, whole[t.Name], list)
		}
	}
}
