// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// ruleDiff says what one side asks of a table's rows and the other does not.
func ruleDiff(m cells.MoveRef, src, dst TableInfo) (out []cells.Finding) {
	for _, d := range []struct {
		cell cells.CellID
		a, b []string
		say  string
		fix  string
	}{
		{m.Target, src.Rules, dst.Rules, "the source has %s, the target does not", "run the same migrations on both cells"},
		{m.Target, dst.Rules, src.Rules, "the target has %s, the source does not: rows that do not satisfy it would end the move", "run the same migrations on both cells"},
	} {
		var extra []string
		for _, r := range d.a {
			if !slices.Contains(d.b, r) {
				extra = append(extra, r)
			}
		}
		if len(extra) > 0 {
			out = append(out, cells.Finding{Code: FindSchema, Cell: d.cell, Table: src.Name, Message: fmt.Sprintf(d.say, strings.Join(extra, ", ")), Fix: d.fix})
		}
	}
	return out
}

// sequences compares where the target's sequences stand with the values that arrive.
func sequences(m cells.MoveRef, src, dst TableInfo) (out []cells.Finding) {
	for _, s := range src.Sequences {
		f := cells.Finding{Code: FindSequence, Cell: m.Target, Table: src.Name}
		at := slices.IndexFunc(dst.Sequences, func(d Sequence) bool { return d.Column == s.Column })
		switch {
		case at < 0:
			f.Message = fmt.Sprintf("column %s gets its values from a sequence at the source, at the target it does not", s.Column)
			f.Fix = "run the same migrations on both cells"
		case dst.Sequences[at].Last < s.Highest:
			d := dst.Sequences[at]
			f.Message = fmt.Sprintf("column %s: sequence %s of the target stands at %d, the tenant has values up to %d, which the target would give out again", s.Column, d.Name, d.Last, s.Highest)
			f.Fix = fmt.Sprintf("before the move, at the target: SELECT setval('%s', %d), with room for what is written until the cut; or give the cells ranges of their own, or use uuids",
				strings.ReplaceAll(d.Name, "'", "''"), s.Highest+max(1000, s.Highest/100))
		default:
			f.Note = true
			f.Message = fmt.Sprintf("values of column %s travel; sequence %s of the target stands at %d, beyond the tenant's highest, %d, and is not touched", s.Column, dst.Sequences[at].Name, dst.Sequences[at].Last, s.Highest)
			f.Fix = "none needed, unless values must be unique in all cells: then give the cells ranges of their own, or use uuids"
		}
		out = append(out, f)
	}
	return out
}

// surroundings compares what the tables live in.
func surroundings(m cells.MoveRef, src, dst Survey, bytes int64) (out []cells.Finding) {
	if src.Collation != dst.Collation {
		out = append(out, cells.Finding{Code: FindCollation, Cell: m.Target, Message: fmt.Sprintf("the database's collation is %s at the source, %s at the target: text sorts and compares differently", src.Collation, dst.Collation),
			Fix: "make the databases of all cells with the same locale, or give the columns a collation of their own"})
	}
	for _, name := range slices.Sorted(maps.Keys(src.Extensions)) {
		have, ok := dst.Extensions[name]
		switch {
		case !ok:
			out = append(out, cells.Finding{Code: FindExtension, Cell: m.Target, Message: fmt.Sprintf("extension %s %s is missing at the target", name, src.Extensions[name]), Fix: "CREATE EXTENSION " + name + " at the target, if the service uses it"})
		case have != src.Extensions[name]:
			out = append(out, cells.Finding{Code: FindExtension, Cell: m.Target, Message: fmt.Sprintf("extension %s is %s at the source, %s at the target", name, src.Extensions[name], have), Fix: "ALTER EXTENSION " + name + " UPDATE"})
		}
	}
	return append(out, room(m, src, dst, bytes)...)
}

// spareBytes is the room that a target should have besides the tenant's rows.
const spareBytes = 256 << 20

// room judges the disks of both sides.
func room(m cells.MoveRef, src, dst Survey, bytes int64) (out []cells.Finding) {
	for _, side := range []struct {
		cell cells.CellID
		disk *Disk
	}{{m.Source, src.Disk}, {m.Target, dst.Disk}} {
		if side.disk == nil {
			out = append(out, cells.Finding{Code: FindDiskUnknown, Cell: side.cell, Note: true, Message: "the room on the database's disk cannot be seen from the agent's machine",
				Fix: "look yourself; or run the agent on the database's machine, with a role that has pg_read_all_settings"})
		}
	}
	// Rows, their indexes and the log of both.
	if need := 3*bytes + spareBytes; dst.Disk != nil && dst.Disk.Free < need {
		out = append(out, cells.Finding{Code: FindDisk, Cell: m.Target, Blocking: true, Message: fmt.Sprintf("%s are free on the database's disk, the move needs about %s", human(dst.Disk.Free), human(need)),
			Fix: "make room, or move to another cell"})
	}
	if src.Disk != nil && src.Disk.Free < DefaultMaxRetained {
		out = append(out, cells.Finding{Code: FindDisk, Cell: m.Source, Message: fmt.Sprintf("%s are free on the database's disk; a move may keep up to %s of changes there", human(src.Disk.Free), human(DefaultMaxRetained)),
			Fix: "make room, or set a limit (--max-retained) below what is free"})
	}
	return out
}

// human writes a number of bytes for people.
func human(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}
