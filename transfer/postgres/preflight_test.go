// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"context"
	"slices"
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
CREATE TABLE good (tenant text, id int, PRIMARY KEY (tenant, id));
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
	for _, n := range []string{"nokey", "notinkey", "nocolumn", "noident", "otherident", "seq", "lob", "tree", "trig", "loose", "rls", "good", "missing"} {
		tables = append(tables, guard.Table{Name: n, TenantColumn: "tenant"})
	}
	survey := func(pool *pgxpool.Pool) transfer.Survey {
		t.Helper()
		g, err := guardpostgres.New(pool)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		s, err := postgres.Open(ctx, postgres.Config{Pool: pool, Keeper: g, Admit: g.AdmitClosed, Tables: tables})
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
	want := func(s transfer.Survey, code, table string, blocking bool) {
		t.Helper()
		if !slices.ContainsFunc(s.Findings, func(f cells.Finding) bool { return f.Code == code && f.Table == table && f.Blocking == blocking }) {
			t.Errorf("no finding %s of %q, blocking %v", code, table, blocking)
		}
	}
	s := survey(admin)
	want(s, transfer.FindNoKey, "nokey", true)
	want(s, transfer.FindTenantNotInKey, "notinkey", true)
	want(s, transfer.FindTenantNotInKey, "nocolumn", true)
	want(s, transfer.FindReplicaIdentity, "noident", true)
	want(s, transfer.FindReplicaIdentity, "otherident", true)
	want(s, transfer.FindSequence, "seq", false)
	want(s, transfer.FindLargeObject, "lob", false)
	want(s, transfer.FindForeignTenant, "loose", false)
	want(s, transfer.FindUnlisted, "forgotten", false)
	want(s, transfer.FindUnique, "otherident", false)
	want(s, transfer.FindTableMissing, "missing", true)
	want(s, transfer.FindRetention, "", false)
	for _, f := range s.Findings {
		if f.Table == "good" || f.Table == "tree" || f.Table == "trig" || f.Table == "rls" {
			t.Errorf("a superuser may move %s: %+v", f.Table, f)
		}
	}
	// An ordinary role, that owns nothing and may not do a thing.
	for _, q := range []string{"DROP ROLE IF EXISTS plain", "CREATE ROLE plain LOGIN", "GRANT USAGE ON SCHEMA cell, public TO plain", "GRANT SELECT ON ALL TABLES IN SCHEMA cell, public TO plain"} {
		if _, err := admin.Exec(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		_, _ = admin.Exec(context.Background(), "DROP OWNED BY plain; DROP ROLE plain")
	}()
	cfg := admin.Config()
	cfg.ConnConfig.User = "plain"
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
	want(s, transfer.FindPrivilege, "", true)
	want(s, transfer.FindPrivilege, "good", true)
	want(s, transfer.FindPrivilege, "rls", true)
	want(s, transfer.FindSelfReference, "tree", true)
	want(s, transfer.FindTrigger, "trig", true)
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
