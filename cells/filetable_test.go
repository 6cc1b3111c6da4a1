// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/tabletest"
)

func TestMemTableConformance(t *testing.T) {
	tabletest.Run(t, tabletest.Harness{
		Open: func(tb tabletest.TB) cells.RoutingTable {
			m := cells.NewMemTable(cells.WithWatchIdle(5 * time.Millisecond))
			tb.Cleanup(func() { _ = m.Close() })
			return m
		},
		Compact: func(_ tabletest.TB, m cells.RoutingTable) { m.(*cells.MemTable).Compact(1 << 62) },
	})
}

// The history is bounded by its size, not only by a call.
func TestMemTableHistoryIsBounded(t *testing.T) {
	m := cells.NewMemTable(cells.WithHistory(3))
	defer m.Close()
	r := cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
	var err error
	for range 10 {
		if r, err = m.CompareAndSet(t.Context(), r.Revision, r); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.Watch(t.Context(), 6); !errors.Is(err, cells.ErrCompacted) {
		t.Fatalf("a watch from revision 6: %v, want ErrCompacted", err)
	}
	w, err := m.Watch(t.Context(), 7)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if up, err := w.Next(t.Context()); err != nil || len(up.Routes) != 3 || up.Routes[0].Revision != 8 {
		t.Fatalf("a watch from revision 7: %+v, %v", up, err)
	}
}

func TestFileTableConformance(t *testing.T) {
	paths := sync.Map{} // table -> path
	opts := []cells.TableOption{cells.WithWatchIdle(5 * time.Millisecond), cells.WithPoll(time.Millisecond)}
	open := func(tb tabletest.TB, path string) cells.RoutingTable {
		f := cells.NewFileTable(path, opts...)
		paths.Store(f, path)
		tb.Cleanup(func() { _ = f.Close() })
		return f
	}
	same := func(tb tabletest.TB, t cells.RoutingTable) cells.RoutingTable {
		path, _ := paths.Load(t)
		return open(tb, path.(string))
	}
	tabletest.Run(t, tabletest.Harness{
		Open:    func(tb tabletest.TB) cells.RoutingTable { return open(tb, filepath.Join(tb.TempDir(), "routes.json")) },
		Another: same,
		Reopen: func(tb tabletest.TB, t cells.RoutingTable) cells.RoutingTable {
			if err := t.(*cells.FileTable).Close(); err != nil {
				tb.Fatalf("%v", err)
			}
			return same(tb, t)
		},
		Backlog: 150,
	})
}

// The minimal use: one argument, nothing to close, a file that can be read by people.
func TestFileTableFile(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "real.json")
	link := filepath.Join(dir, "cell-routes.json")
	first := cells.NewFileTable(target)
	defer first.Close()
	r := cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
	r, err := first.CompareAndSet(t.Context(), 0, r)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(target, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	linked := cells.NewFileTable(link)
	defer linked.Close()
	if r, err = linked.CompareAndSet(t.Context(), r.Revision, r); err != nil {
		t.Fatal(err)
	}
	if got, err := first.Get(t.Context(), "t"); err != nil || got.Revision != r.Revision {
		t.Fatalf("through the file: revision %d, %v; through the link it was %d", got.Revision, err, r.Revision)
	}
	fi, err := os.Stat(target)
	if err != nil || fi.Mode().Perm() != 0o640 {
		t.Fatalf("the file's mode became %v, %v", fi.Mode(), err)
	}
	b, err := os.ReadFile(target)
	if err != nil || !strings.Contains(string(b), `"tenant":"t"`) {
		t.Fatalf("the file holds %q, %v", b, err)
	}
}

func TestFileTableMissingFolder(t *testing.T) {
	f := cells.NewFileTable(filepath.Join(t.TempDir(), "missing", "routes.json"))
	defer f.Close()
	if _, err := f.Get(t.Context(), "t"); !errors.Is(err, cells.ErrNotFound) {
		t.Fatalf("Get: %v, want ErrNotFound", err)
	}
	r := cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
	if _, err := f.CompareAndSet(t.Context(), 0, r); !errors.Is(err, cells.ErrUnavailable) {
		t.Fatalf("CompareAndSet: %v, want ErrUnavailable", err)
	}
}

// A writer that waits for another process gives up with its context.
func TestFileTableLockIsHeld(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	f := cells.NewFileTable(path)
	defer f.Close()
	r := cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, errors.New("enough"))
	defer cancel()
	if _, err := f.CompareAndSet(ctx, 0, r); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "enough") {
		t.Fatalf("while the lock is held: %v, want the end of the context", err)
	}
	if _, err := f.Get(t.Context(), "t"); !errors.Is(err, cells.ErrNotFound) {
		t.Fatalf("readers wait for the lock: %v", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if _, err := f.CompareAndSet(t.Context(), 0, r); err != nil {
		t.Fatalf("after the lock was released: %v", err)
	}
}

func TestFileTableThousands(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	seed := make([]string, 0, 5000)
	for i := range 5000 {
		seed = append(seed, fmt.Sprintf("tenant-%05d", i))
	}
	writeFile(t, path, seed)
	f := cells.NewFileTable(path)
	defer f.Close()
	for _, id := range []cells.TenantID{"tenant-00000", "tenant-02500", "tenant-04999", "a-new-one", "z-new-one"} {
		r, err := f.Get(t.Context(), id)
		if errors.Is(err, cells.ErrNotFound) {
			r = cells.TenantRoute{TenantID: id, State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
		} else if err != nil {
			t.Fatal(err)
		}
		r.Stamp = "changed"
		if _, err := f.CompareAndSet(t.Context(), r.Revision, r); err != nil {
			t.Fatal(err)
		}
	}
	again := cells.NewFileTable(path)
	defer again.Close()
	n := 0
	for after := cells.TenantID(""); ; {
		p, err := again.List(t.Context(), cells.ListOptions{After: after, Limit: 700})
		if err != nil {
			t.Fatal(err)
		}
		n += len(p.Routes)
		if after = p.Next; after == "" {
			break
		}
	}
	if n != 5002 {
		t.Fatalf("the file holds %d tenants, want 5002", n)
	}
}

const (
	envChild = "CLOISTER_TEST_FILETABLE"
	children = 3
)

// TestFileTableChild is the process that TestFileTableKill kills: it counts a row
// of its own and one of everybody's up, and prints what was acknowledged.
func TestFileTableChild(t *testing.T) {
	path := os.Getenv(envChild)
	if path == "" {
		t.Skip("runs only as a child of TestFileTableKill")
	}
	own := cells.TenantID("child-" + os.Getenv(envChild+"_ID"))
	f := cells.NewFileTable(path)
	for {
		for _, id := range []cells.TenantID{own, "everybody"} {
			r, err := f.Get(t.Context(), id)
			if errors.Is(err, cells.ErrNotFound) {
				r = cells.TenantRoute{TenantID: id, State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1}
			} else if err != nil {
				t.Fatal(err)
			}
			r.EventMark++
			got, err := f.CompareAndSet(t.Context(), r.Revision, r)
			if errors.Is(err, cells.ErrConflict) && id != own {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			fmt.Printf("ack %s %d %d\n", id, got.EventMark, got.Revision)
		}
	}
}

// Processes that write are killed over and over: the file is always whole, what
// was acknowledged is there, and the lock never stays behind.
func TestFileTableKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routes.json")
	acked := make(map[cells.TenantID]uint64)
	revision := uint64(0)
	rounds := 25
	if testing.Short() {
		rounds = 5
	}
	for round := range rounds {
		outs := make([]*strings.Builder, children)
		var wg sync.WaitGroup
		for i := range children {
			cmd := exec.Command(os.Args[0], "-test.run=^TestFileTableChild$", "-test.count=1")
			cmd.Env = append(os.Environ(), envChild+"="+path, envChild+"_ID="+strconv.Itoa(i))
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			outs[i] = &strings.Builder{}
			wg.Add(1)
			go func() {
				defer wg.Done()
				in := bufio.NewReader(out)
				// Kill it at a different point of its work each time.
				for n := 0; n < 2+(round*7+i*3)%11; n++ {
					line, err := in.ReadString('\n')
					outs[i].WriteString(line)
					if err != nil {
						break
					}
				}
				_ = cmd.Process.Kill()
				rest, _ := io.ReadAll(in)
				outs[i].Write(rest)
				_ = cmd.Wait()
			}()
		}
		wg.Wait()
		for _, out := range outs {
			lines := strings.SplitAfter(out.String(), "\n")
			for _, line := range lines {
				var id string
				var mark, rev uint64
				if !strings.HasSuffix(line, "\n") {
					continue // cut by the kill
				}
				if n, _ := fmt.Sscanf(line, "ack %s %d %d\n", &id, &mark, &rev); n == 3 {
					acked[cells.TenantID(id)] = max(acked[cells.TenantID(id)], mark)
					revision = max(revision, rev)
				} else {
					t.Fatalf("a child said %q", out.String())
				}
			}
		}
		f := cells.NewFileTable(path)
		for id, mark := range acked {
			r, err := f.Get(t.Context(), id)
			if err != nil {
				t.Fatalf("round %d: Get(%s): %v", round, id, err)
			}
			// One more than acknowledged: written, and killed before it said so.
			if r.EventMark < cells.EventSeq(mark) || id != "everybody" && r.EventMark > cells.EventSeq(mark)+1 {
				t.Fatalf("round %d: %s counts %d, acknowledged were %d", round, id, r.EventMark, mark)
			}
			acked[id] = uint64(r.EventMark)
		}
		p, err := f.List(t.Context(), cells.ListOptions{})
		if err != nil || uint64(p.Revision) < revision {
			t.Fatalf("round %d: revision %d, %v; acknowledged was %d", round, p.Revision, err, revision)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		probe, err := f.Get(ctx, "everybody")
		if err == nil {
			_, err = f.CompareAndSet(ctx, probe.Revision, probe)
		}
		cancel()
		if err != nil {
			t.Fatalf("round %d: a change after the kills: %v", round, err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d kills, acknowledged %v, revision %d", rounds*children, acked, revision)
}
