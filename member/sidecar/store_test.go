// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/member"
)

// The start waits for the tables that the service makes; then fences are kept in
// the service's own database.
func TestStoreWaitsForTheTables(t *testing.T) {
	current := goleak.IgnoreCurrent()
	defer goleak.VerifyNone(t, current)
	path := filepath.Join(t.TempDir(), "a b%.db")
	cfg := Config{Member: member.Config{Cell: "cell-a"}, Upstream: "http://127.0.0.1:1", Engine: SQLite, DSN: path,
		Tables: []guard.Table{{Name: "notes", TenantColumn: "tenant"}}, Log: slog.New(slog.DiscardHandler), StartTimeout: time.Second}
	if err := cfg.normalize(); err != nil {
		t.Fatal(err)
	}
	if _, err := openStore(t.Context(), &cfg); !errors.Is(err, cells.ErrInvalid) {
		t.Fatalf("without the tables: %v", err)
	}
	cfg.StartTimeout = 30 * time.Second
	db, err := sql.Open("sqlite", "file:"+strings.NewReplacer("%", "%25", " ", "%20").Replace(path))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	opened := make(chan *store, 1)
	go func() {
		s, err := openStore(t.Context(), &cfg)
		if err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	select {
	case <-opened:
		t.Fatal("it did not wait")
	case <-time.After(100 * time.Millisecond):
	}
	if _, err := db.Exec(`PRAGMA busy_timeout = 5000`); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`CREATE TABLE notes (tenant TEXT, key TEXT, PRIMARY KEY (tenant, key))`); err != nil {
		t.Fatal(err)
	}
	s := <-opened
	if s == nil {
		return
	}
	if err := s.Keeper.OpenFence(context.Background(), cells.FenceOrder{Cell: "cell-a", Tenant: "acme", Epoch: 3, Floor: 3}); err != nil {
		t.Error(err)
	}
	// What a service in another language asks in its own transaction (docs/guards.md).
	for epoch, want := range map[int]int{2: 0, 3: 1, 4: 0} {
		var n int
		if err := db.QueryRow(`SELECT count(*) FROM cell_fence WHERE tenant = ?1 AND is_open AND floor <= ?2 AND ?2 <= epoch`, "acme", epoch).Scan(&n); err != nil || n != want {
			t.Errorf("epoch %d: %d, %v", epoch, n, err)
		}
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
}

func TestParseTables(t *testing.T) {
	got, err := ParseTables("notes:tenant, app.tags:org")
	if err != nil || len(got) != 2 || got[1] != (guard.Table{Name: "app.tags", TenantColumn: "org"}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "notes", "notes:", ":tenant", "a:b:c", "a:b,"} {
		if _, err := ParseTables(bad); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestStreamPaths(t *testing.T) {
	c := Config{Streams: []string{"/feed/*", "/pkg.Service/", "/exact"}}
	for path, want := range map[string]bool{
		"/feed/a": true, "/feed/a/b": false, "/feed": false, "/pkg.Service/Watch": true, "/pkg.Service": false, "/exact": true, "/exact/": false, "/": false,
	} {
		if got := c.isStream(path); got != want {
			t.Errorf("%s: %t", path, got)
		}
	}
}

// Messages are counted however they are cut.
func TestFrames(t *testing.T) {
	msg := func(n int) string { return "\x00\x00\x00\x00" + string(rune(n)) + strings.Repeat("x", n) }
	for _, c := range []struct {
		in     string
		second bool
	}{
		{"", false}, {msg(0), false}, {msg(5), false}, {msg(0) + msg(0), true}, {msg(5) + msg(7), true}, {msg(5) + "\x00", true}, {msg(100)[:50], false},
	} {
		for size := 1; size <= len(c.in); size++ {
			called := 0
			f := &frames{second: func() { called++ }}
			for b := []byte(c.in); len(b) > 0; {
				n := min(size, len(b))
				if f.seen < 2 {
					f.count(b[:n])
				}
				b = b[n:]
			}
			if want := map[bool]int{true: 1}[c.second]; called != want {
				t.Errorf("%q in pieces of %d: called %d times, want %d", c.in, size, called, want)
			}
		}
	}
}

// A goodbye is said between two frames only.
func TestBoundary(t *testing.T) {
	frame := func(n int) string {
		switch {
		case n < 126:
			return "\x82" + string([]byte{byte(n)}) + strings.Repeat("x", n)
		case n < 1<<16:
			return "\x82" + string([]byte{126, byte(n >> 8), byte(n)}) + strings.Repeat("x", n)
		}
		return "\x82" + string([]byte{127, 0, 0, 0, 0, 0, byte(n >> 16), byte(n >> 8), byte(n)}) + strings.Repeat("x", n)
	}
	for _, sizes := range [][]int{{0}, {1}, {125}, {126}, {300}, {70000}, {0, 5, 200, 0, 70000, 1}} {
		all, ends := "", map[int]bool{0: true}
		for _, n := range sizes {
			all += frame(n)
			ends[len(all)] = true
		}
		for _, piece := range []int{1, 2, 3, 7, 1000, len(all)} {
			var b boundary
			for at := 0; at < len(all); {
				n := min(piece, len(all)-at)
				b.pass([]byte(all[at : at+n]))
				if at += n; b.between() != ends[at] {
					t.Fatalf("frames of %v in pieces of %d: at %d it is said to be between: %t", sizes, piece, at, b.between())
				}
			}
		}
	}
}

func TestServiceProcess(t *testing.T) {
	t.Setenv("CELL_CHANNEL_KEY", "secret")
	out := filepath.Join(t.TempDir(), "env")
	p, err := startProcess([]string{"sh", "-c", "env > " + out + "; exit 3"}, "cell-a", "1234")
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if err := p.ended(); !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("how it ended: %v", err)
	}
	p.stop() // also after its end
	b, err := os.ReadFile(out)
	if err != nil || !strings.Contains(string(b), "PORT=1234\n") || !strings.Contains(string(b), "CELL_NAME=cell-a\n") || strings.Contains(string(b), "CELL_CHANNEL") {
		t.Errorf("the environment: %v\n%s", err, b)
	}
	// What does not end by itself is ended with all that it has started.
	p, err = startProcess([]string{"sh", "-c", "sleep 1000 & wait"}, "cell-a", "1234")
	if err != nil {
		t.Fatal(err)
	}
	p.stop()
	if err := syscall.Kill(-p.cmd.Process.Pid, 0); err == nil {
		deadline := time.Now().Add(time.Minute)
		for syscall.Kill(-p.cmd.Process.Pid, 0) == nil {
			if time.Now().After(deadline) {
				t.Fatal("something of its group is left")
			}
			<-time.After(10 * time.Millisecond)
		}
	}
}
