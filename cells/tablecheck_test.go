// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"reflect"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// What decodes is a row that every table takes, and its form is stable.
func FuzzDecodeRoute(f *testing.F) {
	f.Add([]byte(`{"tenant":"t","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"revision":0}`))
	f.Add([]byte(`{"tenant":"t","state":"COPYING","cell":"a","epoch":8,"floor":8,"move":"m","source":"a","target":"b","base":7,` +
		`"deadline":"2031-02-03T04:05:06.789+03:00","residue":[{"cell":"c","epoch":3,"move":"x"}],"reason":"\u0001","revision":9}`))
	f.Add([]byte(`{"tenant":"t","state":"ACTIVE","cell":"a","epoch":18446744073709551615}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := cells.DecodeRoute(b)
		if err != nil {
			return
		}
		if err := cells.ValidateRoute(r); err != nil {
			t.Fatalf("%s: decoded a row that is refused: %v", b, err)
		}
		enc, err := cells.EncodeRoute(r)
		if err != nil {
			t.Fatal(err)
		}
		again, err := cells.DecodeRoute(enc)
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%s: became %s, then %+v, %v", b, enc, again, err)
		}
	})
}
