// SPDX-License-Identifier: Apache-2.0

package files

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWriteAndFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	path := filepath.Join(dir, "f")
	for _, text := range []string{"one", "two, longer", ""} {
		if err := Write(path, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil || string(b) != text {
			t.Fatalf("%q, %v", b, err)
		}
		st, err := os.Stat(path)
		if err != nil || st.Mode().Perm() != 0o640 {
			t.Fatalf("%v, %v", st.Mode(), err)
		}
	}
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != 1 {
		t.Fatalf("%v, %v: something is left beside it", list, err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Fatalf("%v, %v", st.Mode(), err)
	}
	if err := Folder(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o711 {
		t.Fatalf("%v, %v", st.Mode(), err)
	}
	if err := Write(dir, []byte("x"), 0o600); err == nil {
		t.Fatal("a folder was replaced by a file")
	}
}
