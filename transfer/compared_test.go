// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"fmt"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func TestFold(t *testing.T) {
	sets := []KeySet{{Table: "a", Count: 2}, {Table: "a", Count: 3}, {Table: "b", Count: 1}}
	digests := []Digest{{"a", 2, "x"}, {"a", 1, "y"}, {"b", 1, "z"}}
	got := fold("P", sets, digests)
	if len(got) != 2 || got[0].Keys != 5 || got[0].Rows != 3 || got[0].Whole || got[1] != (cells.Comparison{Table: "b", Position: "P", Keys: 1, Rows: 1, Sum: "z"}) {
		t.Fatalf("%+v", got)
	}
	// Any digest of any set shows in the folded one.
	for i := range 2 {
		other := append([]Digest(nil), digests...)
		other[i].Sum = "other"
		if fold("P", sets, other)[0].Sum == got[0].Sum {
			t.Errorf("digest %d does not show", i)
		}
	}
}

func TestComparedIsBounded(t *testing.T) {
	whole := []cells.Comparison{{Table: "a", Whole: true}, {Table: "b", Whole: true}}
	list := compared([]cells.Comparison{{Table: "a", Keys: 1, Sum: "stale"}}, whole)
	for i := range 3 * maxCompared {
		list = compared(list, []cells.Comparison{{Table: "a", Keys: 1, Sum: fmt.Sprint(i)}})
	}
	list = compared(list, nil)
	if len(list) != maxCompared+2 || !list[0].Whole || !list[1].Whole || list[2].Sum != fmt.Sprint(2*maxCompared) || list[len(list)-1].Sum != fmt.Sprint(3*maxCompared-1) {
		t.Errorf("%d comparisons, %+v .. %+v", len(list), list[:3], list[len(list)-1])
	}
}
