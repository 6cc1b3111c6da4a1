// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/sqlite"
)

func TestOpenRefusesForeignAndNewerFiles(t *testing.T) {
	dir := t.TempDir()
	foreign := filepath.Join(dir, "foreign.db")
	if err := os.WriteFile(foreign, []byte("this is a text file, long enough to be taken for a database header, and no database at all......"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlite.Open(t.Context(), foreign); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a text file: %v, want ErrInvalid", err)
	}

	newer := filepath.Join(dir, "newer.db")
	s, err := sqlite.Open(t.Context(), newer)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", newer)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`INSERT INTO directory_migrations (version_id, is_applied) VALUES (99, 1)`); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`DELETE FROM meta WHERE name = 'needs_schema'`); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlite.Open(t.Context(), newer); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a file of a newer build: %v, want ErrInvalid", err)
	}
	// One that says that older builds may run on it.
	if db, err = sql.Open("sqlite", newer); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`INSERT INTO meta (name, value) VALUES ('needs_schema', 7) ON CONFLICT (name) DO UPDATE SET value = 7`); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = sqlite.Open(t.Context(), newer); err != nil {
		t.Fatalf("a newer file for builds from schema 7 on: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlite.Open(t.Context(), filepath.Join(dir, "no", "such", "folder.db")); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("no folder: %v, want ErrUnavailable", err)
	}
	// A folder whose name needs escaping, and the file's mode.
	odd := filepath.Join(dir, "a?b%c d#e")
	if err := os.Mkdir(odd, 0o700); err != nil {
		t.Fatal(err)
	}
	s, err = sqlite.Open(t.Context(), filepath.Join(odd, "x.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	info, err := os.Stat(filepath.Join(odd, "x.db"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 || info.Size() == 0 {
		t.Errorf("mode %v, size %d", info.Mode(), info.Size())
	}
}

func TestOpenAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "directory.db")
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			s, err := sqlite.Open(t.Context(), path)
			if err != nil {
				t.Errorf("open: %v", err)
				return
			}
			if err := s.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
	wg.Wait()
}
