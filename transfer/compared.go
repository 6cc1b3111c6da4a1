// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
)

// maxCompared bounds the comparisons that an import keeps besides those of whole
// tables; the oldest go first.
const maxCompared = 256

// fold makes one comparison of each table's sets, which are in the order of their
// tables. Keys come in sets of a bounded size: a table with several gets the SHA-256
// of their digests, one a line.
func fold(position string, sets []KeySet, digests []Digest) []cells.Comparison {
	var out []cells.Comparison
	for i := 0; i < len(sets); {
		c := cells.Comparison{Table: sets[i].Table, Position: position, Whole: sets[i].All, Sum: digests[i].Sum}
		sum := sha256.New()
		n := 0
		for ; i < len(sets) && sets[i].Table == c.Table && sets[i].All == c.Whole; i++ {
			c.Keys += sets[i].Count
			c.Rows += digests[i].Rows
			fmt.Fprintf(sum, "%d %s\n", digests[i].Rows, digests[i].Sum)
			n++
		}
		if n > 1 {
			c.Sum = "sha256:" + hex.EncodeToString(sum.Sum(nil))
		}
		out = append(out, c)
	}
	return out
}

// compared adds what was found to what was compared before. A comparison of whole
// tables makes the earlier ones say nothing any more.
func compared(before, found []cells.Comparison) []cells.Comparison {
	if len(found) == 0 {
		return before
	}
	if found[0].Whole {
		return found
	}
	out := make([]cells.Comparison, 0, len(before)+len(found))
	drop := -maxCompared + len(found)
	for _, c := range before {
		if !c.Whole {
			drop++
		}
	}
	for _, c := range before {
		if !c.Whole && drop > 0 {
			drop--
			continue
		}
		out = append(out, c)
	}
	return append(out, found...)
}
