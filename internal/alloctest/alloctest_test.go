// SPDX-License-Identifier: Apache-2.0

package alloctest

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var sink []byte

func TestMeasure(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector changes what is allocated")
	}
	if c := Measure(func() {}); c != (Cost{}) {
		t.Errorf("nothing takes %+v", c)
	}
	if c := Measure(func() { sink = make([]byte, 1024) }); c.Allocs != 1 || c.Bytes < 1024 || c.Bytes > 1100 {
		t.Errorf("a kilobyte takes %+v", c)
	}
}

func TestCompare(t *testing.T) {
	kept := map[string]Cost{"same": {2, 100}, "worse": {1, 50}, "fat": {1, 1000}, "better": {3, 64}, "gone": {0, 0}}
	got := map[string]Cost{"same": {2, 104}, "worse": {2, 50}, "fat": {1, 1200}, "better": {1, 64}, "new": {0, 0}}
	wrong, notes := compare(got, kept)
	all := strings.Join(wrong, "\n")
	for _, name := range []string{"worse", "fat", "gone", "new"} {
		if !strings.Contains(all, name) {
			t.Errorf("nothing is said of %s:\n%s", name, all)
		}
	}
	if len(wrong) != 4 || len(notes) != 1 || !strings.Contains(notes[0], "better") {
		t.Errorf("%d wrong:\n%s\nnotes: %q", len(wrong), all, notes)
	}
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), file)
	if kept, err := read(path); err != nil || len(kept) != 0 {
		t.Errorf("no file: %v %v", kept, err)
	}
	want := map[string]Cost{"a": {1, 2}, "b/c": {0, 0}}
	if err := write(path, want); err != nil {
		t.Fatal(err)
	}
	if kept, err := read(path); err != nil || !maps.Equal(kept, want) {
		t.Errorf("read %v, %v; want %v", kept, err, want)
	}
	for _, bad := range []string{"a 1", "a 1 2 3", "a x 2", "a 1 2\na 1 2"} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if kept, err := read(path); err == nil {
			t.Errorf("%q was read as %v", bad, kept)
		}
	}
}
