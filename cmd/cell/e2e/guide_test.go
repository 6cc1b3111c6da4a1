// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// block is one fenced block of commands, below its heading.
type block struct{ heading, text string }

// commands reads the blocks of commands of a page. A block of another kind is a mistake:
// it would not be run.
func commands(t *testing.T, path string) []block {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []block
	var heading string
	var text []string
	in := false
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		line := sc.Text()
		switch {
		case in && line == "```":
			out = append(out, block{heading, strings.Join(text, "\n") + "\n"})
			in, text = false, nil
		case in:
			text = append(text, line)
		case line == "```sh":
			in = true
		case strings.HasPrefix(strings.TrimSpace(line), "```"), strings.HasPrefix(line, "    "):
			t.Fatalf("%s: a block that is not run: %q", path, line)
		case strings.HasPrefix(line, "## "):
			heading = strings.TrimPrefix(line, "## ")
		}
	}
	if sc.Err() != nil || in || len(out) == 0 {
		t.Fatalf("%s: %v, %d blocks, open: %t", path, sc.Err(), len(out), in)
	}
	return out
}

// shell is one bash in which the blocks run, one after the other.
type shell struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner // what the commands print; what they leave running has logs of its own
	said  strings.Builder
}

// blockDone is what the shell says after a block that has succeeded.
const blockDone = "@@ done @@"

func startShell(t *testing.T, dir string, env ...string) *shell {
	t.Helper()
	s := &shell{cmd: exec.Command("bash", "-euo", "pipefail")}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s.cmd.Dir, s.cmd.Env, s.cmd.Stdout, s.cmd.Stderr = dir, append(os.Environ(), env...), w, w
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it and what it starts
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	s.lines = bufio.NewScanner(r)
	t.Cleanup(func() {
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
		_ = s.cmd.Wait()
		_ = r.Close()
		if t.Failed() {
			logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
			for _, l := range logs {
				b, _ := os.ReadFile(l)
				t.Logf("--- %s\n%s", filepath.Base(l), b[max(0, len(b)-4000):])
			}
		}
	})
	return s
}

// run runs a block; a command of it that fails ends the test.
func (s *shell) run(t *testing.T, b block) {
	t.Helper()
	stuck := time.AfterFunc(5*time.Minute, func() { _ = s.cmd.Process.Kill() })
	defer stuck.Stop()
	if _, err := io.WriteString(s.in, b.text+"echo '"+blockDone+"'\n"); err != nil && !errors.Is(err, syscall.EPIPE) {
		t.Fatal(err)
	}
	for s.lines.Scan() {
		if s.lines.Text() == blockDone {
			return
		}
		s.said.WriteString(s.lines.Text() + "\n")
	}
	t.Fatalf("a command of the guide failed, in %q:\n%s\n%s", b.heading, b.text, &s.said)
}

// balancer is the load balancer of the deployment: it gives each connection to a
// process whose /readyz is 200.
func balancer(t *testing.T, addr string, processes map[string]string) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	b := &balance{ready: map[string]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); _ = ln.Close(); wg.Wait() })
	for process, admin := range processes {
		wg.Go(func() { b.watch(ctx, process, admin) })
	}
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { b.serve(ctx, c) })
		}
	})
}

type balance struct {
	mu    sync.Mutex // guards what follows
	ready map[string]bool
	turn  int
}

func (b *balance) watch(ctx context.Context, process, admin string) {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := c.Get("http://" + admin + "/readyz")
		if err == nil {
			_ = resp.Body.Close()
		}
		b.mu.Lock()
		b.ready[process] = err == nil && resp.StatusCode == http.StatusOK
		b.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// pick returns the processes that are ready, another one first each time.
func (b *balance) pick() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []string
	for p, ok := range b.ready {
		if ok {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	b.turn++
	if n := len(out); n > 0 {
		k := b.turn % n
		out = append(out[k:], out[:k]...)
	}
	return out
}

// serve finds a process for one connection and carries its bytes.
func (b *balance) serve(ctx context.Context, c net.Conn) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	deadline := time.Now().Add(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for time.Now().Before(deadline) {
		for _, p := range b.pick() {
			up, err := net.Dial("tcp", p)
			if err != nil {
				continue
			}
			defer up.Close()
			defer context.AfterFunc(ctx, func() { _ = up.Close() })()
			back := make(chan struct{})
			go func() { defer close(back); _, _ = io.Copy(c, up); _ = c.Close() }()
			_, _ = io.Copy(up, c)
			_ = up.(*net.TCPConn).CloseWrite()
			<-back
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// leads makes requests go where the shared host leads, with what a client sends.
type leads struct {
	base  http.RoundTripper
	file  string
	token string
	mu    sync.Mutex // guards last
	last  string
}

// RoundTrip implements http.RoundTripper.
func (l *leads) RoundTrip(r *http.Request) (*http.Response, error) {
	b, err := os.ReadFile(l.file)
	l.mu.Lock()
	if at := strings.TrimSpace(string(b)); err == nil && at != "" {
		l.last = at
	}
	at := l.last
	l.mu.Unlock()
	r = r.Clone(r.Context())
	r.URL.Host, r.Host = at, "app.example.com"
	r.Header.Set("Authorization", "Bearer "+l.token)
	return l.base.RoundTrip(r)
}
