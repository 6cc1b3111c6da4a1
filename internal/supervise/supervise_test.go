// SPDX-License-Identifier: Apache-2.0

package supervise_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/internal/supervise"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func group(t *testing.T) *supervise.Group {
	t.Helper()
	g, err := supervise.New(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return g
}

func TestKilledProcessIsStartedAgain(t *testing.T) {
	g := group(t)
	p, err := g.Start(supervise.Spec{Name: "sleeper", Args: []string{"sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	pid := p.PID()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.WaitRestart(ctx, pid); err != nil {
		t.Fatal(err)
	}
	if p.Restarts() != 1 {
		t.Fatalf("restarts = %d, want 1", p.Restarts())
	}
}

// A child that ignores SIGTERM and its own children must all be gone after Stop.
func TestStopLeavesNothing(t *testing.T) {
	g := group(t)
	pidFile := filepath.Join(t.TempDir(), "pid")
	p, err := g.Start(supervise.Spec{Name: "stubborn", Grace: 200 * time.Millisecond,
		Args: []string{"sh", "-c", "trap '' TERM; sleep 600 & echo $! > " + pidFile + ".tmp; mv " + pidFile + ".tmp " + pidFile + "; while :; do wait; done"}})
	if err != nil {
		t.Fatal(err)
	}
	grandchild := 0
	deadline := time.Now().Add(time.Minute)
	for grandchild == 0 && time.Now().Before(deadline) {
		if b, err := os.ReadFile(pidFile); err == nil {
			grandchild, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		}
	}
	pid := p.PID()
	p.Stop()
	for _, id := range []int{pid, grandchild} {
		for gone := false; !gone; {
			gone = errors.Is(syscall.Kill(id, 0), syscall.ESRCH) || zombie(id)
			if time.Now().After(deadline.Add(10 * time.Second)) {
				t.Fatalf("process %d is still there", id)
			}
		}
	}
}

// zombie reports whether a process is dead and only waits to be reaped by init.
func zombie(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(b), ") Z ")
}

func TestUnknownProgramIsRefused(t *testing.T) {
	g := group(t)
	if _, err := g.Start(supervise.Spec{Name: "x", Args: []string{"no-such-program-here"}}); err == nil {
		t.Fatal("started a program that does not exist")
	}
	if names := g.Names(); len(names) != 0 {
		t.Fatalf("a failed start is listed: %v", names)
	}
}

// A process that ended is asked about with what it wrote, and may get other arguments.
func TestRemake(t *testing.T) {
	g := group(t)
	asked := make(chan string, 10)
	fail := supervise.Spec{Name: "port", Args: []string{"sh", "-c", "echo address already in use >&2; exit 1"}}
	fail.Remake = func(output string) *supervise.Spec {
		asked <- output
		return &supervise.Spec{Args: []string{"sh", "-c", "test $PORT = 2 && exec sleep 600"}, Env: []string{"PORT=2"}}
	}
	p, err := g.Start(fail)
	if err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got != "address already in use\n" {
		t.Fatalf("it is told of %q", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.WaitRestart(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if p.Restarts() != 1 {
		t.Fatalf("restarts = %d", p.Restarts())
	}
}
