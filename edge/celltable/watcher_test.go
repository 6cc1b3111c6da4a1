// SPDX-License-Identifier: Apache-2.0

package celltable_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/rules"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	key = []byte("0123456789abcdef")
	own = rules.Config{Shared: "app.example.com", Upstream: "http://old:1"}
)

// fake is a directory.
type fake struct {
	mu    sync.Mutex // guards what follows
	table rules.Table
	err   error
	hang  bool
	reads int
}

func (f *fake) Table(ctx context.Context) (rules.Table, error) {
	f.mu.Lock()
	f.reads++
	table, err, hang := f.table, f.err, f.hang
	f.mu.Unlock()
	if hang {
		<-ctx.Done()
		return rules.Table{}, context.Cause(ctx)
	}
	return table, err
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads
}

func two() rules.Table {
	return rules.Table{Cells: []rules.Cell{
		{Name: "a", Host: "app.example.com", Upstream: "http://old:1", First: true, State: rules.Serving, Issuers: []string{"i"}},
		{Name: "b", Host: "b.example.com", Upstream: "http://b:1", State: rules.Serving},
	}}
}

func watch(t *testing.T, cfg celltable.Config) *celltable.Watcher {
	t.Helper()
	cfg.Rules = own
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	w, err := celltable.Watch(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func goes(w *celltable.Watcher, host string) string {
	x := w.Index()
	if x == nil {
		return "unknown"
	}
	d := x.Decide(rules.Request{Method: "GET", Host: host, Path: "/"})
	return string(d.Cell) + string(d.Answer)
}

// The table is read once in each interval; what cannot be read leaves the last one in
// use, and a directory that hangs costs nobody anything.
func TestCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logs bytes.Buffer
		f := &fake{table: two()}
		w := watch(t, celltable.Config{Source: f, Every: 5 * time.Second, Timeout: 2 * time.Second, Log: slog.New(slog.NewTextHandler(&logs, nil))})
		defer w.Close()
		if goes(w, "b.example.com") != "b" || f.count() != 1 {
			t.Fatal(goes(w, "b.example.com"), f.count())
		}
		changed := w.Changed()
		f.set(func() {
			f.table.Cells = append(f.table.Cells[:2:2], rules.Cell{Name: "c", Host: "c.example.com", Upstream: "http://c:1", State: rules.Attaching})
		})
		advance(4900 * time.Millisecond)
		if goes(w, "c.example.com") != "UNKNOWN_HOST" || f.count() != 1 {
			t.Fatal("it was read before its time")
		}
		advance(200 * time.Millisecond)
		if goes(w, "c.example.com") != "c" || f.count() != 2 {
			t.Fatal(goes(w, "c.example.com"), f.count())
		}
		select {
		case <-changed:
		default:
			t.Fatal("no change was told")
		}
		if s := w.Status(); !s.Known || s.Stale || s.Cells != 3 || s.Source != celltable.SourceDirectory || s.Age > 200*time.Millisecond {
			t.Fatalf("%+v", s)
		}
		for name, break_ := range map[string]func(){"hangs": func() { f.hang = true }, "fails": func() { f.err = errors.New("no route to the database") }} {
			f.set(break_)
			before := f.count()
			advance(3 * time.Minute)
			if goes(w, "c.example.com") != "c" || goes(w, "app.example.com") != "a" {
				t.Fatal(name, "changed a route")
			}
			s := w.Status()
			if !s.Stale || s.LastError == "" || s.Age < 2*time.Minute || f.count()-before < 30 {
				t.Fatalf("%s: %+v after %d reads", name, s, f.count()-before)
			}
			f.set(func() { f.hang, f.err = false, nil })
			advance(10 * time.Second)
			if s := w.Status(); s.Stale || s.Age > 5*time.Second || s.LastError != "" {
				t.Fatalf("%s: %+v", name, s)
			}
		}
		if n := strings.Count(logs.String(), "cannot be read"); n < 4 || n > 8 {
			t.Errorf("two outages of three minutes are told %d times", n)
		}
	})
}

// advance lets time pass, and everybody finish what is due.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// A cell that served never leaves a directory: what lacks it is another one.
func TestCellsDoNotVanish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{table: two()}
		f.table.Cells = append(f.table.Cells, rules.Cell{Name: "p", Host: "p.example.com", Upstream: "http://p:1", State: rules.Attaching})
		w := watch(t, celltable.Config{Source: f})
		defer w.Close()
		f.set(func() { f.table = rules.Table{} })
		advance(time.Minute)
		if goes(w, "b.example.com") != "b" || !strings.Contains(w.Status().LastError, "another directory") {
			t.Fatal(w.Status())
		}
		f.set(func() { f.table = two(); f.table.Revision = 7 }) // a prepared one may go
		advance(time.Minute)
		if goes(w, "p.example.com") != "UNKNOWN_HOST" || w.Status().Stale {
			t.Fatal(w.Status())
		}
		// A copy of the directory that has fallen behind.
		f.set(func() { f.table.Revision = 6; f.table.Cells[1].Upstream = "http://before:1" })
		advance(time.Minute)
		if w.Index().Upstream("b") != "http://b:1" || !strings.Contains(w.Status().LastError, "old copy") {
			t.Fatal(w.Status())
		}
		f.set(func() { f.table.Revision = 8 })
		advance(time.Minute)
		if w.Index().Upstream("b") != "http://before:1" || w.Status().Stale {
			t.Fatal(w.Status())
		}
	})
}

func TestColdStart(t *testing.T) {
	folder := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		up := &fake{table: two()}
		old := watch(t, celltable.Config{Source: up, Folder: folder, Name: "r1", Key: key})
		synctest.Wait()
		old.Close()
		advance(time.Hour)
		up.table.Cells[1].Upstream = "http://b:2"
		w := watch(t, celltable.Config{Source: up, Folder: folder, Name: "r2", Key: key})
		synctest.Wait()
		w.Close()
		if names(t, folder) != "r1.cells r2.cells" {
			t.Fatal(names(t, folder))
		}
		advance(time.Minute)

		down := &fake{hang: true}
		before := time.Now()
		w = watch(t, celltable.Config{Source: down, Folder: folder, Name: "r3", Key: key, Timeout: time.Hour})
		if d := time.Since(before); d != 3*time.Second {
			t.Errorf("the start took %s", d)
		}
		if s := w.Status(); goes(w, "b.example.com") != "b" || w.Index().Upstream("b") != "http://b:2" || s.Source != celltable.SourceSnapshot || !s.Stale || s.Age < time.Minute || s.Age > 2*time.Minute {
			t.Fatalf("%+v", s)
		}
		if names(t, folder) != "r1.cells r2.cells" {
			t.Error("what was not read from the directory was written:", names(t, folder))
		}
		w.Close()

		// An empty directory is not taken for the one that the snapshot is of.
		empty := &fake{err: errors.New("down")}
		w = watch(t, celltable.Config{Source: empty, Folder: folder, Name: "r3", Key: key})
		empty.set(func() { empty.err = nil })
		advance(time.Minute)
		if goes(w, "b.example.com") != "b" || w.Status().Source != celltable.SourceSnapshot {
			t.Fatalf("%+v", w.Status())
		}
		// It comes back.
		empty.set(func() { empty.table = two() })
		advance(10 * time.Second)
		if s := w.Status(); s.Source != celltable.SourceDirectory || w.Index().Upstream("b") != "http://b:1" || s.Age > 10*time.Second {
			t.Fatalf("%+v", s)
		}
		w.Close()
		if names(t, folder) != "r1.cells r2.cells r3.cells" {
			t.Error(names(t, folder))
		}
	})
}

func names(t *testing.T, folder string) string {
	t.Helper()
	l, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range l {
		out = append(out, e.Name())
	}
	return strings.Join(out, " ")
}

// What is in the folder and does not carry the seal, or is of another deployment, is
// passed over, however new it is.
func TestSnapshotsAreNotTrustedBlindly(t *testing.T) {
	folder := t.TempDir()
	good := &fake{table: two()}
	w := watch(t, celltable.Config{Source: good, Folder: folder, Name: "good", Key: key, Every: time.Millisecond})
	waitFile(t, filepath.Join(folder, "good.cells"))
	w.Close()
	b, err := os.ReadFile(filepath.Join(folder, "good.cells"))
	if err != nil {
		t.Fatal(err)
	}
	forge := func(name string, b []byte) {
		if err := os.WriteFile(filepath.Join(folder, name+".cells"), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	forge("changed", bytes.ReplaceAll(b, []byte("http://b:1"), []byte("http://e:1")))
	forge("torn", b[:len(b)-7])
	forge("empty", nil)
	forge("noise", []byte("hello"))
	other := own
	other.Shared = "other.example.com"
	evil := two()
	evil.Cells[1].Upstream = "http://evil:1"
	for name, c := range map[string]celltable.Config{"otherkey": {Rules: own, Key: []byte("fedcba9876543210")}, "othershared": {Rules: other, Key: key}} {
		c.Source, c.Folder, c.Name, c.Log = &fake{table: evil}, folder, name, slog.New(slog.DiscardHandler)
		e, err := celltable.Watch(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		waitFile(t, filepath.Join(folder, name+".cells"))
		e.Close()
	}
	down := &fake{err: errors.New("down")}
	w = watch(t, celltable.Config{Source: down, Folder: folder, Name: "new", Key: key})
	if w.Index() == nil || w.Index().Upstream("b") != "http://b:1" {
		t.Fatalf("%+v", w.Status())
	}
	w.Close()
	if err := os.Remove(filepath.Join(folder, "good.cells")); err != nil {
		t.Fatal(err)
	}
	w = watch(t, celltable.Config{Source: down, Folder: folder, Name: "new", Key: key})
	defer w.Close()
	if w.Index() != nil || w.Status().Known || goes(w, "app.example.com") != "unknown" {
		t.Fatalf("%+v", w.Status())
	}
}

func waitFile(t *testing.T, path string) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("no file", path)
		}
	}
}

// Files of replicas that are long gone are removed, those of living ones are not.
func TestOldFilesGo(t *testing.T) {
	folder := t.TempDir()
	long := time.Now().Add(-celltable.KeepFiles - time.Hour)
	for _, n := range []string{"gone.cells", "notes.txt"} {
		if err := os.WriteFile(filepath.Join(folder, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(folder, n), long, long); err != nil {
			t.Fatal(err)
		}
	}
	f := &fake{table: two()}
	w := watch(t, celltable.Config{Source: f, Folder: folder, Name: "r", Key: key})
	waitFile(t, filepath.Join(folder, "r.cells"))
	w.Close()
	if got := names(t, folder); got != "notes.txt r.cells" {
		t.Fatal(got)
	}
}

// Storage that cannot be written is told, and tried again; routing goes on.
func TestFolderThatIsNotThere(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "later")
	w := watch(t, celltable.Config{Source: &fake{table: two()}, Folder: folder, Name: "r", Key: key, Every: time.Millisecond})
	defer w.Close()
	if goes(w, "b.example.com") != "b" {
		t.Fatal(goes(w, "b.example.com"))
	}
	for w.Status().Snapshot == "" {
		select {
		case <-t.Context().Done():
			t.Fatal("the failure is not told")
		case <-time.After(time.Millisecond):
		}
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	waitFile(t, filepath.Join(folder, "r.cells"))
}

func TestConfig(t *testing.T) {
	ok := celltable.Config{Rules: own, Source: &fake{}, Folder: t.TempDir(), Name: "r", Key: key}
	for name, change := range map[string]func(*celltable.Config){
		"no source": func(c *celltable.Config) { c.Source = nil }, "short key": func(c *celltable.Config) { c.Key = key[:15] },
		"no name": func(c *celltable.Config) { c.Name = "" }, "a path": func(c *celltable.Config) { c.Name = "../r" }, "hidden": func(c *celltable.Config) { c.Name = ".r" },
		"no host": func(c *celltable.Config) { c.Rules.Shared = "" },
	} {
		c := ok
		change(&c)
		if w, err := celltable.Watch(t.Context(), c); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v %v", name, w, err)
		}
	}
	// Whoever starts it can give up.
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	cancel(gone)
	ok.Source = &fake{hang: true}
	if _, err := celltable.Watch(ctx, ok); !errors.Is(err, gone) {
		t.Error(err)
	}
}
