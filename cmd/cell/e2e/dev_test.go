// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// cell dev does the main job, and Ctrl-C leaves nothing behind.
func TestDevLeavesNothing(t *testing.T) {
	stores(t, func(t *testing.T, store string) {
		dir, err := os.MkdirTemp("", "cell-dev-")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, filepath.Join(bin, "cell"), "dev", "--fleet", filepath.Join(dir, "s"), "--store", store, "--listen", "127.0.0.1:0", "--demo")
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var seen strings.Builder
		sc := bufio.NewScanner(out)
		for sc.Scan() {
			seen.WriteString(sc.Text() + "\n")
			if strings.Contains(sc.Text(), "Ctrl-C stops everything") {
				break
			}
		}
		if len(orphans(t, dir)) < 4 {
			t.Errorf("the fleet's processes were not found: %v", orphans(t, dir))
		}
		_ = cmd.Process.Signal(syscall.SIGINT)
		for sc.Scan() {
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("cell dev: %v\n%s", err, errs.String())
		}
		if !strings.Contains(seen.String(), "0 failed, 0 lost, 0 duplicated") || !strings.Contains(errs.String(), "first request served") {
			t.Errorf("the demo did not say what it should:\n%s\n%s", seen.String(), errs.String())
		}
		if left := orphans(t, dir); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
}

// A supervisor that is killed takes its processes with it.
func TestKilledDevLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(filepath.Join(bin, "cell"), "dev", "--fleet", dir, "--listen", "127.0.0.1:0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sc := bufio.NewScanner(out)
	for sc.Scan() && !strings.Contains(sc.Text(), "Ctrl-C") {
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	e := &env{t: t}
	e.eventually("all processes are gone", 10*time.Second, func() bool { return len(orphans(t, dir)) == 0 })
}

// A fleet that is started again on its folder has the same tenants and memories.
func TestRestartKeepsEverything(t *testing.T) {
	e := start(t, fleet.Config{})
	c := e.tenant("acme", "cell-b")
	if _, err := c.Set(t.Context(), "n", "k", "kept", -1); err != nil {
		t.Fatal(err)
	}
	dir := e.Layout.Dir
	e.Fleet.Close()
	without := e.Config
	without.Cells = without.Cells[:1]
	if f, err := fleet.Start(t.Context(), without, fleet.Options{Dir: dir, Cell: filepath.Join(bin, "cell")}); err == nil || !strings.Contains(err.Error(), "--cells cell-a,cell-b") {
		if err == nil {
			f.Close()
		}
		t.Errorf("a cell that has a tenant was left out: %v", err)
	}
	again, err := fleet.Start(t.Context(), e.Config, fleet.Options{Dir: dir, Cell: filepath.Join(bin, "cell")})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	c.Base = again.Info.Edge
	if err := load.WaitServed(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if it, err := c.Get(t.Context(), "n", "k"); err != nil || string(it.Value) != `"kept"` || it.Cell != "cell-b" {
		t.Fatalf("%v, %+v", err, it)
	}
}

// A fleet that cannot begin leaves no folder.
func TestPortInUseLeavesNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dir := filepath.Join(t.TempDir(), "state")
	if f, err := fleet.Start(t.Context(), fleet.Config{Listen: l.Addr().String()}, fleet.Options{Dir: dir, Cell: filepath.Join(bin, "cell")}); err == nil || !strings.Contains(err.Error(), "--listen") {
		if err == nil {
			f.Close()
		}
		t.Errorf("a fleet on a port in use: %v", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("a folder is left: %v", err)
	}
}
