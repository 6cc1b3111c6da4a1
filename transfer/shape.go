// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"fmt"
	"slices"

	"github.com/cloister-dev/cloister/cells"
)

// Shape is a fingerprint of each listed table of one database, by the table's name.
// It covers what a running move depends on: which table it is (one that was dropped
// and made again is another), its columns with their types and collations, its keys
// and constraints, the service's triggers. Indexes may come and go. Tables that are not
// listed and look like a tenant's, by a tenant column or a foreign key to a listed
// table, are in it by their names: one that comes during a move would be left behind. Shapes of two
// databases differ even if their tables are alike; to compare cells there is
// [Survey].
type Shape map[string]string

// Same returns nil if now is the shape that s was, and otherwise an error that wraps
// [ErrSchemaChanged] and names a table and the cell.
func (s Shape) Same(now Shape, cell cells.CellID) error {
	var changed []string
	for name, sum := range s {
		if now[name] != sum {
			changed = append(changed, name)
		}
	}
	for name := range now {
		if _, known := s[name]; !known {
			changed = append(changed, name)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	slices.Sort(changed)
	return SchemaChanged(cell, changed[0])
}

// SchemaChanged is the error for a table whose shape has changed during a move.
func SchemaChanged(cell cells.CellID, table string) error {
	return fmt.Errorf("%w: table %s of cell %s was altered, made, made anew, truncated or rewritten while it was being moved; "+
		"finish the migration on both cells, then move again", ErrSchemaChanged, table, cell)
}
