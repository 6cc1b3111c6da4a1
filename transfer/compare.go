// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Codes of findings, as [Compare] and the stores give them.
const (
	FindEngine          = "engine"             // the two cells run different engines; blocking
	FindVersion         = "version"            // different versions of one engine; a note
	FindStandby         = "standby"            // the server is a standby; blocking
	FindTableMissing    = "table_missing"      // a tenant table is on one side only; blocking
	FindNoKey           = "no_primary_key"     // a tenant table has no primary key; blocking
	FindTenantNotInKey  = "tenant_not_in_key"  // the primary key lacks the tenant column; blocking
	FindNullKey         = "null_in_key"        // rows with NULL in the key; blocking
	FindColumns         = "columns_differ"     // names, types or collations differ; blocking
	FindKeyDiffers      = "key_differs"        // blocking
	FindSchema          = "schema_differs"     // constraints, indexes or partitions differ
	FindCollation       = "collation"          // the databases' collations differ
	FindExtension       = "extension"          // an extension is missing at the target, or older
	FindReplicaIdentity = "replica_identity"   // changes would not carry the key; blocking
	FindWALLevel        = "wal_level"          // the server does not write logical changes; blocking
	FindSlots           = "no_free_slot"       // no replication slot or sender is free; blocking
	FindPrivilege       = "privilege"          // the agent's role may not do it; blocking
	FindStatistics      = "statistics"         // the role may not see what others do; a note
	FindNotEmpty        = "target_not_empty"   // rows of the tenant that no move brought; blocking
	FindTrigger         = "trigger"            // a trigger would run on imported rows; blocking, or a note that it will not
	FindRule            = "rewrite_rule"       // a rule would rewrite imported rows; blocking
	FindSelfReference   = "self_reference"     // foreign keys in a circle, and no right to defer them; blocking
	FindForeignTenant   = "foreign_key"        // a foreign key that does not carry the tenant
	FindCrossing        = "crosses_tenants"    // rows of the tenant refer to rows of another; blocking
	FindChild           = "child_table"        // a table that is not listed refers to one that is; blocking if it holds the tenant's rows
	FindUnlisted        = "unlisted_table"     // a table with the tenant column is not listed; blocking if it holds the tenant's rows
	FindTenantType      = "tenant_column_type" // the tenant column is no plain text; blocking if it mixes tenants up
	FindUnique          = "unique"             // a unique index does not carry the tenant
	FindUnlogged        = "unlogged_table"     // its changes are in no log; blocking
	FindInheritance     = "inheritance"        // the table inherits, or is inherited from; blocking
	FindPartitioned     = "partitioned_table"  // rows travel through the root; a note
	FindGenerated       = "generated_column"   // computed again at the target; a note, or blocking in a key
	FindVirtual         = "virtual_table"      // its changes cannot be seen; blocking
	FindLongTransaction = "long_transaction"   // a view waits for transactions that write
	FindSequence        = "sequence"           // values travel, the sequence is not advanced
	FindLargeObject     = "large_object"       // only the reference travels; blocking if there is one
	FindRetention       = "wal_retention"      // the server itself does not bound what it keeps; a note
	FindDisk            = "disk"               // too little room; blocking at the target
	FindDiskUnknown     = "disk_unknown"       // how much room there is cannot be seen; a note
)

// Compare makes a preflight of what the two sides of a move say. Findings of
// either side that only matter there as a source or as a target are told apart by
// the stores through the survey of the right side.
func Compare(m cells.MoveRef, src, dst Survey) cells.Preflight {
	var p cells.Preflight
	add := func(cell cells.CellID, code, table, message, fix string) {
		p.Findings = append(p.Findings, cells.Finding{Code: code, Cell: cell, Table: table, Message: message, Fix: fix, Blocking: true})
	}
	if src.Engine != dst.Engine {
		add(m.Target, FindEngine, "", fmt.Sprintf("the source runs on %s, the target on %s", src.Engine, dst.Engine),
			"move to a cell with the same engine; rows travel in the engine's own form")
		return p
	}
	if src.Version != dst.Version {
		p.Findings = append(p.Findings, cells.Finding{Code: FindVersion, Cell: m.Target, Note: true,
			Message: fmt.Sprintf("%s %s at the source, %s at the target", src.Engine, src.Version, dst.Version),
			Fix:     "none needed: values travel as text, and both sides are compared"})
	}
	there := byName(dst)
	for _, t := range src.Tables {
		p.Rows += t.Rows
		p.Bytes += t.Bytes
		d, ok := there[t.Name]
		if !ok {
			add(m.Target, FindTableMissing, t.Name, "the source lists the table, the target does not", "run the same migrations and list the same tables on both cells")
			continue
		}
		if diff := columnDiff(t.Columns, d.Columns); diff != "" {
			add(m.Target, FindColumns, t.Name, diff, "run the same migrations on both cells")
		}
		if !slices.Equal(t.Key, d.Key) || t.TenantColumn != d.TenantColumn {
			add(m.Target, FindKeyDiffers, t.Name, fmt.Sprintf("key (%s) at the source, (%s) at the target", strings.Join(t.Key, ", "), strings.Join(d.Key, ", ")),
				"give the table the same primary key on both cells")
		}
		p.Findings = append(p.Findings, ruleDiff(m, t, d)...)
		p.Findings = append(p.Findings, sequences(m, t, d)...)
	}
	p.Findings = append(p.Findings, surroundings(m, src, dst, p.Bytes)...)
	here := byName(src)
	for _, t := range dst.Tables {
		if _, ok := here[t.Name]; !ok {
			add(m.Source, FindTableMissing, t.Name, "the target lists the table, the source does not", "run the same migrations and list the same tables on both cells")
		}
		if t.Rows > 0 && !knows(dst, m) {
			fix := "if an earlier move left them, reclaim that residue; otherwise find out who wrote them and remove them"
			add(m.Target, FindNotEmpty, t.Name, fmt.Sprintf("the target already holds rows of tenant %s", m.Tenant), fix)
		}
	}
	p.Findings = append(p.Findings, ofSide(m.Source, src, targetOnly, knows(src, m))...)
	p.Findings = append(p.Findings, ofSide(m.Target, dst, sourceOnly, false)...)
	slices.SortStableFunc(p.Findings, func(a, b cells.Finding) int {
		return strings.Compare(rank(a)+a.Table+"\x00"+a.Code, rank(b)+b.Table+"\x00"+b.Code)
	})
	speed := map[string]int64{"postgres": 60_000, "sqlite": 40_000}[src.Engine]
	p.Copy = time.Second + time.Duration(p.Rows)*time.Second/time.Duration(max(speed, 1))
	p.Pause = 60 * time.Millisecond
	return p
}

// knows reports whether the side has captured or brought rows for the move, or for
// the one that it undoes: its slot is there already, and its rows are no surprise.
func knows(s Survey, m cells.MoveRef) bool {
	return slices.Contains(s.Moves, m.ID) || m.Undoes != "" && slices.Contains(s.Moves, m.Undoes)
}

// sourceOnly are findings that say nothing about a target, targetOnly those that say
// nothing about a source.
var (
	sourceOnly = []string{FindWALLevel, FindRetention, FindPrivilege, FindLongTransaction, FindSlots, FindReplicaIdentity, FindChild, FindUnlisted, FindCrossing,
		FindForeignTenant, FindLargeObject, FindPartitioned, FindGenerated, FindNullKey}
	targetOnly = []string{FindTrigger, FindSelfReference, FindRule, FindUnique}
)

// ofSide are the findings of one side that matter there. A move that has its slot
// needs none.
func ofSide(cell cells.CellID, s Survey, not []string, begun bool) (out []cells.Finding) {
	for _, f := range s.Findings {
		if slices.Contains(not, f.Code) || begun && f.Code == FindSlots {
			continue
		}
		f.Cell = cell
		out = append(out, f)
	}
	return out
}

func rank(f cells.Finding) string {
	switch {
	case f.Blocking:
		return "0"
	case f.Note:
		return "2"
	}
	return "1"
}

func byName(s Survey) map[string]TableInfo {
	m := make(map[string]TableInfo, len(s.Tables))
	for _, t := range s.Tables {
		m[t.Name] = t
	}
	return m
}

// columnDiff says how the columns differ, whatever their order; "" if they do not.
func columnDiff(a, b []Column) string {
	var out []string
	bs := map[string]Column{}
	for _, c := range b {
		bs[c.Name] = c
	}
	for _, c := range a {
		d, ok := bs[c.Name]
		delete(bs, c.Name)
		switch {
		case !ok:
			out = append(out, fmt.Sprintf("column %s is missing at the target", c.Name))
		case d != c:
			out = append(out, fmt.Sprintf("column %s is %s at the source, %s at the target", c.Name, describe(c), describe(d)))
		}
	}
	for _, c := range b {
		if _, extra := bs[c.Name]; extra {
			out = append(out, fmt.Sprintf("column %s is missing at the source", c.Name))
		}
	}
	return strings.Join(out, "; ")
}

func describe(c Column) string {
	if c.Generated {
		return c.Type + " (generated)"
	}
	return c.Type
}

// refuse returns the error for a preflight that forbids the move, or nil.
func refuse(p cells.Preflight) error {
	if !p.Blocked() {
		return nil
	}
	var out []string
	for _, f := range p.Findings {
		if f.Blocking {
			s := string(f.Cell)
			if f.Table != "" {
				s += " table " + f.Table
			}
			out = append(out, fmt.Sprintf("%s: %s (%s): %s", s, f.Message, f.Code, f.Fix))
		}
	}
	return fmt.Errorf("%w: transfer: the move is not possible: %s", cells.ErrInvalid, strings.Join(out, "; "))
}
