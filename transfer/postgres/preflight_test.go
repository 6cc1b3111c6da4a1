// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardpostgres "github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/transfer"
	"github.com/cloister-dev/cloister/transfer/postgres"
)

const badTables = `
CREATE TABLE nokey (tenant text, id int);
CREATE TABLE notinkey (tenant text, id int PRIMARY KEY);
CREATE TABLE nocolumn (id int PRIMARY KEY);
CREATE TABLE noident (tenant text, id int, PRIMARY KEY (tenant, id)); ALTER TABLE noident REPLICA IDENTITY NOTHING;
CREATE TABLE otherident (tenant text NOT NULL, id int NOT NULL, PRIMARY KEY (tenant, id)); CREATE UNIQUE INDEX oi ON otherident (id); ALTER TABLE otherident REPLICA IDENTITY USING INDEX oi;
CREATE TABLE seq (tenant text, id bigserial, at bigint GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (tenant, id));
CREATE TABLE lob (tenant text, id int, o oid, PRIMARY KEY (tenant, id));
CREATE TABLE tree (tenant text, id int, parent int, PRIMARY KEY (tenant, id), FOREIGN KEY (tenant, parent) REFERENCES tree (tenant, id));
CREATE TABLE trig (tenant text, id int, PRIMARY KEY (tenant, id));
CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER mine BEFORE INSERT ON trig FOR EACH ROW EXECUTE FUNCTION f();
CREATE TABLE country (code text PRIMARY KEY);
CREATE TABLE loose (tenant text, id int, code text REFERENCES country, PRIMARY KEY (tenant, id));
CREATE TABLE rls (tenant text, id int, PRIMARY KEY (tenant, id)); ALTER TABLE rls ENABLE ROW LEVEL SECURITY;
CREATE TABLE forgotten (tenant text, id int);
CREATE TABLE kept (tenant text, id int); INSERT INTO kept VALUES ('t', 1), ('u', 2);
CREATE TABLE cache (tenant text, id int); INSERT INTO cache VALUES ('t', 1);
CREATE TABLE numbers (tenant int, id int);
CREATE TABLE parent (tenant text, id int, PRIMARY KEY (tenant, id)); INSERT INTO parent VALUES ('t', 1), ('u', 1);
CREATE TABLE kid (id int PRIMARY KEY, owner text, pid int, FOREIGN KEY (owner, pid) REFERENCES parent); INSERT INTO kid VALUES (1, 't', 1);
CREATE TABLE kid2 (id int PRIMARY KEY, owner text, pid int, FOREIGN KEY (owner, pid) REFERENCES parent); INSERT INTO kid2 VALUES (1, 'u', 1);
CREATE TABLE boss (tenant text, id int UNIQUE, over int REFERENCES boss (id), PRIMARY KEY (tenant, id)); INSERT INTO boss VALUES ('u', 1, NULL), ('t', 2, 1);
CREATE TABLE peer (tenant text, id int UNIQUE, next int REFERENCES peer (id), PRIMARY KEY (tenant, id)); INSERT INTO peer VALUES ('u', 1, NULL), ('u', 3, 1), ('t', 2, 2);
CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE TABLE mixed (tenant text COLLATE blind, id int, PRIMARY KEY (tenant, id));
CREATE TABLE padded (tenant char(5), id int, PRIMARY KEY (tenant, id));
CREATE TABLE typed (tenant uuid, id int, PRIMARY KEY (tenant, id));
CREATE UNLOGGED TABLE unlogged (tenant text, id int, PRIMARY KEY (tenant, id));
CREATE TABLE ancestor (tenant text, id int, PRIMARY KEY (tenant, id)); CREATE TABLE heir () INHERITS (ancestor);
CREATE TABLE parts (tenant text, id int, PRIMARY KEY (tenant, id)) PARTITION BY HASH (id); CREATE TABLE parts0 PARTITION OF parts FOR VALUES WITH (MODULUS 1, REMAINDER 0);
CREATE TABLE gen (tenant text, id int, twice int GENERATED ALWAYS AS (id * 2) STORED, PRIMARY KEY (tenant, id));
CREATE TABLE genkey (tenant text, id int, twice int GENERATED ALWAYS AS (id * 2) STORED, PRIMARY KEY (tenant, twice));
CREATE TABLE ruled (tenant text, id int, PRIMARY KEY (tenant, id)); CREATE RULE nothing AS ON INSERT TO ruled DO INSTEAD NOTHING;
CREATE TABLE always (tenant text, id int, PRIMARY KEY (tenant, id)); CREATE TRIGGER forever BEFORE INSERT ON always FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE always ENABLE ALWAYS TRIGGER forever;
CREATE TABLE lobs (tenant text, id int, o oid, PRIMARY KEY (tenant, id)); INSERT INTO lobs VALUES ('t', 1, lo_create(0));
CREATE TABLE good (tenant text, id int, v text, PRIMARY KEY (tenant, id), UNIQUE (tenant, v), CHECK (id > 0)); CREATE INDEX ON good (tenant, v DESC) WHERE id > 5; INSERT INTO good VALUES ('t', 1);
CREATE TABLE better (tenant text, id int, good int, PRIMARY KEY (tenant, id), FOREIGN KEY (tenant, good) REFERENCES good);
INSERT INTO seq (tenant) VALUES ('u'), ('u'), ('t');
`

func TestPreflight(t *testing.T) {
	url := pgtest.DB(t)
	ctx := t.Context()
	admin, err := pgxpool.New(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	var tables []guard.Table
	for _, n := range []string{"nokey", "notinkey", "nocolumn", "noident", "otherident", "seq", "lob", "tree", "trig", "loose", "rls", "missing",
		"parent", "boss", "peer", "mixed", "padded", "typed", "unlogged", "ancestor", "parts", "gen", "genkey", "ruled", "always", "lobs", "good", "better"} {
		tables = append(tables, guard.Table{Name: n, TenantColumn: "tenant"})
	}
	survey := func(pool *pgxpool.Pool) transfer.Survey {
		t.Helper()
		g, err := guardpostgres.New(pool)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		s, err := postgres.Open(ctx, postgres.Config{Pool: pool, Keeper: g, Admit: g.AdmitClosed, Tables: tables, Stay: []string{"cache"}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		out, err := s.Survey(ctx, "t")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range out.Findings {
			if f.Fix == "" || f.Message == "" {
				t.Errorf("finding %+v says too little", f)
			}
		}
		return out
	}
	if _, err := admin.Exec(ctx, badTables); err != nil {
		t.Fatal(err)
	}
	g, err := guardpostgres.New(admin)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Install(ctx, nil); err != nil {
		t.Fatal(err)
	}
	want := func(s transfer.Survey, code, table, severity string) {
		t.Helper()
		if !slices.ContainsFunc(s.Findings, func(f cells.Finding) bool { return f.Code == code && f.Table == table && f.Severity() == severity }) {
			t.Errorf("no finding %s of %q, %s", code, table, severity)
		}
	}
	s := survey(admin)
	for _, w := range []struct{ code, table, severity string }{
		{transfer.FindNoKey, "nokey", "blocking"},
		{transfer.FindTenantNotInKey, "notinkey", "blocking"},
		{transfer.FindTenantNotInKey, "nocolumn", "blocking"},
		{transfer.FindReplicaIdentity, "noident", "blocking"},
		{transfer.FindReplicaIdentity, "otherident", "blocking"},
		{transfer.FindUnique, "otherident", "warning"},
		{transfer.FindLargeObject, "lob", "warning"},
		{transfer.FindLargeObject, "lobs", "blocking"},
		{transfer.FindForeignTenant, "loose", "warning"},
		{transfer.FindForeignTenant, "peer", "warning"},
		{transfer.FindCrossing, "boss", "blocking"},
		{transfer.FindChild, "kid", "blocking"},
		{transfer.FindChild, "kid2", "warning"},
		{transfer.FindUnlisted, "forgotten", "warning"},
		{transfer.FindUnlisted, "kept", "blocking"},
		{transfer.FindTenantType, "numbers", "warning"},
		{transfer.FindTenantType, "mixed", "blocking"},
		{transfer.FindTenantType, "padded", "warning"},
		{transfer.FindTenantType, "typed", "blocking"},
		{transfer.FindUnlogged, "unlogged", "blocking"},
		{transfer.FindInheritance, "ancestor", "blocking"},
		{transfer.FindPartitioned, "parts", "note"},
		{transfer.FindGenerated, "gen", "note"},
		{transfer.FindGenerated, "genkey", "blocking"},
		{transfer.FindRule, "ruled", "blocking"},
		{transfer.FindTrigger, "trig", "note"},
		{transfer.FindTrigger, "always", "blocking"},
		{transfer.FindTableMissing, "missing", "blocking"},
		{transfer.FindRetention, "", "note"},
	} {
		want(s, w.code, w.table, w.severity)
	}
	for _, f := range s.Findings {
		switch f.Table {
		case "good", "better", "tree", "rls", "parent", "cache", "seq":
			t.Errorf("a superuser may move %s: %+v", f.Table, f)
		case "":
			if f.Severity() != "note" {
				t.Errorf("this server is good: %+v", f)
			}
		}
	}
	at := slices.IndexFunc(s.Tables, func(i transfer.TableInfo) bool { return i.Name == "good" })
	wantRules := []string{"CHECK ((id > 0))", "INDEX btree (tenant, v DESC) WHERE (id > 5)", "UNIQUE (tenant, v)", "id NOT NULL", "tenant NOT NULL"}
	if got := s.Tables[at].Rules; !slices.Equal(got, wantRules) {
		t.Errorf("rules of good: %q", got)
	}
	at = slices.IndexFunc(s.Tables, func(i transfer.TableInfo) bool { return i.Name == "seq" })
	if got := s.Tables[at].Sequences; len(got) != 2 || got[1].Column != "id" || got[1].Last != 3 || got[1].Highest != 3 || got[1].Name != "public.seq_id_seq" {
		t.Errorf("sequences of seq: %+v", got)
	}
	if s.Disk == nil || s.Collation == "" || s.Extensions == nil {
		t.Errorf("surroundings: disk %+v, collation %q, extensions %v", s.Disk, s.Collation, s.Extensions)
	}
	// An ordinary role, that owns nothing and may not do a thing.
	for _, q := range []string{"DROP ROLE IF EXISTS plain", "CREATE ROLE plain LOGIN PASSWORD 'plain'", "GRANT USAGE ON SCHEMA cell, public TO plain", "GRANT SELECT ON ALL TABLES IN SCHEMA cell, public TO plain"} {
		if _, err := admin.Exec(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		_, _ = admin.Exec(context.Background(), "DROP OWNED BY plain; DROP ROLE plain")
	}()
	cfg := admin.Config()
	cfg.ConnConfig.User, cfg.ConnConfig.Password = "plain", "plain"
	cfg.ConnConfig.RuntimeParams = map[string]string{}
	plain, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if err := plain.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	s = survey(plain)
	want(s, transfer.FindPrivilege, "", "blocking")
	want(s, transfer.FindPrivilege, "good", "blocking")
	want(s, transfer.FindPrivilege, "rls", "blocking")
	want(s, transfer.FindSelfReference, "tree", "blocking")
	want(s, transfer.FindTrigger, "trig", "blocking")
	want(s, transfer.FindStatistics, "", "note")
	if s.Disk != nil {
		t.Errorf("an ordinary role sees the disk: %+v", s.Disk)
	}
}

// TestPreflightOfServer: what the server's settings forbid.
func TestPreflightOfServer(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a server of its own")
	}
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true, Settings: []string{"wal_level=replica", "max_replication_slots=1", "max_slot_wal_keep_size=1GB", "max_prepared_transactions=1"}})
	url := pgtest.NewDB(t, c)
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	g, err := guardpostgres.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Install(ctx, nil); err != nil {
		t.Fatal(err)
	}
	s, err := postgres.Open(ctx, postgres.Config{Pool: pool, Keeper: g, Admit: g.AdmitClosed})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := pool.Exec(ctx, "SELECT pg_create_physical_replication_slot('taken')"); err != nil {
		t.Fatal(err)
	}
	// A transaction that has written stays open.
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(ctx, "BEGIN; CREATE TABLE x (); PREPARE TRANSACTION 'open'"); err != nil {
		t.Fatal(err)
	}
	out, err := s.Survey(ctx, "t")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, f := range out.Findings {
		got[f.Code] = f.Blocking
		if f.Code == transfer.FindLongTransaction && !strings.Contains(f.Message, `prepared transaction "open" (user postgres, database `) {
			t.Errorf("the open transaction is not named: %s", f.Message)
		}
	}
	if !got[transfer.FindWALLevel] || !got[transfer.FindSlots] {
		t.Errorf("findings %+v", out.Findings)
	}
	if _, there := got[transfer.FindLongTransaction]; !there {
		t.Errorf("an open transaction was not mentioned")
	}
	if _, there := got[transfer.FindRetention]; there {
		t.Errorf("a bounded log was complained about")
	}
}

// TestPreflightOfGroup: a move that joins a group whose slot exists needs one slot less
// than others do, and with that one it is carried.
func TestPreflightOfGroup(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a server of its own")
	}
	c := pgtest.NewCluster(t, pgcluster.Options{NoSync: true, Settings: []string{"wal_level=logical", "max_replication_slots=3"}})
	a := newRigAt(t, pgtest.NewDB(t, c), "cell-a", noteDDL, noteTables)
	ctx := t.Context()
	asked := func(ctx context.Context, n int, to cells.CellID) bool {
		t.Helper()
		m := groupMove(n)
		m.Target = to
		out, err := a.store.Survey(transfer.ContextForMove(ctx, m), m.Tenant)
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(out.Findings, func(f cells.Finding) bool { return f.Code == transfer.FindSlots && f.Blocking })
	}
	for n := range 2 {
		a.tenantOpen(groupMove(n), 5)
	}
	a.exec("SELECT pg_create_physical_replication_slot('taken')")
	if asked(grouped(ctx), 0, "cell-b") {
		t.Error("two of three slots are free, and the first of a group is refused")
	}
	if _, err := a.store.Begin(transfer.ContextWithoutView(grouped(ctx)), groupMove(0)); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		who     string
		ctx     context.Context
		to      cells.CellID
		refused bool
	}{
		{"a member", grouped(ctx), "cell-b", false},
		{"a move alone", ctx, "cell-b", true},
		{"a member between other cells", grouped(ctx), "cell-c", true},
		{"a member of another group", transfer.ContextWithGroup(ctx, "h"), "cell-b", true},
	} {
		if asked(x.ctx, 1, x.to) != x.refused {
			t.Errorf("one slot is free; %s is refused: %v", x.who, !x.refused)
		}
	}
	if _, err := a.store.Begin(transfer.ContextWithoutView(grouped(ctx)), groupMove(1)); err != nil {
		t.Errorf("with one free slot no member joins: %v", err)
	}
	waitFor(t, "the slot of the second member's start to be gone", func() bool { return a.count("SELECT count(*) FROM pg_replication_slots") == 2 })
	a.exec("SELECT pg_create_physical_replication_slot('taken_too')")
	if !asked(grouped(ctx), 1, "cell-b") {
		t.Error("no slot is free, and a member is not refused")
	}
}
