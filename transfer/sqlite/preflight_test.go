// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/sqlite"
)

const badTables = `
CREATE TABLE nokey (tenant TEXT, id INTEGER);
CREATE TABLE notinkey (id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT);
CREATE TABLE nocolumn (id INTEGER PRIMARY KEY);
CREATE TABLE nulls (tenant TEXT NOT NULL, id TEXT, PRIMARY KEY (tenant, id));
INSERT INTO nulls VALUES ('t', NULL);
CREATE TABLE wide (tenant TEXT, a, b, c, d, e, f, g, h, i, PRIMARY KEY (tenant, a, b, c, d, e, f, g, h, i));
CREATE TABLE trig (tenant TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (tenant, id));
CREATE TRIGGER mine AFTER INSERT ON trig BEGIN SELECT 1; END;
CREATE TABLE country (code TEXT PRIMARY KEY);
CREATE TABLE loose (tenant TEXT NOT NULL, id INTEGER NOT NULL, code TEXT UNIQUE REFERENCES country, PRIMARY KEY (tenant, id));
CREATE TABLE forgotten (tenant TEXT, id INTEGER);
CREATE TABLE kept (tenant TEXT, id INTEGER); INSERT INTO kept VALUES ('t', 1), ('u', 2);
CREATE TABLE cache (tenant TEXT, id INTEGER); INSERT INTO cache VALUES ('t', 1);
CREATE TABLE numbers (tenant INTEGER, id INTEGER);
CREATE TABLE parent (tenant TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (tenant, id)); INSERT INTO parent VALUES ('t', 1), ('u', 1);
CREATE TABLE kid (id INTEGER PRIMARY KEY, owner TEXT, pid INTEGER, FOREIGN KEY (owner, pid) REFERENCES parent); INSERT INTO kid VALUES (1, 't', 1);
CREATE TABLE kid2 (id INTEGER PRIMARY KEY, owner TEXT, pid INTEGER, FOREIGN KEY (owner, pid) REFERENCES parent (tenant, id)); INSERT INTO kid2 VALUES (1, 'u', 1);
CREATE TABLE boss (tenant TEXT NOT NULL, id INTEGER NOT NULL UNIQUE, over INTEGER REFERENCES boss (id), PRIMARY KEY (tenant, id)); INSERT INTO boss VALUES ('u', 1, NULL), ('t', 2, 1);
CREATE TABLE peer (tenant TEXT NOT NULL, id INTEGER NOT NULL UNIQUE, next INTEGER REFERENCES peer (id), PRIMARY KEY (tenant, id)); INSERT INTO peer VALUES ('u', 1, NULL), ('u', 3, 1), ('t', 2, 2);
CREATE TABLE mixed (tenant TEXT NOT NULL COLLATE NOCASE, id INTEGER NOT NULL, PRIMARY KEY (tenant, id));
CREATE TABLE counted (tenant INTEGER NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (tenant, id));
CREATE TABLE gen (tenant TEXT NOT NULL, id INTEGER NOT NULL, twice INTEGER AS (id * 2), PRIMARY KEY (tenant, id));
CREATE VIRTUAL TABLE words USING fts5 (tenant, id);
CREATE TABLE good (tenant TEXT NOT NULL, id INTEGER NOT NULL, v TEXT CHECK (v <> '(') COLLATE NOCASE, PRIMARY KEY (tenant, id), UNIQUE (tenant, v)) WITHOUT ROWID, STRICT;
CREATE INDEX good_part ON good (tenant, v DESC) WHERE id > 5;
INSERT INTO good VALUES ('t', 1, 'a'), ('t', 2, NULL), ('u', 1, 'a');
CREATE TABLE better (tenant TEXT NOT NULL, id INTEGER NOT NULL, good INTEGER, PRIMARY KEY (tenant, id), FOREIGN KEY (tenant, good) REFERENCES good ON DELETE CASCADE);`

func TestPreflight(t *testing.T) {
	var tables []guard.Table
	for _, n := range []string{"nokey", "notinkey", "nocolumn", "nulls", "wide", "trig", "loose", "parent", "boss", "peer", "mixed", "counted", "gen", "words", "good", "better", "missing"} {
		tables = append(tables, guard.Table{Name: n, TenantColumn: "tenant"})
	}
	s, err := newRig(t, "cell-a", badTables, tables, "cache").store.Survey(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []struct{ code, table, severity string }{
		{transfer.FindNoKey, "nokey", "blocking"},
		{transfer.FindTenantNotInKey, "notinkey", "blocking"},
		{transfer.FindSequence, "notinkey", "note"},
		{transfer.FindTenantNotInKey, "nocolumn", "blocking"},
		{transfer.FindNullKey, "nulls", "blocking"},
		{transfer.FindNoKey, "wide", "blocking"},
		{transfer.FindTrigger, "trig", "blocking"},
		{transfer.FindForeignTenant, "loose", "warning"},
		{transfer.FindUnique, "loose", "warning"},
		{transfer.FindForeignTenant, "peer", "warning"},
		{transfer.FindCrossing, "boss", "blocking"},
		{transfer.FindChild, "kid", "blocking"},
		{transfer.FindChild, "kid2", "warning"},
		{transfer.FindUnlisted, "forgotten", "warning"},
		{transfer.FindUnlisted, "kept", "blocking"},
		{transfer.FindTenantType, "numbers", "warning"},
		{transfer.FindTenantType, "mixed", "blocking"},
		{transfer.FindTenantType, "counted", "blocking"},
		{transfer.FindGenerated, "gen", "note"},
		{transfer.FindVirtual, "words", "blocking"},
		{transfer.FindTableMissing, "missing", "blocking"},
	} {
		if !slices.ContainsFunc(s.Findings, func(f cells.Finding) bool {
			return f.Code == w.code && f.Table == w.table && f.Severity() == w.severity
		}) {
			t.Errorf("no finding %+v", w)
		}
	}
	for _, f := range s.Findings {
		if f.Fix == "" || f.Message == "" {
			t.Errorf("finding %+v says too little", f)
		}
		switch f.Table {
		case "good", "better", "parent", "cache", "":
			t.Errorf("nothing is wrong with %q: %+v", f.Table, f)
		}
	}
	at := slices.IndexFunc(s.Tables, func(i transfer.TableInfo) bool { return i.Name == "good" })
	if good := s.Tables[at]; good.Rows != 2 || good.Bytes <= 0 || len(good.Columns) != 3 {
		t.Errorf("good: %+v", good)
	}
	want := []string{"CHECK (v <> '(')", "INDEX (tenant COLLATE BINARY, v COLLATE NOCASE DESC) WHERE id > 5", "STRICT", "UNIQUE INDEX (tenant COLLATE BINARY, v COLLATE NOCASE)", "WITHOUT ROWID", "id NOT NULL", "tenant NOT NULL"}
	if got := s.Tables[at].Rules; !slices.Equal(got, want) {
		t.Errorf("rules of good: %q", got)
	}
	at = slices.IndexFunc(s.Tables, func(i transfer.TableInfo) bool { return i.Name == "better" })
	if got := s.Tables[at].Rules; !slices.Contains(got, "FOREIGN KEY (tenant, good) REFERENCES good (, ) ON DELETE CASCADE ON UPDATE NO ACTION") {
		t.Errorf("rules of better: %q", got)
	}
	if s.Fingerprint == "" || s.Version == "" || s.Disk == nil || s.Disk.Free <= 0 {
		t.Errorf("survey %+v", s)
	}
	if _, err := sqlite.Open(t.Context(), sqlite.Config{}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("empty config: %v", err)
	}
}
