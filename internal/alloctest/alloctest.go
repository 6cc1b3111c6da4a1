// SPDX-License-Identifier: Apache-2.0

package alloctest

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// Accept is the environment variable that, set to 1, has [Check] write what it
// measures instead of comparing.
const Accept = "CELL_KEEP_ALLOCS"

// file is where the kept values of a package are.
const file = "testdata/allocs.txt"

// Path is one hot path.
type Path struct {
	// Name says which, without blanks.
	Name string
	// Run does it once. It is called a few thousand times, by one goroutine.
	Run func()
}

// Cost is what one call of a path takes from the heap.
type Cost struct {
	Allocs int64
	Bytes  int64
}

// slack is what bytes may differ by without anybody having changed anything: what
// one call shares with others (a slab, a map that grows) does not divide evenly.
func (c Cost) slack() int64 { return 16 + c.Bytes/20 }

// worse reports whether c is above what was kept.
func (c Cost) worse(kept Cost) bool {
	return c.Allocs > kept.Allocs || c.Bytes > kept.Bytes+kept.slack()
}

// better reports whether what was kept could be lowered.
func (c Cost) better(kept Cost) bool {
	return c.Allocs < kept.Allocs || c.Bytes < kept.Bytes-kept.slack()
}

// Check measures the paths and compares them with the kept values of the package
// under test.
func Check(t *testing.T, paths ...Path) {
	t.Helper()
	if raceDetector {
		t.Skip("the race detector changes what is allocated")
	}
	got := make(map[string]Cost, len(paths))
	for _, p := range paths {
		if _, twice := got[p.Name]; twice || p.Name == "" || strings.ContainsAny(p.Name, " \t\n#") {
			t.Fatalf("alloctest: %q is no name, or is there twice", p.Name)
		}
		got[p.Name] = Measure(p.Run)
	}
	if os.Getenv(Accept) == "1" {
		if err := write(file, got); err != nil {
			t.Fatal(err)
		}
		return
	}
	kept, err := read(file)
	if err != nil {
		t.Fatal(err)
	}
	wrong, notes := compare(got, kept)
	for _, n := range notes {
		t.Log(n)
	}
	for _, w := range wrong {
		t.Error(w)
	}
	if len(wrong) > 0 {
		t.Errorf("if this is meant, accept it with: make keep-allocs (or %s=1 go test -run '^%s$' in this folder), and say why in the commit", Accept, t.Name())
	}
}

func compare(got, kept map[string]Cost) (wrong, notes []string) {
	for _, name := range sorted(got) {
		g := got[name]
		k, ok := kept[name]
		switch {
		case !ok:
			wrong = append(wrong, fmt.Sprintf("%s takes %d allocations, %d bytes; %s has no line for it", name, g.Allocs, g.Bytes, file))
		case g.worse(k):
			wrong = append(wrong, fmt.Sprintf("%s takes %d allocations, %d bytes; kept are %d and %d", name, g.Allocs, g.Bytes, k.Allocs, k.Bytes))
		case g.better(k):
			notes = append(notes, fmt.Sprintf("%s takes %d allocations, %d bytes, less than the kept %d and %d: make keep-allocs", name, g.Allocs, g.Bytes, k.Allocs, k.Bytes))
		}
	}
	for _, name := range sorted(kept) {
		if _, ok := got[name]; !ok {
			wrong = append(wrong, fmt.Sprintf("%s has a line for %s, which nobody measures", file, name))
		}
	}
	return wrong, notes
}

func sorted(m map[string]Cost) []string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Measure returns what a call of f takes: the least of several rounds, since other
// goroutines of the process are counted too.
func Measure(f func()) Cost {
	const runs, rounds = 400, 5
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for range runs / 4 { // pools and caches fill
		f()
	}
	var least Cost
	for round := range rounds {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range runs {
			f()
		}
		runtime.ReadMemStats(&after)
		c := Cost{Allocs: int64(after.Mallocs-before.Mallocs) / runs, Bytes: int64(after.TotalAlloc-before.TotalAlloc) / runs}
		if round == 0 {
			least = c
		}
		least.Allocs, least.Bytes = min(least.Allocs, c.Allocs), min(least.Bytes, c.Bytes)
	}
	return least
}

// read returns the kept values; a file that is not there has none.
func read(path string) (map[string]Cost, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	kept := make(map[string]Cost)
	in := bufio.NewScanner(f)
	for n := 1; in.Scan(); n++ {
		line := strings.TrimSpace(in.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		var name string
		var c Cost
		if _, err := fmt.Sscanf(line, "%s %d %d", &name, &c.Allocs, &c.Bytes); err != nil || len(strings.Fields(line)) != 3 {
			return nil, fmt.Errorf("%s:%d: want a name, allocations and bytes", path, n)
		}
		if _, twice := kept[name]; twice {
			return nil, fmt.Errorf("%s:%d: %s is there twice", path, n, name)
		}
		kept[name] = c
	}
	return kept, in.Err()
}

func write(path string, got map[string]Cost) error {
	var b strings.Builder
	b.WriteString("# Allocations and bytes for one call of each hot path; `make keep-allocs` writes this file.\n")
	for _, name := range sorted(got) {
		fmt.Fprintf(&b, "%-32s %4d %6d\n", name, got[name].Allocs, got[name].Bytes)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}
