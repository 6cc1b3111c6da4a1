// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// TestCompare changes one thing of two surveys that go together, for each thing that
// a comparison must find.
func TestCompare(t *testing.T) {
	m := cells.MoveRef{ID: "m1", Tenant: "t", Source: "cell-a", Target: "cell-b", Base: 1}
	make := func() Survey {
		s := Survey{Engine: "postgres", Version: "15", Collation: "C.UTF-8", Extensions: map[string]string{"citext": "1.6"}, Disk: &Disk{Free: 100 << 30, Total: 200 << 30},
			Tables: []TableInfo{{Table: guard.Table{Name: "item", TenantColumn: "tenant"}, Columns: []Column{{Name: "id", Type: "bigint"}, {Name: "tenant", Type: "text"}, {Name: "v", Type: "text"}},
				Key: []string{"tenant", "id"}, Rows: 10, Bytes: 1 << 20, Rules: []string{"CHECK (id > 0)", "INDEX btree (v)", "UNIQUE (tenant, v)"}}}}
		return s
	}
	seq := func(last, highest int64) []Sequence {
		return []Sequence{{Column: "id", Name: "public.it's", Last: last, Highest: highest}}
	}
	at := func(code string) func(*Survey) {
		return func(s *Survey) {
			s.Findings = append(s.Findings, cells.Finding{Code: code, Message: "m", Fix: "f", Blocking: true})
		}
	}
	for _, c := range []struct {
		name     string
		src, dst func(*Survey)
		code     string // "": nothing is to be found
		cell     cells.CellID
		severity string
		says     string
	}{
		{name: "alike"},
		{name: "engine", dst: func(s *Survey) { s.Engine = "sqlite" }, code: FindEngine, cell: "cell-b", severity: "blocking", says: "sqlite"},
		{name: "version", dst: func(s *Survey) { s.Version = "17" }, code: FindVersion, cell: "cell-b", severity: "note", says: "17"},
		{name: "table missing at the target", dst: func(s *Survey) { s.Tables = nil }, code: FindTableMissing, cell: "cell-b", severity: "blocking"},
		{name: "table missing at the source", src: func(s *Survey) { s.Tables = nil }, code: FindTableMissing, cell: "cell-a", severity: "blocking"},
		{name: "type", dst: func(s *Survey) { s.Tables[0].Columns[2].Type = "varchar(5)" }, code: FindColumns, cell: "cell-b", severity: "blocking", says: "varchar(5)"},
		{name: "collation of a column", dst: func(s *Survey) { s.Tables[0].Columns[2].Type += ` COLLATE "C"` }, code: FindColumns, cell: "cell-b", severity: "blocking", says: `COLLATE "C"`},
		{name: "column", dst: func(s *Survey) { s.Tables[0].Columns = s.Tables[0].Columns[:2] }, code: FindColumns, cell: "cell-b", severity: "blocking", says: "column v is missing"},
		{name: "key", dst: func(s *Survey) { s.Tables[0].Key = []string{"id", "tenant"} }, code: FindKeyDiffers, cell: "cell-b", severity: "blocking"},
		{name: "constraint of the source", dst: func(s *Survey) { s.Tables[0].Rules = s.Tables[0].Rules[1:] }, code: FindSchema, cell: "cell-b", severity: "warning", says: "the source has CHECK (id > 0)"},
		{name: "constraint of the target", src: func(s *Survey) { s.Tables[0].Rules = s.Tables[0].Rules[:2] }, code: FindSchema, cell: "cell-b", severity: "warning", says: "the target has UNIQUE (tenant, v)"},
		{name: "database collation", dst: func(s *Survey) { s.Collation = "de_DE" }, code: FindCollation, cell: "cell-b", severity: "warning", says: "de_DE"},
		{name: "extension missing", dst: func(s *Survey) { s.Extensions = nil }, code: FindExtension, cell: "cell-b", severity: "warning", says: "citext"},
		{name: "extension older", dst: func(s *Survey) { s.Extensions["citext"] = "1.4" }, code: FindExtension, cell: "cell-b", severity: "warning", says: "1.4"},
		{name: "extension of the target only", src: func(s *Survey) { s.Extensions = nil }},
		{name: "sequence behind", src: func(s *Survey) { s.Tables[0].Sequences = seq(500, 400) }, dst: func(s *Survey) { s.Tables[0].Sequences = seq(7, 0) }, code: FindSequence, cell: "cell-b", severity: "warning"},
		{name: "sequence ahead", src: func(s *Survey) { s.Tables[0].Sequences = seq(500, 400) }, dst: func(s *Survey) { s.Tables[0].Sequences = seq(400, 0) }, code: FindSequence, cell: "cell-b", severity: "note"},
		{name: "no sequence", src: func(s *Survey) { s.Tables[0].Sequences = seq(500, 400) }, code: FindSequence, cell: "cell-b", severity: "warning"},
		{name: "disk of the target", dst: func(s *Survey) { s.Disk.Free = 257 << 20 }, code: FindDisk, cell: "cell-b", severity: "blocking", says: "257.0 MiB"},
		{name: "disk of the source", src: func(s *Survey) { s.Disk.Free = 1 << 30 }, code: FindDisk, cell: "cell-a", severity: "warning", says: "1.0 GiB"},
		{name: "disk unknown", src: func(s *Survey) { s.Disk = nil }, code: FindDiskUnknown, cell: "cell-a", severity: "note"},
		{name: "target not empty", dst: func(s *Survey) { s.Tables[0].Rows = 1 }, code: FindNotEmpty, cell: "cell-b", severity: "blocking"},
		{name: "target's own import", dst: func(s *Survey) { s.Tables[0].Rows, s.Moves = 1, []cells.MoveID{"m1"} }},
		{name: "wal level of the source", src: at(FindWALLevel), code: FindWALLevel, cell: "cell-a", severity: "blocking"},
		{name: "wal level of the target", dst: at(FindWALLevel)},
		{name: "slots of the source", src: at(FindSlots), code: FindSlots, cell: "cell-a", severity: "blocking"},
		{name: "slots when one is taken", src: func(s *Survey) { at(FindSlots)(s); s.Moves = []cells.MoveID{"m1"} }},
		{name: "trigger of the source", src: at(FindTrigger)},
		{name: "trigger of the target", dst: at(FindTrigger), code: FindTrigger, cell: "cell-b", severity: "blocking"},
		{name: "rule of the target", dst: at(FindRule), code: FindRule, cell: "cell-b", severity: "blocking"},
		{name: "child of the source", src: at(FindChild), code: FindChild, cell: "cell-a", severity: "blocking"},
		{name: "child of the target", dst: at(FindChild)},
		{name: "unlogged target", dst: at(FindUnlogged), code: FindUnlogged, cell: "cell-b", severity: "blocking"},
		{name: "standby as the target", dst: at(FindStandby), code: FindStandby, cell: "cell-b", severity: "blocking"},
	} {
		t.Run(c.name, func(t *testing.T) {
			src, dst := make(), make()
			dst.Tables[0].Rows = 0
			if c.src != nil {
				c.src(&src)
			}
			if c.dst != nil {
				c.dst(&dst)
			}
			p := Compare(m, src, dst)
			if c.code == "" {
				if len(p.Findings) > 0 {
					t.Errorf("found %+v", p.Findings)
				}
				if p.Blocked() || refuse(p) != nil || c.src == nil && (p.Rows != 10 || p.Bytes != 1<<20 || p.Copy <= 0 || p.Pause <= 0) {
					t.Errorf("good: %+v", p)
				}
				return
			}
			if !slices.ContainsFunc(p.Findings, func(f cells.Finding) bool {
				return f.Code == c.code && f.Cell == c.cell && f.Severity() == c.severity && f.Fix != "" && strings.Contains(f.Message, c.says)
			}) {
				t.Errorf("found %+v", p.Findings)
			}
			if c.name != "column" && len(p.Findings) != 1 {
				t.Errorf("found more: %+v", p.Findings)
			}
			if p.Blocked() != (c.severity == "blocking") || errors.Is(refuse(p), cells.ErrInvalid) != p.Blocked() {
				t.Errorf("blocked: %v, refused: %v", p.Blocked(), refuse(p))
			}
		})
	}
	src, dst := make(), make()
	src.Tables[0].Sequences, dst.Tables[0].Sequences = seq(500, 400), seq(7, 0)
	if p := Compare(m, src, dst); !strings.Contains(p.Findings[len(p.Findings)-1].Fix, "SELECT setval('public.it''s', 1400)") {
		t.Errorf("the statement: %+v", p.Findings)
	}
}

// TestSeal: two cells with the same schema have the same fingerprint, whatever the order
// of tables and columns; each part of a schema is in it.
func TestSeal(t *testing.T) {
	make := func() Survey {
		return Survey{Tables: []TableInfo{
			{Table: guard.Table{Name: "a", TenantColumn: "t"}, Columns: []Column{{Name: "t", Type: "text"}, {Name: "id", Type: "int"}}, Key: []string{"t", "id"}, Rules: []string{"CHECK (id > 0)"}, Rows: 5},
			{Table: guard.Table{Name: "b", TenantColumn: "t"}, Columns: []Column{{Name: "t", Type: "text"}}, Key: []string{"t"}}}}
	}
	seal := func(change func(*Survey)) string {
		s := make()
		change(&s)
		if err := s.Seal(); err != nil {
			t.Fatal(err)
		}
		return s.Fingerprint
	}
	first := seal(func(*Survey) {})
	for name, change := range map[string]func(*Survey){
		"order of tables":  func(s *Survey) { slices.Reverse(s.Tables) },
		"order of columns": func(s *Survey) { slices.Reverse(s.Tables[0].Columns) },
		"rows":             func(s *Survey) { s.Tables[0].Rows = 7 },
	} {
		if seal(change) != first {
			t.Errorf("%s changes the fingerprint", name)
		}
	}
	for name, change := range map[string]func(*Survey){
		"name":   func(s *Survey) { s.Tables[1].Name = "c" },
		"column": func(s *Survey) { s.Tables[0].Columns[1].Name = "no" },
		"type":   func(s *Survey) { s.Tables[0].Columns[1].Type = "bigint" },
		"key":    func(s *Survey) { s.Tables[0].Key = []string{"id", "t"} },
		"rule":   func(s *Survey) { s.Tables[0].Rules = nil },
	} {
		if seal(change) == first {
			t.Errorf("%s does not change the fingerprint", name)
		}
	}
}
