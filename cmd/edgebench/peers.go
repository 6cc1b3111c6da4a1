// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-dev/cloister/internal/freeport"
)

// peer is one proxy as a process.
type peer struct {
	name string // as it is reported
	port int    // without TLS
	tls  int    // with TLS; 0 without
	pids []int  // whose CPU counts
	proc *process
}

// process is a child. It ends with this process.
type process struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended
	output string        // the file of what it says
}

// start starts a program; what it says goes to a file of its name in the bench's folder.
func (b *bench) start(name, path string, args ...string) (*process, error) {
	p := &process{done: make(chan struct{}), output: filepath.Join(b.dir, name+".out")}
	f, err := os.Create(p.output)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p.cmd = exec.Command(path, args...)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = b.dir, f, f
	p.cmd.Env = append(os.Environ(), b.env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	b.procs = append(b.procs, p)
	return p, nil
}

// stop asks a process to end, and makes it end after ten seconds.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// up waits until something listens on a port.
func (p *process) up(ctx context.Context, port int) error {
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			return c.Close()
		}
		select {
		case <-tick.C:
			continue
		case <-p.done:
		case <-deadline:
		case <-ctx.Done():
			return ctx.Err()
		}
		said, _ := os.ReadFile(p.output)
		return fmt.Errorf("%s does not listen on %s: %w\n%s", p.cmd.Path, addr, err, said)
	}
}

// startPeer starts a proxy in front of the cells.
func (b *bench) startPeer(ctx context.Context, name string) (*peer, error) {
	p := &peer{name: name}
	var err error
	if p.port, err = freeport.Port(); err != nil {
		return nil, err
	}
	if b.kind == "tls" {
		if p.tls, err = freeport.Port(); err != nil {
			return nil, err
		}
	}
	switch name {
	case "edge", "reverseproxy":
		err = b.startGo(p)
	case "nginx":
		err = b.startNginx(p)
	case "haproxy":
		err = b.startHAProxy(p)
	default:
		err = fmt.Errorf("%q is no peer: edge, nginx, haproxy, reverseproxy", name)
	}
	if err != nil {
		return nil, err
	}
	if err := p.proc.up(ctx, p.port); err != nil {
		return nil, err
	}
	if p.tls != 0 {
		if err := p.proc.up(ctx, p.tls); err != nil {
			return nil, err
		}
	}
	workers := 0
	if name == "nginx" {
		workers = b.procsEach // the first process listens before the others are there
	}
	p.pids, err = p.proc.all(ctx, workers)
	return p, err
}

// all waits until a process has so many children and returns it and them.
func (p *process) all(ctx context.Context, children int) ([]int, error) {
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		pids, err := withChildren(p.cmd.Process.Pid)
		if err != nil || len(pids) > children {
			return pids, err
		}
		select {
		case <-tick.C:
		case <-p.done:
			return nil, fmt.Errorf("%s has ended", p.cmd.Path)
		case <-deadline:
			return nil, fmt.Errorf("%s has %d children, want %d", p.cmd.Path, len(pids)-1, children)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (b *bench) cellAddrs() []string {
	var out []string
	for _, p := range b.cells {
		out = append(out, "127.0.0.1:"+strconv.Itoa(p))
	}
	return out
}

func (b *bench) startGo(p *peer) (err error) {
	args := []string{p.name, "--addr", "127.0.0.1:" + strconv.Itoa(p.port), "--cells", strings.Join(b.cellAddrs(), ","),
		"--log", filepath.Join(b.dir, p.name+".log")}
	if p.tls != 0 {
		args = append(args, "--tls-addr", "127.0.0.1:"+strconv.Itoa(p.tls), "--cert", b.cert, "--key", b.key)
	}
	if b.kind == "grpc" && p.name == "reverseproxy" {
		args = append(args, "--h2")
	}
	if b.opt.cpuprofile != "" && p.name == "edge" {
		args = append(args, "--cpuprofile", b.opt.cpuprofile)
	}
	p.proc, err = b.start(p.name, b.self, args...)
	return err
}

// installed returns the path of a peer's program.
func installed(name string) (string, error) {
	for _, dir := range []string{"/usr/sbin/", "/usr/local/sbin/"} {
		if _, err := os.Stat(dir + name); err == nil {
			return dir + name, nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s is not installed: run scripts/need-%s, or leave it out with --peers: %w", name, name, err)
	}
	return path, nil
}

var versionNumber = regexp.MustCompile(`\d+\.\d+(\.\d+)?`)

// versionOf returns what a peer says of its version.
func versionOf(name string) string {
	if name == "edge" || name == "reverseproxy" {
		return runtime.Version()
	}
	path, err := installed(name)
	if err != nil {
		return "missing"
	}
	out, err := exec.Command(path, "-v").CombinedOutput()
	if err != nil {
		return "unknown"
	}
	return versionNumber.FindString(string(out))
}

// write puts a file into the bench's folder.
func (b *bench) write(name, content string) (string, error) {
	path := filepath.Join(b.dir, name)
	return path, os.WriteFile(path, []byte(content), 0o644)
}
