// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/sqlite"
	"github.com/cloister-dev/cloister/table/tabletest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	paths := sync.Map{} // table -> path
	open := func(tb tabletest.TB, path string) cells.RoutingTable {
		s, err := sqlite.Open(tb.Context(), path, sqlite.WithWatchIdle(10*time.Millisecond), sqlite.WithPoll(2*time.Millisecond))
		if err != nil {
			tb.Fatalf("%v", err)
		}
		paths.Store(s, path)
		tb.Cleanup(func() { _ = s.Close() })
		return s
	}
	same := func(tb tabletest.TB, s cells.RoutingTable) cells.RoutingTable {
		path, _ := paths.Load(s)
		return open(tb, path.(string))
	}
	tabletest.Run(t, tabletest.Harness{
		Open: func(tb tabletest.TB) cells.RoutingTable {
			return open(tb, filepath.Join(tb.TempDir(), "routes #1%.db"))
		},
		Another: same,
		Reopen: func(tb tabletest.TB, s cells.RoutingTable) cells.RoutingTable {
			if err := s.(*sqlite.Table).Close(); err != nil {
				tb.Fatalf("%v", err)
			}
			return same(tb, s)
		},
	})
}

func row() cells.TenantRoute {
	return cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
}

// Two that start at once on a new file both get a table.
func TestOpenTogether(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.db")
	errs := make(chan error, 6)
	for range cap(errs) {
		go func() {
			s, err := sqlite.Open(t.Context(), path)
			if err == nil {
				err = s.Close()
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	foreign := filepath.Join(dir, "foreign.db")
	content := strings.Repeat("this is no database\n", 500)
	if err := os.WriteFile(foreign, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlite.Open(t.Context(), foreign); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), foreign) {
		t.Errorf("a foreign file: %v, want ErrInvalid that names it", err)
	}
	if b, err := os.ReadFile(foreign); err != nil || string(b) != content {
		t.Errorf("the foreign file was changed: %v", err)
	}
	if _, err := sqlite.Open(t.Context(), filepath.Join(dir, "missing", "x.db")); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a missing folder: %v, want ErrUnavailable", err)
	}
	newer := filepath.Join(dir, "newer.db")
	s, err := sqlite.Open(t.Context(), newer)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.CompareAndSet(t.Context(), 0, row()); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	exec(t, newer, "INSERT INTO cells_routes_version (version_id, is_applied) VALUES (99, 1)")
	if _, err := sqlite.Open(t.Context(), newer); !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), "newer version") {
		t.Errorf("a newer schema: %v, want ErrInvalid", err)
	}
}

func exec(t *testing.T, path, query string) {
	t.Helper()
	db, err := sql.Open("sqlite", sqlite.DSN(path))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), query); err != nil {
		t.Fatal(err)
	}
}

// A row that this version cannot read is not taken for something else.
func TestUnreadableRow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.db")
	s, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	r, err := s.CompareAndSet(t.Context(), 0, row())
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{
		`row = '{"tenant":"t","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"revision":0,"novel":1}'`,
		`row = '{"tenant":"u","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"revision":0}'`,
		`row = '{"tenant":"t","state":"DORMANT","cell":"a","epoch":1,"floor":1,"revision":0}'`,
		`row = '{"tenant":"t"'`, `row = ''`,
	} {
		exec(t, path, "UPDATE cells_routes SET "+set)
		_, getErr := s.Get(t.Context(), "t")
		_, casErr := s.CompareAndSet(t.Context(), r.Revision, row())
		_, listErr := s.List(t.Context(), cells.ListOptions{})
		for _, err := range []error{getErr, casErr, listErr} {
			if !errors.Is(err, cells.ErrInvalid) {
				t.Errorf("%s: %v, want ErrInvalid", set, err)
			}
		}
	}
}

// While another connection writes, a change fails as unavailable after the busy
// timeout or with its context, and is not written.
func TestBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.db")
	s, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(10)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	impatient, err := sqlite.New(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	defer impatient.Close()
	other, err := sql.Open("sqlite", sqlite.DSN(path))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	tx, err := other.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := impatient.CompareAndSet(t.Context(), 0, row()); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("while another writes: %v, want ErrUnavailable", err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), "t"); !errors.Is(err, cells.ErrNotFound) {
		t.Errorf("Get: %v, want ErrNotFound", err)
	}
	if _, err := impatient.CompareAndSet(t.Context(), 0, row()); err != nil {
		t.Error(err)
	}
}

// A change in the caller's transaction happens with it or not at all.
func TestCompareAndSetTx(t *testing.T) {
	db, err := sql.Open("sqlite", sqlite.DSN(filepath.Join(t.TempDir(), "state.db")))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	s, err := sqlite.New(t.Context(), db, sqlite.WithPoll(time.Hour), sqlite.WithWatchIdle(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, commit := range []bool{false, true} {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.CompareAndSetTx(t.Context(), tx, 0, row())
		if err != nil {
			t.Fatal(err)
		}
		if !commit {
			if err := tx.Rollback(); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Get(t.Context(), "t"); !errors.Is(err, cells.ErrNotFound) {
				t.Fatalf("after a rollback: %v", err)
			}
			continue
		}
		w, err := s.Watch(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		s.Changed()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if up, err := w.Next(ctx); err != nil || len(up.Routes) != 1 || up.Routes[0].Revision != got.Revision {
			t.Fatalf("watch after a commit: %+v, %v", up, err)
		}
	}
}

func BenchmarkTable(b *testing.B) {
	tabletest.Benchmark(b, func(tb testing.TB) cells.RoutingTable {
		s, err := sqlite.Open(tb.Context(), filepath.Join(tb.TempDir(), "routes.db"))
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = s.Close() })
		return s
	})
}
