// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	key   = []byte("0123456789abcdef")
	quiet = slog.New(slog.DiscardHandler)
)

// fake is a directory whose streams the test writes. A nil next breaks the stream.
type fake struct {
	down bool
	next chan *api.Topology
}

var errBroke = errors.New("broke")

func (f *fake) WatchTopology(ctx context.Context, do func(*api.Topology) error) error {
	if f.down {
		return errBroke
	}
	for {
		select {
		case t := <-f.next:
			if t == nil {
				return errBroke
			}
			if err := do(t); err != nil {
				return err
			}
			if err := do(nil); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func top(directory string, upstreams map[cells.CellID][]string) *api.Topology {
	t := &api.Topology{Serial: 1, Directory: directory}
	for id, u := range upstreams {
		t.Cells = append(t.Cells, api.TopologyCell{ID: id, State: api.CellServing, Upstreams: u})
	}
	return t
}

func watch(t *testing.T, cfg Config) *Watcher {
	t.Helper()
	cfg.Log = quiet
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w, err := Watch(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

func until(t *testing.T, w View, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		changed := w.Changed()
		if ok() {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatal("waited in vain")
		}
	}
}

func has(w View, cell cells.CellID, want ...string) func() bool {
	return func() bool {
		got := w.Upstreams(cell)
		return len(got) == 0 && len(want) == 0 || reflect.DeepEqual(got, want)
	}
}

func TestFollows(t *testing.T) {
	f := &fake{next: make(chan *api.Topology, 1)}
	f.next <- top("d1", map[cells.CellID][]string{"a": {"http://1"}, "b": {}})
	path := filepath.Join(t.TempDir(), "topology")
	w := watch(t, Config{Source: f, Snapshot: path, Key: key})
	if !has(w, "a", "http://1")() || !w.Knows("b") || w.Knows("c") {
		t.Fatal(w.Topology())
	}
	st := w.Status()
	if !st.Known || st.Source != SourceDirectory || st.Cells != 2 || st.Age > time.Minute {
		t.Fatalf("%+v", st)
	}
	f.next <- top("d1", map[cells.CellID][]string{"a": {"http://2"}})
	until(t, w, has(w, "a", "http://2"))
	if w.Knows("b") {
		t.Fatal("b is still there")
	}
	// The same directory says that nobody is ready: that is so.
	f.next <- top("d1", map[cells.CellID][]string{"a": {}})
	until(t, w, has(w, "a"))
	f.next <- top("d1", map[cells.CellID][]string{"a": {"http://3"}})
	until(t, w, has(w, "a", "http://3"))
	// Another one that has heard nobody yet: the addresses stay.
	f.next <- nil
	f.next <- top("d2", map[cells.CellID][]string{"a": {}, "b": {"http://4"}})
	until(t, w, has(w, "b", "http://4"))
	if !has(w, "a", "http://3")() {
		t.Fatal("a directory that has just started took the addresses away")
	}
	f.next <- top("d2", map[cells.CellID][]string{"a": {"http://5"}, "b": {}})
	until(t, w, has(w, "a", "http://5"))
	f.next <- top("d2", map[cells.CellID][]string{"a": {}, "b": {}})
	until(t, w, has(w, "a"))
	if w.Status().Breaks == 0 || w.Status().LastError == "" {
		t.Fatalf("%+v", w.Status())
	}
}

func TestColdStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology")
	up := &fake{next: make(chan *api.Topology, 1)}
	up.next <- top("d1", map[cells.CellID][]string{"a": {"http://1"}})
	w := watch(t, Config{Source: up, Snapshot: path, Key: key})
	w.Close()

	w = watch(t, Config{Source: &fake{down: true}, Snapshot: path, Key: key})
	if st := w.Status(); !has(w, "a", "http://1")() || st.Source != SourceSnapshot || st.Breaks == 0 {
		t.Fatalf("%+v %v", st, w.Upstreams("a"))
	}
	w.Close()

	// A directory that takes the connection and says nothing.
	hang := &fake{next: make(chan *api.Topology)}
	w = watch(t, Config{Source: hang, Snapshot: path, Key: key, Patience: time.Millisecond})
	if w.Status().Source != SourceSnapshot {
		t.Fatalf("%+v", w.Status())
	}
	hang.next <- top("d2", map[cells.CellID][]string{"a": {"http://2"}})
	until(t, w, has(w, "a", "http://2"))
	if w.Status().Source != SourceDirectory {
		t.Fatalf("%+v", w.Status())
	}
}

func TestNothingToStartFrom(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := Watch(ctx, Config{Source: &fake{down: true}, Log: quiet})
	if !errors.Is(err, cells.ErrUnavailable) || !errors.Is(err, errBroke) {
		t.Fatal(err)
	}
	for _, cfg := range []Config{{}, {Source: &fake{}, Snapshot: "x", Key: []byte("short")}} {
		if _, err := Watch(t.Context(), cfg); !errors.Is(err, cells.ErrInvalid) {
			t.Fatal(err)
		}
	}
}

func TestSnapshotIsNotTrustedBlindly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology")
	s := snapshot{SeenAt: time.Now(), Topology: top("d", map[cells.CellID][]string{"a": {"http://1"}})}
	if err := format.Write(path, key, s); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := read(path, key); err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{
		"torn": good[:len(good)-10], "empty": {}, "changed": bytes.Replace(good, []byte("http://1"), []byte("http://6"), 1),
		"newer": bytes.Replace(good, []byte("topology 1"), []byte("topology 2"), 1), "grown": append(append([]byte{}, good...), 'x'),
		"other": []byte("hello\nworld\n"), "no body": []byte("cloister-topology 1\nmac 00\n"), "twice": append(append([]byte{}, good...), good...),
	} {
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Watch(t.Context(), Config{Source: &fake{down: true}, Snapshot: path, Key: key, Log: quiet, Patience: time.Millisecond}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		// The directory is there: the file does not matter, and is replaced.
		up := &fake{next: make(chan *api.Topology, 1)}
		up.next <- top("d", map[cells.CellID][]string{"a": {"http://2"}})
		w := watch(t, Config{Source: up, Snapshot: path, Key: key})
		if !has(w, "a", "http://2")() || w.Status().Source != SourceDirectory {
			t.Errorf("%s: %+v", name, w.Status())
		}
		w.Close()
		if s, err := read(path, key); err != nil || s.Topology.Cells[0].Upstreams[0] != "http://2" {
			t.Errorf("%s: the snapshot was not replaced: %v", name, err)
		}
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := read(path, []byte("another key of 16")); !errors.Is(err, cells.ErrInvalid) {
		t.Error("signed with another key:", err)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("left over: %v %v", left, err)
	}
}

// The admission key, which signs the snapshot, was replaced: an edge starts.
func TestKeyRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology")
	s := snapshot{SeenAt: time.Now(), Topology: top("d", map[cells.CellID][]string{"a": {"http://1"}})}
	if err := format.Write(path, key, s); err != nil {
		t.Fatal(err)
	}
	fresh := []byte("fedcba9876543210")
	up := &fake{next: make(chan *api.Topology, 1)}
	up.next <- top("d", map[cells.CellID][]string{"a": {"http://1"}})
	watch(t, Config{Source: up, Snapshot: path, Key: fresh}).Close()
	w := watch(t, Config{Source: &fake{down: true}, Snapshot: path, Key: fresh})
	if !has(w, "a", "http://1")() {
		t.Fatalf("%+v", w.Status())
	}
}

// counter counts the records of a log.
type counter struct {
	slog.Handler
	n atomic.Int64
}

func (c *counter) Enabled(context.Context, slog.Level) bool { return true }
func (c *counter) Handle(context.Context, slog.Record) error {
	c.n.Add(1)
	return nil
}

func TestOutageIsLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{next: make(chan *api.Topology, 1)}
		f.next <- top("d", map[cells.CellID][]string{"a": {"http://1"}})
		lines := &counter{}
		w, err := Watch(t.Context(), Config{Source: &failing{f: f}, Log: slog.New(lines)})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		f.next <- nil
		<-time.After(5*time.Minute + time.Second)
		breaks := w.Status().Breaks
		if got := lines.n.Load(); got < 5 || got > 7 || breaks < 30 {
			t.Fatalf("%d lines in five minutes of %d breaks", got, breaks)
		}
	})
}

// failing is a directory that is down, with another error each time, once f broke.
type failing struct {
	f    *fake
	fell bool
	n    int
}

func (f *failing) WatchTopology(ctx context.Context, do func(*api.Topology) error) error {
	if f.fell {
		f.n++
		return fmt.Errorf("dial from port %d: refused", f.n)
	}
	f.fell = true
	return f.f.WatchTopology(ctx, do)
}

func TestStatic(t *testing.T) {
	s := NewStatic(map[cells.CellID][]string{"a": {"http://1"}})
	changed := s.Changed()
	s.Set("b", "http://2", "http://3")
	select {
	case <-changed:
	default:
		t.Fatal("no change was told")
	}
	if len(s.Upstreams("b")) != 2 || !s.Knows("a") || s.Knows("c") || !s.Status().Known {
		t.Fatal(s.Status())
	}
}
