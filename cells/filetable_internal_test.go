// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func testRoute(tenant TenantID, cell CellID) TenantRoute {
	return TenantRoute{TenantID: tenant, State: StateActive, CellID: cell, Epoch: 1, Floor: 1}
}

// fullDisk is a temporary file on a disk that has room for left bytes.
type fullDisk struct {
	*os.File
	left int
}

func (f *fullDisk) Write(b []byte) (int, error) {
	n := min(len(b), f.left)
	if n, err := f.File.Write(b[:n]); err != nil {
		return n, err
	}
	f.left -= n
	if n < len(b) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func TestFileTableFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	table := NewFileTable(path)
	defer table.Close()
	first, err := table.CompareAndSet(t.Context(), 0, testRoute("t1", "a"))
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	create := table.create
	for room := range len(before) {
		table.create = func(name string, mode fs.FileMode) (tempFile, error) {
			f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
			return &fullDisk{File: f, left: room}, err
		}
		next := first
		next.Reason = "r"
		_, err := table.CompareAndSet(t.Context(), first.Revision, next)
		if !errors.Is(err, ErrUnavailable) || !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("room for %d bytes: %v, want ErrUnavailable with ENOSPC", room, err)
		}
	}
	after, err := os.ReadFile(path)
	if err != nil || string(after) != string(before) {
		t.Fatalf("a failed write changed the file: %v", err)
	}
	if _, err := os.Stat(path + ".tmp"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("the temporary file stays behind: %v", err)
	}
	table.create = create
	if _, err := table.CompareAndSet(t.Context(), first.Revision, first); err != nil {
		t.Fatalf("after space was made: %v", err)
	}
}

// Every prefix and every altered byte of a file is refused, and stays as it is.
func TestFileTableTornFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	table := NewFileTable(path)
	defer table.Close()
	for i := range 3 {
		if _, err := table.CompareAndSet(t.Context(), 0, testRoute(TenantID(fmt.Sprint("t", i)), "a")); err != nil {
			t.Fatal(err)
		}
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decodeFile(good); err != nil {
		t.Fatal(err)
	}
	for n := range len(good) - 1 { // the last byte is a newline
		if _, err := decodeFile(good[:n]); !errors.Is(err, ErrInvalid) {
			t.Fatalf("the first %d bytes: %v, want ErrInvalid", n, err)
		}
	}
	body := strings.Index(string(good), `"body":`)
	for i := body + len(`"body":`) + 1; i < len(good)-3; i++ {
		bad := append([]byte(nil), good...)
		bad[i] ^= 1
		if _, err := decodeFile(bad); !errors.Is(err, ErrInvalid) {
			t.Fatalf("byte %d altered: %v, want ErrInvalid", i, err)
		}
	}
	newer := strings.Replace(string(good), `"version":1`, `"version":2`, 1)
	for name, content := range map[string]string{
		"torn": string(good[:len(good)/2]), "empty": "", "newer": newer, "foreign": `{"format":"other","version":1}`,
		"zeros": string(make([]byte, len(good))), "appended": string(good) + "x",
	} {
		p := filepath.Join(t.TempDir(), "routes.json")
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		bad := NewFileTable(p)
		defer bad.Close()
		_, getErr := bad.Get(t.Context(), "t1")
		_, casErr := bad.CompareAndSet(t.Context(), 0, testRoute("t9", "a"))
		_, listErr := bad.List(t.Context(), ListOptions{})
		_, watchErr := bad.Watch(t.Context(), 0)
		for _, err := range []error{getErr, casErr, listErr, watchErr} {
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), p) {
				t.Errorf("%s: %v, want ErrInvalid that names the file", name, err)
			}
		}
		if name == "newer" && !strings.Contains(getErr.Error(), "newer version") {
			t.Errorf("newer: %v does not say so", getErr)
		}
		if now, err := os.ReadFile(p); err != nil || string(now) != content {
			t.Errorf("%s: the file was changed (%v)", name, err)
		}
	}
}

func TestFileTableGoneOrBackInTime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	table := NewFileTable(path)
	defer table.Close()
	first, err := table.CompareAndSet(t.Context(), 0, testRoute("t1", "a"))
	if err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.CompareAndSet(t.Context(), first.Revision, first); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".copy", old, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".copy", path); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Get(t.Context(), "t1"); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "went back") {
		t.Fatalf("an older copy: %v, want ErrInvalid", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := table.CompareAndSet(t.Context(), 0, testRoute("t1", "b")); !errors.Is(err, ErrInvalid) {
		t.Fatalf("a vanished file: %v, want ErrInvalid", err)
	}
	later := NewFileTable(path)
	defer later.Close()
	if _, err := later.CompareAndSet(t.Context(), 0, testRoute("t1", "b")); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "lock file") {
		t.Fatalf("a vanished file, for a process that starts later: %v, want ErrInvalid", err)
	}
	if err := os.Remove(path + ".lock"); err != nil {
		t.Fatal(err)
	}
	fresh := NewFileTable(path)
	defer fresh.Close()
	if _, err := fresh.CompareAndSet(t.Context(), 0, testRoute("t1", "b")); err != nil {
		t.Fatalf("after both files were removed: %v", err)
	}
}

// A lock file that is removed while it is held does not let a second writer in
// with the first one's view.
func TestFileTableLockFileRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	a, b := NewFileTable(path), NewFileTable(path)
	defer a.Close()
	defer b.Close()
	r, err := a.CompareAndSet(t.Context(), 0, testRoute("t1", "a"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path + ".lock"); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		table := []*FileTable{a, b}[i%2]
		if r, err = table.CompareAndSet(t.Context(), r.Revision, r); err != nil {
			t.Fatal(err)
		}
	}
	ai, _ := a.lock.Stat()
	bi, _ := b.lock.Stat()
	if !os.SameFile(ai, bi) {
		t.Fatal("the two tables lock different files")
	}
}
