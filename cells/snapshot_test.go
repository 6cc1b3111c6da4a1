// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

var snapshotKey = []byte("0123456789abcdef0123456789abcdef")

// writtenSnapshot runs a router over the table until it has written its snapshot.
func writtenSnapshot(t *testing.T, table cells.RoutingTable, path string) {
	t.Helper()
	r := cells.NewRouter(table, cells.WithSnapshot(path, snapshotKey), cells.WithRouterLogger(quiet))
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
}

// coldStart starts a router whose table is down.
func coldStart(t *testing.T, path string, key []byte) (*cells.Router, error) {
	t.Helper()
	table := newFaultTable(t)
	table.down = cells.ErrUnavailable
	r := cells.NewRouter(table, cells.WithSnapshot(path, key), cells.WithRouterLogger(quiet), cells.WithDefaultCell("cell-z"))
	t.Cleanup(func() { _ = r.Close() })
	return r, r.Start(t.Context())
}

func TestSnapshotColdStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "routes")
		table := newFaultTable(t)
		row := inMove("moving", cells.StateCopying, "cell-a", 4, 5)
		row.Residue = []cells.Residue{{Cell: "cell-b", Epoch: 3, Move: "m0"}}
		set(t, table, active("acme", "cell-a", 4))
		set(t, table, row)
		gone := active("gone", "cell-a", 2)
		gone.State = cells.StateDeleted
		set(t, table, gone)
		writtenSnapshot(t, table, path)
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the file's mode: %v %v", info.Mode(), err)
		}
		if files, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); len(files) != 1 {
			t.Errorf("left behind: %v", files)
		}

		pass(time.Hour)
		table.with(func(f *faultTable) { f.down = cells.ErrUnavailable })
		r := cells.NewRouter(table, cells.WithSnapshot(path, snapshotKey), cells.WithDefaultCell("cell-z"), cells.WithRouterLogger(quiet))
		if err := r.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		s := r.Status()
		if s.Source != cells.SourceSnapshot || !s.Stale || s.Revision != 3 || s.Routes != 3 || s.Age < time.Hour || s.Age > time.Hour+time.Minute {
			t.Errorf("status after a cold start: %+v", s)
		}
		if d := r.Lookup("acme"); d.Cell != "cell-a" || d.Epoch != 4 || d.Age < time.Hour {
			t.Errorf("acme: %+v", d)
		}
		if d := r.Lookup("moving"); len(d.Route.Residue) != 1 || d.Refusal().Code != cells.CodeMoving {
			t.Errorf("moving: %+v", d)
		}
		if d := r.Lookup("gone"); d.Known {
			t.Errorf("a tombstone in the snapshot: %+v", d)
		}
		// The table comes back: the router goes on from there.
		table.with(func(f *faultTable) { f.down = nil })
		set(t, table, active("acme", "cell-b", 6))
		pass(10 * time.Second)
		synctest.Wait()
		if s := r.Status(); s.Source != cells.SourceTable || s.Stale || s.SnapshotRevision != 4 {
			t.Errorf("status after the table is back: %+v", s)
		}
		if d := r.Lookup("acme"); d.Cell != "cell-b" {
			t.Errorf("acme: %+v", d)
		}
		r.Close()
	})
}

func TestSnapshotNone(t *testing.T) {
	noLeaks(t)
	r, err := coldStart(t, filepath.Join(t.TempDir(), "routes"), snapshotKey)
	if !errors.Is(err, cells.ErrUnavailable) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no table and no snapshot: %v", err)
	}
	if d := r.Lookup("acme"); d.Known {
		t.Errorf("%+v", d)
	}
	r = cells.NewRouter(cells.NewMemTable(), cells.WithSnapshot("x", []byte("short")))
	if err := r.Start(t.Context()); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a short key: %v", err)
	}
}

// A file that is torn anywhere, changed anywhere, or not ours is refused.
func TestSnapshotRefused(t *testing.T) {
	noLeaks(t)
	path := filepath.Join(t.TempDir(), "routes")
	table := cells.NewMemTable()
	set(t, table, active("acme", "cell-a", 4))
	set(t, table, active("bolt", "cell-b", 2))
	writtenSnapshot(t, table, path)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(name string, content, key []byte, why string) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := coldStart(t, path, key)
		if !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want one that says %q", name, err, why)
		}
		if d := r.Lookup("acme"); d.Known {
			t.Errorf("%s: %+v was believed", name, d)
		}
		if s := r.Status(); !strings.Contains(s.SnapshotError, why) {
			t.Errorf("%s: the status says %q", name, s.SnapshotError)
		}
	}
	for n := range good {
		refused(fmt.Sprintf("torn at %d", n), good[:n], snapshotKey, "")
	}
	for n := len("cloister-routes 1"); n < len(good); n += 7 {
		bad := bytes.Clone(good)
		bad[n] ^= 1
		refused(fmt.Sprintf("changed at %d", n), bad, snapshotKey, "")
	}
	half := len(good) / 2
	refused("torn", good[:half], snapshotKey, "torn")
	refused("appended", append(bytes.Clone(good), "{}\n"...), snapshotKey, "torn")
	refused("another key", good, []byte("fedcba9876543210"), "another key")
	refused("newer", bytes.Replace(good, []byte("routes 1\n"), []byte("routes 2\n"), 1), snapshotKey, "version 2")
	refused("something else", []byte("hello\n"), snapshotKey, "is not a routes snapshot")

	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := coldStart(t, path, snapshotKey); err != nil {
		t.Errorf("the file as it was: %v", err)
	}
}

// Changes are written together, a while after the first; the last ones at Close.
func TestSnapshotDebounce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "routes")
		table := cells.NewMemTable()
		r := startRouter(t, table, cells.WithSnapshot(path, snapshotKey))
		synctest.Wait()
		var writes int
		var last []byte
		for i := range 1000 {
			set(t, table, active("acme", "cell-a", cells.Epoch(i+1)))
			pass(5 * time.Millisecond)
			synctest.Wait()
			if b, _ := os.ReadFile(path); !bytes.Equal(b, last) {
				last = b
				writes++
			}
		}
		if writes < 3 || writes > 7 {
			t.Errorf("%d writes in 5 s of changes", writes)
		}
		r.Close()
		if s := r.Status(); s.SnapshotRevision != 1000 {
			t.Errorf("after Close the snapshot is at revision %d of 1000", s.SnapshotRevision)
		}
	})
}

func TestSnapshotCannotBeWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "missing")
		r := startRouter(t, cells.NewMemTable(), cells.WithSnapshot(filepath.Join(dir, "routes"), snapshotKey))
		synctest.Wait()
		if s := r.Status(); s.SnapshotError == "" || s.Stale {
			t.Errorf("status: %+v", s)
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		pass(11 * time.Second)
		synctest.Wait()
		if s := r.Status(); s.SnapshotError != "" {
			t.Errorf("status once there is a folder: %+v", s)
		}
		r.Close()
	})
}

// Of two routers that share a file the one that is behind does not win.
func TestSnapshotShared(t *testing.T) {
	noLeaks(t)
	path := filepath.Join(t.TempDir(), "routes")
	ahead, behind := cells.NewMemTable(), cells.NewMemTable()
	for i := range 5 {
		set(t, ahead, active("acme", "cell-a", cells.Epoch(i+1)))
	}
	set(t, behind, active("acme", "cell-b", 1))
	writtenSnapshot(t, ahead, path)
	want, _ := os.ReadFile(path)
	r := startRouter(t, behind, cells.WithSnapshot(path, snapshotKey))
	eventually(t, "the conflict is reported", func() bool { return strings.Contains(r.Status().SnapshotError, "newer") })
	r.Close()
	if got, _ := os.ReadFile(path); !bytes.Equal(got, want) {
		t.Error("the newer file was replaced")
	}
}
