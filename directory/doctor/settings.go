// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// checkSettings names each run-time setting that differs between processes, with who
// has which value: within a cell by its processes, else by the cells.
func checkSettings(ctx context.Context, x *exam) ([]Finding, error) {
	type process struct {
		cell     cells.CellID
		instance string
		settings tenancy.Settings
	}
	var all []process
	_, err := x.eachCell(ctx, func(c deploy.Cell, s tenancy.Store) ([]Finding, error) {
		beats, err := s.Heartbeats(ctx, beatAge)
		for _, h := range beats {
			if h.Settings != nil && h.Cell == c.Name {
				all = append(all, process{c.Name, h.Instance, h.Settings})
			}
		}
		return nil, err
	})
	var out []Finding
	var every []tenancy.Settings
	for _, p := range all {
		every = append(every, p.settings)
	}
	for _, name := range tenancy.Names(every...) {
		byCell := map[cells.CellID]map[string][]string{} // value -> processes
		for _, p := range all {
			v, known := p.settings[name]
			if known {
				v = fmt.Sprintf("%q", v)
			} else {
				v = "not reported"
			}
			if byCell[p.cell] == nil {
				byCell[p.cell] = map[string][]string{}
			}
			byCell[p.cell][v] = append(byCell[p.cell][v], p.instance)
		}
		uneven, values := false, map[string][]string{} // value -> cells
		for _, cell := range slices.Sorted(maps.Keys(byCell)) {
			if len(byCell[cell]) > 1 {
				uneven = true
				out = append(out, Finding{Cell: cell, Message: "setting " + name + " differs between its processes: " + who(byCell[cell])})
				continue
			}
			for v := range byCell[cell] {
				values[v] = append(values[v], string(cell))
			}
		}
		if !uneven && len(values) > 1 {
			out = append(out, Finding{Message: "setting " + name + " differs between cells: " + who(values)})
		}
	}
	return out, err
}

// who says which value is whose.
func who(values map[string][]string) string {
	var parts []string
	for _, v := range slices.Sorted(maps.Keys(values)) {
		parts = append(parts, v+" in "+strings.Join(values[v], ", "))
	}
	return strings.Join(parts, "; ")
}
