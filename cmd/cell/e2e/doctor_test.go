// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/doctor"
	tablesqlite "github.com/cloister-dev/cloister/table/sqlite"
)

// doctor runs cell doctor on the fleet's state folder.
func (e *env) doctor(args ...string) (doctor.Report, int) {
	e.t.Helper()
	cmd := exec.CommandContext(e.t.Context(), filepath.Join(bin, "cell"), append([]string{"doctor", "--json", "--fleet", e.Layout.Dir}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		e.t.Fatal(err)
	}
	var rep doctor.Report
	if err := json.Unmarshal(out.Bytes(), &rep); err != nil {
		e.t.Fatalf("cell doctor %v: %v\n%s\n%s", args, err, out.Bytes(), errs.Bytes())
	}
	if got := cmd.ProcessState.ExitCode(); got != rep.Exit() {
		e.t.Errorf("cell doctor %v ends with %d, its report means %d", args, got, rep.Exit())
	}
	return rep, rep.Exit()
}

// finds waits until a check finds the text at the cell, and fails with the report else.
func (e *env) finds(check, cell, text string, args ...string) {
	e.t.Helper()
	var last doctor.Report
	ok := e.within(30*time.Second, func() bool {
		rep, code := e.doctor(append([]string{"--only", check}, args...)...)
		last = rep
		if code != 1 {
			return false
		}
		for _, f := range rep.Results[0].Findings {
			if string(f.Cell) == cell && strings.Contains(f.Message, text) && f.Fix != "" {
				return true
			}
		}
		return false
	})
	if !ok {
		e.t.Errorf("%s does not find %q at %q: %+v", check, text, cell, last.Results)
	}
}

// well waits until a check finds nothing.
func (e *env) well(check string, args ...string) {
	e.t.Helper()
	var last doctor.Report
	if !e.within(30*time.Second, func() bool {
		rep, code := e.doctor(append([]string{"--only", check}, args...)...)
		last = rep
		return code == 0
	}) {
		e.t.Errorf("%s finds, or was not run: %+v", check, last.Results)
	}
}

func (e *env) within(d time.Duration, ok func() bool) bool {
	deadline := time.Now().Add(d)
	for !ok() {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

func exec1(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func openDB(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// TestDoctor gives a fleet one fault after the other: the doctor names each, and nothing
// before and after it.
func TestDoctor(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StorePostgres, DefaultCell: "cell-a"})
	acme := e.tenant("acme", "cell-a")
	e.tenant("bolt", "cell-b")
	if _, err := acme.Set(t.Context(), "n", "k", 1, -1); err != nil {
		t.Fatal(err)
	}
	e.settle(e.startMove("acme", "cell-b", "").ID)
	a, b := openDB(t, "pgx", e.Cluster("cell-a").URL("cell")), openDB(t, "pgx", e.Cluster("cell-b").URL("cell"))
	dir := openDB(t, "sqlite", "file:"+filepath.Join(e.Layout.Directory(), "directory.db")+"?_pragma=busy_timeout(10000)")

	rep, code := e.doctor("--grace", "2m")
	if code != 0 || len(rep.Results) < 15 {
		t.Fatalf("a fleet that is well: exit %d, %+v", code, rep.Results)
	}
	if q := rep.Result("quota"); q.Outcome != doctor.Found || q.Findings[0].Severity != doctor.Note {
		t.Errorf("cells without a quota: %+v", q)
	}
	for _, r := range rep.Results {
		if r.Check != "quota" && r.Outcome != doctor.OK {
			t.Errorf("%s: %s %s", r.Check, r.Outcome, r.Reason)
		}
	}

	for _, fault := range []struct {
		name string
		run  func(e *env)
	}{
		{"a cell set back", func(e *env) {
			exec1(e.t, a, "UPDATE cell.fence SET is_open = true, epoch = 1, floor = 1, move = '' WHERE tenant = 'acme'")
			e.finds("fences", "cell-a", "the cell's database has been set back")
			exec1(e.t, a, "DELETE FROM cell.fence WHERE tenant = 'acme'")
			e.well("fences")
		}},
		{"a directory set back", func(e *env) {
			exec1(e.t, b, "UPDATE cell.fence SET epoch = epoch + 6 WHERE tenant = 'bolt'")
			e.finds("fences", "cell-b", "the directory has been set back")
			exec1(e.t, b, "UPDATE cell.fence SET epoch = epoch - 6 WHERE tenant = 'bolt'")
			e.well("fences")
		}},
		{"an orphan claim", func(e *env) {
			exec1(e.t, dir, "UPDATE cells SET placed = placed + 1 WHERE id = 'cell-b'")
			e.finds("orphan-claims", "cell-b", "counts 1 tenants that have no route")
			exec1(e.t, dir, "UPDATE cells SET placed = placed - 1 WHERE id = 'cell-b'")
			e.well("orphan-claims")
		}},
		{"a slot and a publication", func(e *env) {
			name := "cell_move_" + strings.Repeat("0a", 10)
			exec1(e.t, a, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", name)
			e.finds("leftover-slots", "cell-a", "slot "+name)
			exec1(e.t, a, "SELECT pg_drop_replication_slot($1)", name)
			exec1(e.t, a, "CREATE PUBLICATION "+name)
			e.finds("leftover-slots", "cell-a", "publication "+name)
			exec1(e.t, a, "DROP PUBLICATION "+name)
			e.well("leftover-slots")
		}},
		{"a capture", func(e *env) {
			exec1(e.t, b, "INSERT INTO cell.transfer_import (move, tenant, base, gen, state, at) VALUES ('nobodys', 'zed', 1, 1, '{}', now() - interval '1 day')")
			e.finds("leftover-captures", "cell-b", "the directory knows of no such move")
			exec1(e.t, b, "DELETE FROM cell.transfer_import WHERE move = 'nobodys'")
			e.well("leftover-captures")
		}},
		{"a certificate that ends", func(e *env) {
			ca, err := pki.LoadAuthority(e.Layout.PKI(), pki.Options{})
			if err != nil {
				e.t.Fatal(err)
			}
			is, err := ca.Issue(channel.Identity{Role: channel.RoleEdge, Name: "short"}, pki.IssueOptions{Dir: e.t.TempDir(), Lifetime: time.Hour})
			if err != nil {
				e.t.Fatal(err)
			}
			e.finds("certificates", "", "ends on", "--certs", is.CertFile)
			if err := ca.Revoke(is.Serial, "test"); err != nil {
				e.t.Fatal(err)
			}
			e.finds("certificates", "", "is refused", "--certs", is.CertFile)
			e.well("certificates")
		}},
		{"a tenant without a route", func(e *env) {
			c := &load.Client{Base: e.Info.Edge, Tenant: "stray", HTTP: e.http}
			if _, err := c.Set(e.t.Context(), "n", "k", 1, -1); err != nil {
				e.t.Fatal(err)
			}
			e.finds("default-share", "cell-a", "1 of 3 tenants", "--default-share", "0.3")
			e.well("default-share")
			e.well("fences")
		}},
		{"a full cell", func(e *env) {
			e.respec("cell-b", func(s *api.CellSpec) { n := int64(2); s.PlacementsMax = &n })
			e.finds("quota", "cell-b", "full: 2 of 2")
			e.respec("cell-b", func(s *api.CellSpec) { n := int64(9); s.PlacementsMax = &n })
			e.well("quota")
		}},
		{"another version", func(e *env) {
			e.respec("cell-b", func(s *api.CellSpec) { s.Version = "v9" })
			e.finds("version-skew", "cell-b", "it is pinned to v9")
			e.respec("cell-b", func(s *api.CellSpec) { s.Version = "v1" })
			e.well("version-skew")
		}},
		{"a cell that cannot be made", func(e *env) {
			if _, err := e.cl.ProvisionCell(e.t.Context(), "broken", api.ProvisionRequest{Version: "v1", Command: []string{"/bin/false"}, Replicas: 1, Actor: "test"}); err != nil {
				e.t.Fatal(err)
			}
			e.finds("provisioning", "broken", "has failed")
		}},
		{"a window and a cut past their ends", func(e *env) {
			if err := os.WriteFile(e.clock, []byte("-5h"), 0o644); err != nil {
				e.t.Fatal(err)
			}
			defer os.Remove(e.clock)
			window := time.Hour
			mv := e.askMove(api.MoveRequest{Tenant: "bolt", To: "cell-a", Actor: "test", Force: true, UndoWindow: &window})
			e.eventually("the move is over", time.Minute, func() bool {
				m, err := e.cl.MoveByID(e.t.Context(), mv.ID)
				return err == nil && m.State.Final()
			})
			e.finds("undo-windows", "cell-b", "undo window")
			if _, err := e.cl.CloseWindow(e.t.Context(), "bolt", api.CloseWindowRequest{Actor: "test"}); err != nil {
				e.t.Fatal(err)
			}
			e.well("undo-windows")
			e.haltAt(cells.StepQuiesce)
			mv = e.startMove("bolt", "cell-b", "")
			e.waitHalted()
			e.finds("stuck-moves", "cell-a", "whose deadline has passed")
			e.release()
			e.kill("directory")
			e.settle(mv.ID)
			e.well("stuck-moves")
		}},
		{"processes that stand still", func(e *env) {
			name := e.process("cell-b")
			p := e.Procs.Proc(name)
			if err := p.Signal(syscall.SIGSTOP); err != nil {
				e.t.Fatal(err)
			}
			e.finds("processes", "cell-b", "no process that is ready")
			if err := p.Signal(syscall.SIGCONT); err != nil {
				e.t.Fatal(err)
			}
			e.well("processes")
		}},
		{"a route to nowhere", func(e *env) {
			routes, err := tablesqlite.Open(e.t.Context(), filepath.Join(e.Layout.Directory(), "routes.db"))
			if err != nil {
				e.t.Fatal(err)
			}
			defer routes.Close()
			r, err := routes.CompareAndSet(e.t.Context(), 0, cells.TenantRoute{TenantID: "lonely", State: cells.StateActive, CellID: "gone", Epoch: 1, Floor: 1})
			if err != nil {
				e.t.Fatal(err)
			}
			e.finds("homeless-routes", "gone", "not registered")
			old := r.Revision
			r.State, r.Epoch, r.Floor = cells.StateDeleted, 2, 2
			if _, err := routes.CompareAndSet(e.t.Context(), old, r); err != nil {
				e.t.Fatal(err)
			}
			e.well("homeless-routes")
		}},
		{"the directory is down", func(e *env) {
			e.Procs.Remove("directory")
			e.finds("directory", "", "cannot be asked")
			e.finds("watch-lag", "", "router edge is cut off", "--lag", "100ms")
			rep, _ := e.doctor("--lag", "100ms")
			for id, want := range map[string]doctor.Outcome{"fences": doctor.NotRun, "processes": doctor.NotRun, "certificates": doctor.OK, "leftover-slots": doctor.OK, "leftover-captures": doctor.NotRun} {
				if r := rep.Result(id); r == nil || r.Outcome != want || want == doctor.NotRun && r.Reason == "" {
					e.t.Errorf("%s: %+v; want %s", id, r, want)
				}
			}
			if _, code := e.doctor("--only", "fences"); code != 2 {
				e.t.Errorf("a check that was not run: exit %d, want 2", code)
			}
		}},
	} {
		if !t.Run(fault.name, func(t *testing.T) { fault.run(e.in(t)) }) && t.Context().Err() != nil {
			break
		}
	}
}

// respec changes a cell as an operator does.
func (e *env) respec(cell cells.CellID, change func(*api.CellSpec)) {
	e.t.Helper()
	c, err := e.cl.Cell(e.t.Context(), cell)
	if err != nil {
		e.t.Fatal(err)
	}
	spec := c.CellSpec
	change(&spec)
	spec.Revision = 0
	if _, err := e.cl.PutCell(e.t.Context(), cell, spec); err != nil {
		e.t.Fatal(err)
	}
}

// process is the name of the first process of a cell.
func (e *env) process(cell string) string {
	for _, n := range e.Procs.Names() {
		if strings.HasPrefix(n, cell) && !strings.HasSuffix(n, "postgres") {
			return n
		}
	}
	e.t.Fatalf("%s has no process", cell)
	return ""
}

// A directory that starts on an empty database beside cells that hold tenants.
func TestDoctorFindsALostDirectory(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StoreSQLite})
	acme := e.tenant("acme", "cell-a")
	if _, err := acme.Set(t.Context(), "n", "k", 1, -1); err != nil {
		t.Fatal(err)
	}
	if rep, code := e.doctor(); code != 0 {
		t.Errorf("a fleet that is well: exit %d, %+v", code, rep.Results)
	}
	db := openDB(t, "sqlite", "file:"+filepath.Join(e.Layout.Cell("cell-b"), "store.db")+"?_pragma=busy_timeout(10000)")
	exec1(t, db, "INSERT INTO cell_transfer_import (move, tenant, base, gen, state) VALUES ('nobodys', 'zed', 1, 1, '{}')")
	e.finds("leftover-captures", "cell-b", "the directory knows of no such move")
	exec1(t, db, "DELETE FROM cell_transfer_import")
	e.well("leftover-captures")
	e.Procs.Remove("edge")
	e.Close()
	if err := os.Rename(e.Layout.Directory(), e.Layout.Directory()+".lost"); err != nil {
		t.Fatal(err)
	}
	state := e.Layout.Dir
	e = startIn(t, t.TempDir(), fleet.Config{Store: fleet.StoreSQLite}, func(o *fleet.Options) { o.Dir = state })
	e.finds("directory-lost", "cell-a", "acme among them")
	e.finds("fences", "cell-a", "no route of the tenant")
}

// While tenants move to and fro the doctor finds nothing: what differs for a moment is
// looked at again.
func TestDoctorWhileTenantsMove(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StorePostgres})
	e.tenant("acme", "cell-a")
	e.tenant("bolt", "cell-b")
	done, stop := make(chan struct{}), make(chan struct{})
	moves := 0
	go func() {
		defer close(done)
		m := fleet.Mover{Client: e.cl}
		for _, to := range []string{"cell-b", "cell-a", "cell-b", "cell-a"} {
			select {
			case <-stop:
				return
			default:
			}
			other := map[string]string{"cell-a": "cell-b", "cell-b": "cell-a"}[to]
			for tenant, cell := range map[string]string{"acme": to, "bolt": other} {
				if _, err := m.Move(t.Context(), tenant, cell); err != nil {
					t.Errorf("move of %s to %s: %v", tenant, cell, err)
				}
				moves++
			}
		}
	}()
	defer func() { close(stop); <-done }()
	for looks := 0; ; looks++ {
		if rep, code := e.doctor(); code != 0 {
			t.Fatalf("look %d, exit %d: %+v", looks, code, rep.Results)
		}
		select {
		case <-done:
			if looks == 0 || moves < 8 {
				t.Errorf("%d looks during %d moves", looks, moves)
			}
			return
		default:
		}
	}
}
