// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"context"
	"database/sql"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/doctor"
	"github.com/cloister-dev/cloister/directory/sqlite"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/signin"
	signinpg "github.com/cloister-dev/cloister/member/signin/postgres"
	"github.com/cloister-dev/cloister/member/stores"
	storespg "github.com/cloister-dev/cloister/member/stores/postgres"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// world is a directory of two deployments, with the Postgres of each.
type world struct {
	t    *testing.T
	dir  deploy.Store
	rows map[cells.CellID]*tenancypg.Store
	db   map[cells.CellID]*sql.DB
	src  doctor.Sources
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) change(cell cells.CellID, rules ...deploy.Rule) {
	w.t.Helper()
	for _, r := range rules {
		_, err := w.dir.Change(w.t.Context(), cell, r, api.AuditEntry{At: time.Now(), Peer: "operator", Actor: "test", RequestID: "r", Action: "test"})
		w.must(err)
	}
}

func (w *world) exec(cell cells.CellID, query string) {
	w.t.Helper()
	_, err := w.db[cell].ExecContext(w.t.Context(), query)
	w.must(err)
}

var ids = map[string]stores.DeploymentID{"one": stores.NewDeploymentID(), "two": stores.NewDeploymentID()}

// print is a configuration of a cell, with the id that its database carries.
func print(cell, host string, tenants ...cells.TenantID) tenancy.Fingerprint {
	f := deploytest.Fingerprint(cell, host, tenants...)
	f.Fields[tenancy.FieldDeploymentID] = []string{string(ids[cell])}
	return f
}

// newWorld makes two cells that serve, one tenant in each, with a live process.
func newWorld(t *testing.T) *world {
	t.Helper()
	ctx := t.Context()
	w := &world{t: t, rows: map[cells.CellID]*tenancypg.Store{}, db: map[cells.CellID]*sql.DB{}}
	s, err := sqlite.Open(ctx, filepath.Join(t.TempDir(), "directory.db"))
	w.must(err)
	t.Cleanup(func() { s.Close() })
	w.dir = s.Deployments()
	one, two := print("one", "app.example.com"), print("two", "two.example.com", "conf")
	first, later := deploytest.First("one"), deploytest.Later("two", "b")
	first.DeploymentID, later.DeploymentID = string(ids["one"]), string(ids["two"])
	w.change("one", deploy.Register(first), deploy.Attach(deploy.Attachment{Current: one, KeysFP: "k1", Tenants: []cells.TenantID{"acme"}}),
		deploy.RaiseMode(tenancy.Enforced), deploy.Serve(), deploy.Limit(nil, new(int64(10))))
	w.change("two", deploy.Register(later), deploy.Attach(deploy.Attachment{Current: two, KeysFP: "k2", Upstream: "http://10.0.1.1:80"}), deploy.Serve(), deploy.Limit(nil, new(int64(10))))
	for _, c := range []struct {
		name   cells.CellID
		print  tenancy.Fingerprint
		tenant cells.TenantID
	}{{"one", one, "acme"}, {"two", two, "conf"}} {
		dsn := pgtest.DB(t)
		db, err := sql.Open("pgx", dsn)
		w.must(err)
		t.Cleanup(func() { db.Close() })
		st, err := tenancypg.Open(dsn)
		w.must(err)
		t.Cleanup(st.Close)
		w.rows[c.name], w.db[c.name] = st, db
		w.exec(c.name, "CREATE TABLE items (tenant text, id int, PRIMARY KEY (tenant, id))")
		w.must(st.Install(ctx))
		own, err := storespg.Open(ctx, storespg.Config{URL: dsn})
		w.must(err)
		_, err = own.Establish(ctx, ids[string(c.name)])
		w.must(err)
		own.Close()
		_, err = st.Prepare(ctx, tenancy.Preparation{First: tenancy.First{First: c.name == "one", Cell: c.name}, Mode: tenancy.Enforced, Self: &tenancy.Self{Current: &c.print}})
		w.must(err)
		w.must(st.Hold(ctx, c.tenant))
		w.exec(c.name, "INSERT INTO items VALUES ('"+string(c.tenant)+"', 1)")
		_, err = st.EnsureTriggers(ctx)
		w.must(err)
		w.must(st.Beat(ctx, w.beat(c.name, c.print)))
		w.src.Stores = append(w.src.Stores, doctor.Store{Cell: c.name, Address: dsn})
	}
	w.src.Deployments = w.dir
	return w
}

func (w *world) beat(cell cells.CellID, f tenancy.Fingerprint) tenancy.Heartbeat {
	return tenancy.Heartbeat{Instance: "p-" + string(cell), Cell: cell, Mode: tenancy.Enforced, Fingerprint: &f, Build: "v1"}
}

func (w *world) examine(src doctor.Sources, only ...string) doctor.Report {
	w.t.Helper()
	rep, err := doctor.Examine(w.t.Context(), src, doctor.Options{Only: only})
	w.must(err)
	return rep
}

// finds fails unless the check finds the text at the cell.
func (w *world) finds(src doctor.Sources, check string, cell cells.CellID, text string) {
	w.t.Helper()
	rep := w.examine(src, check)
	r := rep.Result(check)
	if !slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool {
		return f.Cell == cell && strings.Contains(f.Message, text) && f.Fix != ""
	}) {
		w.t.Errorf("%s does not find %q at %q: %+v", check, text, cell, r)
	}
}

// altered is a directory whose table somebody has edited by hand.
type altered struct {
	deploy.Store
	change func(*deploy.View)
}

func (a altered) Read(ctx context.Context) (deploy.View, error) {
	v, err := a.Store.Read(ctx)
	if err == nil {
		a.change(&v)
	}
	return v, err
}

// moved is a directory that has one placement.
type moved struct {
	altered
	p deploy.Placement
}

func (m moved) Placements(context.Context, deploy.PlacementFilter) ([]deploy.Placement, error) {
	return []deploy.Placement{m.p}, nil
}

func (w *world) edited(f func(*deploy.View)) doctor.Sources {
	src := w.src
	src.Deployments = altered{w.dir, f}
	return src
}

// cell is a cell as the directory has it.
func (w *world) cell(name cells.CellID) *deploy.Cell {
	w.t.Helper()
	v, err := w.dir.Read(w.t.Context())
	w.must(err)
	for i := range v.Cells {
		if v.Cells[i].Name == name {
			return &v.Cells[i]
		}
	}
	w.t.Fatalf("no cell %s", name)
	return nil
}

func exit(r doctor.Report) int { return r.Exit() }

// down is a directory that does not answer.
type down struct{}

func (down) Read(context.Context) (deploy.View, error) {
	return deploy.View{}, cells.ErrUnavailable
}

func (down) Placements(context.Context, deploy.PlacementFilter) ([]deploy.Placement, error) {
	return nil, cells.ErrUnavailable
}

func TestDeployments(t *testing.T) {
	w := newWorld(t)
	rep := w.examine(w.src)
	if rep.Exit() != 0 || len(rep.Results) < 14 {
		t.Fatalf("two cells that are well: exit %d, %+v", rep.Exit(), rep.Results)
	}
	for _, r := range rep.Results {
		if r.Outcome != doctor.OK {
			t.Errorf("%s: %+v", r.Check, r)
		}
	}
	in := func(t *testing.T) *world { c := *w; c.t = t; return &c }

	t.Run("the table", func(t *testing.T) {
		w := in(t)
		w.finds(w.edited(func(v *deploy.View) { v.Cells[1].Host = v.Cells[0].Host }), "overlap", "two", "host")
		w.finds(w.edited(func(v *deploy.View) { v.Cells[1].KeysFP = v.Cells[0].KeysFP }), "overlap", "two", "root secret")
		w.finds(w.edited(func(v *deploy.View) {
			f := *v.Cells[0].Current
			f.Fields = map[tenancy.Field][]string{tenancy.FieldSCIM: {"on"}}
			v.Cells[0].Current = &f
		}), "scim", "two", "SCIM is off, and on in one")
		w.finds(w.edited(func(v *deploy.View) { v.Cells[0].PlacementsMax = nil }), "placements", "one", "1 tenants and no bound")
		w.finds(w.edited(func(v *deploy.View) { *v.Cells[0].PlacementsMax = 1 }), "placements", "one", "full")
		w.finds(w.edited(func(v *deploy.View) {
			f := *v.Cells[1].Current
			f.Fields = map[tenancy.Field][]string{tenancy.FieldTenants: {"acme", "nobody"}}
			v.Cells[1].Current = &f
		}), "configured-tenants", "two", "placed in one")
		w.finds(w.edited(func(v *deploy.View) { v.Cells[1].NextHash = deploytest.Hash("c") }), "pending-changes", "two", "credential")
		w.finds(w.edited(func(v *deploy.View) {
			v.Cells[1].State, v.Cells[1].AttachStartedAt = deploy.Attaching, time.Now().Add(-time.Hour)
		}), "deployments", "two", "not over")
	})

	t.Run("the mode", func(t *testing.T) {
		w := in(t)
		w.exec("one", "UPDATE cell.own_mode SET mode = 'recording'")
		w.finds(w.src, "cell-mode", "one", "its mode is recording, the directory records enforced")
		w.exec("one", "UPDATE cell.own_mode SET mode = 'enforced'")
	})

	t.Run("what is recorded", func(t *testing.T) {
		w := in(t)
		w.exec("one", "UPDATE cell.own_mode SET mode = 'recording'")
		w.must(w.rows["one"].Hold(t.Context(), "idle"))
		src := w.edited(func(v *deploy.View) { v.Cells[0].Mode = tenancy.Recording })
		w.finds(src, "cell-recorded", "one", "has no data")
		if code := exit(w.examine(src, "cell-recorded", "cell-tenants")); code != 0 {
			t.Errorf("what a first cell records: exit %d", code)
		}
		w.exec("one", "UPDATE cell.own_mode SET mode = 'enforced'; DELETE FROM cell.tenancy WHERE tenant = 'idle'")
	})

	t.Run("tenants", func(t *testing.T) {
		w := in(t)
		w.must(w.rows["two"].Hold(t.Context(), "acme", "nobody"))
		w.finds(w.src, "cell-tenants", "two", "places in one")
		w.finds(w.src, "cell-tenants", "two", "places nowhere")
		w.exec("two", "DELETE FROM cell.tenancy WHERE tenant <> 'conf'")
		w.exec("one", "DELETE FROM cell.tenancy WHERE tenant = 'acme'")
		w.finds(w.src, "cell-tenants", "one", "does not hold")
		w.finds(w.src, "cell-unheld", "one", "items")
		// What a move has left, and what one brings, is in order.
		for _, p := range []deploy.Placement{{Tenant: "acme", Cell: "two", Epoch: 3, Move: "m"}, {Tenant: "acme", Cell: "two", MovingTo: "one", MovingBy: "m"}} {
			src := w.src
			src.Deployments = moved{altered{w.dir, func(v *deploy.View) { v.Kind = deploy.Movable }}, p}
			if rep := w.examine(src, "cell-unheld"); exit(rep) != 0 || len(rep.Result("cell-unheld").Findings) != 1 {
				t.Errorf("%+v: exit %d, %+v", p, exit(rep), rep.Result("cell-unheld"))
			}
			src.Deployments = moved{altered{w.dir, func(v *deploy.View) { v.Kind = deploy.Movable }}, deploy.Placement{Tenant: "acme", Cell: "two"}}
			w.finds(src, "cell-unheld", "one", "items")
		}
		w.must(w.rows["one"].Hold(t.Context(), "acme"))
		if code := exit(w.examine(w.src, "cell-tenants", "cell-unheld")); code != 0 {
			t.Errorf("put back: exit %d", code)
		}
	})

	t.Run("triggers", func(t *testing.T) {
		w := in(t)
		w.exec("one", "ALTER TABLE items DISABLE TRIGGER USER")
		w.finds(w.src, "cell-triggers", "one", "disabled")
		w.exec("one", "ALTER TABLE items ENABLE TRIGGER USER; CREATE TABLE parts (tenant text, id int) PARTITION BY LIST (tenant)")
		w.finds(w.src, "cell-triggers", "one", "partitioned")
		w.exec("one", "DROP TABLE parts")
	})

	t.Run("the configuration", func(t *testing.T) {
		w := in(t)
		other := print("two", "else.example.com", "conf")
		good := print("two", "two.example.com", "conf")
		w.must(w.rows["two"].SetSelf(t.Context(), tenancy.Self{Current: &other}))
		w.finds(w.src, "cell-fingerprint", "two", "hosts")
		w.must(w.rows["two"].SetSelf(t.Context(), tenancy.Self{Current: &good}))
		w.must(w.rows["two"].Beat(t.Context(), w.beat("two", other)))
		w.finds(w.src, "cell-processes", "two", "neither of the cell's, in hosts")
		h := w.beat("two", good)
		h.Cell, h.Fingerprint = "", nil
		w.must(w.rows["two"].Beat(t.Context(), h))
		w.finds(w.src, "cell-processes", "two", "without CELL")
		h = w.beat("two", good)
		h.Gated = "the rows cannot be read"
		w.must(w.rows["two"].Beat(t.Context(), h))
		w.finds(w.src, "cell-processes", "two", "serves nothing")
		w.must(w.rows["two"].Beat(t.Context(), w.beat("two", good)))
		h = w.beat("two", good)
		h.Instance, h.Build = "p-old", "v0"
		w.must(w.rows["two"].Beat(t.Context(), h))
		w.finds(w.src, "cell-processes", "two", "2 builds")
		w.must(w.rows["two"].Leave(t.Context(), "p-old"))
		if code := exit(w.examine(w.src, "cell-fingerprint", "cell-processes")); code != 0 {
			t.Errorf("put back: exit %d", code)
		}
		w.must(w.rows["two"].Leave(t.Context(), "p-two"))
		w.finds(w.src, "cell-processes", "two", "no process")
		w.must(w.rows["two"].Beat(t.Context(), w.beat("two", good)))
	})

	t.Run("settings", func(t *testing.T) {
		w := in(t)
		beat := func(cell cells.CellID, instance, drain string) {
			h := w.beat(cell, *w.cell(cell).Current)
			h.Instance, h.Settings = instance, tenancy.Settings{"drain": drain, "publish": "nats"}
			w.must(w.rows[cell].Beat(t.Context(), h))
		}
		beat("one", "p-one", "5s")
		if rep := w.examine(w.src, "cell-settings"); len(rep.Result("cell-settings").Findings) != 0 {
			t.Errorf("a build that reports no settings: %+v", rep.Results)
		}
		beat("two", "p-two", "5s")
		if rep := w.examine(w.src, "cell-settings"); len(rep.Result("cell-settings").Findings) != 0 {
			t.Errorf("equal settings: %+v", rep.Results)
		}
		beat("two", "p-two", "9s")
		w.finds(w.src, "cell-settings", "", `setting drain differs between cells: "5s" in one; "9s" in two`)
		beat("two", "p-more", "5s")
		w.finds(w.src, "cell-settings", "two", `setting drain differs between its processes: "5s" in p-more; "9s" in p-two`)
		if rep := w.examine(w.src, "cell-settings"); len(rep.Result("cell-settings").Findings) != 1 {
			t.Errorf("only drain differs: %+v", rep.Results)
		}
		w.must(w.rows["two"].Leave(t.Context(), "p-more"))
		beat("two", "p-two", "5s")
	})

	t.Run("the database", func(t *testing.T) {
		w := in(t)
		src := w.src
		src.Stores = []doctor.Store{{Cell: "one", Address: src.Stores[1].Address}, src.Stores[1]}
		w.finds(src, "cell-stores", "one", string(ids["two"]))
		w.finds(src, "cell-state", "one", "first row says cell two")
	})

	t.Run("the state", func(t *testing.T) {
		w := in(t)
		w.finds(w.edited(func(v *deploy.View) { v.Cells[0].First = false }), "cell-state", "one", "first true")
		w.exec("two", "DELETE FROM cell.own_mode")
		w.finds(w.src, "cell-state", "two", "incomplete")
		w.exec("two", "ALTER TABLE cell.own_first DISABLE TRIGGER ALL; DELETE FROM cell.own_first; DELETE FROM cell.own_self; DELETE FROM cell.tenancy")
		w.finds(w.src, "cell-state", "two", "no rows of its own")
		w.finds(w.src, "cell-triggers", "two", "own_first")
	})

	t.Run("routers", func(t *testing.T) {
		w := in(t)
		body := `{"router":"r1","ready":true,"routes":{},"cells":{"known":true,"source":"directory","age":0,"stale":false}}`
		srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write([]byte(body)) }))
		defer srv.Close()
		src := w.src
		src.Routers = []doctor.Router{{Name: "r1", Admin: srv.URL}}
		if code := exit(w.examine(src, "deployment-routers")); code != 0 {
			t.Errorf("a router that is well: exit %d", code)
		}
		body = `{"router":"r1","ready":true,"routes":{},"cells":{"known":true,"source":"snapshot","age":90000000000,"stale":true,"last_error":"down","snapshot_error":"read-only","problems":["two hosts"]}}`
		for _, text := range []string{"1m30s ago, from the snapshot (down)", "two hosts", "no snapshot: read-only"} {
			w.finds(src, "deployment-routers", "", text)
		}
	})

	t.Run("what does not answer", func(t *testing.T) {
		w := in(t)
		src := w.src
		src.Deployments = down{}
		rep := w.examine(src)
		for _, r := range rep.Results {
			if r.Check != "deployment-routers" && (r.Outcome != doctor.NotRun || r.Reason == "") {
				t.Errorf("%s without the directory: %+v", r.Check, r)
			}
		}
		if rep.Exit() != 2 {
			t.Errorf("without the directory: exit %d, want 2", rep.Exit())
		}
		src = w.src
		src.Stores = []doctor.Store{src.Stores[0], {Cell: "two", Address: "postgres://u:hidden-word@127.0.0.1:1/x?connect_timeout=2"}}
		rep = w.examine(src, "cell-unheld")
		r := rep.Result("cell-unheld")
		if r.Outcome != doctor.NotRun || !strings.Contains(r.Reason, "cell two") || strings.Contains(r.Reason, "hidden-word") {
			t.Errorf("without a cell's database: %+v", r)
		}
	})
	t.Run("bots", func(t *testing.T) {
		w := in(t)
		recorded := w.edited(func(v *deploy.View) { v.Cells[0].Bots = []deploy.Bot{{Name: "glass", Thumbprint: "p"}} })
		w.finds(recorded, "cell-bots", "one", "no bot glass")
		store, err := signinpg.Open(t.Context(), w.src.Stores[0].Address, signinpg.Options{})
		w.must(err)
		defer store.Close()
		w.finds(recorded, "cell-bots", "one", "no bot glass")
		b := signin.Bot{Name: "glass", Key: []byte(`{}`), Thumbprint: "p"}
		w.must(store.PutBot(t.Context(), b, signin.Entry{Actor: "op", Action: "bot.create"}))
		if rep := w.examine(recorded, "cell-bots"); rep.Exit() != 0 || len(rep.Result("cell-bots").Findings) > 0 {
			t.Errorf("a bot that nobody used: %+v", rep.Results)
		}
		soon := time.Now().Add(time.Hour)
		w.must(store.Challenge(t.Context(), [32]byte{1}, "glass", soon))
		w.must(store.Answered(t.Context(), [32]byte{1}, "glass", time.Now(), [32]byte{2}, soon, signin.Entry{Actor: "sa:glass", Action: "bot.token"}))
		w.finds(recorded, "cell-bots", "one", "sa:glass has proved itself 1 times")
		if rep := w.examine(recorded, "cell-bots"); rep.Exit() != 0 {
			t.Errorf("a use is more than a note: %+v", rep.Results)
		}
		b.Thumbprint = "q"
		w.must(store.PutBot(t.Context(), b, signin.Entry{}))
		w.finds(recorded, "cell-bots", "one", "another key")
		b.Thumbprint, b.Disabled = "p", true
		w.must(store.PutBot(t.Context(), b, signin.Entry{}))
		w.finds(recorded, "cell-bots", "one", "is disabled")
	})
}

func TestRouterToken(t *testing.T) {
	for token, want := range map[string]int{"lcr_" + strings.Repeat("0f", 64): 0, "lcr_short": 1, "lco_" + strings.Repeat("0f", 64): 1} {
		rep, err := doctor.Examine(t.Context(), doctor.Sources{RouterToken: token}, doctor.Options{})
		if err != nil || rep.Exit() != want {
			t.Errorf("token of %d bytes: exit %d, %v; want %d", len(token), rep.Exit(), err, want)
		}
	}
}

func TestChecksAreDescribed(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range doctor.Checks() {
		if c.ID == "" || seen[c.ID] || c.Looks == "" || c.Fix == "" || c.Worst == "" || c.Scope == "" {
			t.Errorf("check %+v is not described, or is there twice", c)
		}
		seen[c.ID] = true
	}
	if _, err := doctor.Examine(t.Context(), doctor.Sources{RouterToken: "x"}, doctor.Options{Only: []string{"nothing"}}); err == nil {
		t.Error("an unknown check is taken")
	}
	if _, err := doctor.Examine(t.Context(), doctor.Sources{}, doctor.Options{}); err == nil {
		t.Error("nothing to look at is well")
	}
}
