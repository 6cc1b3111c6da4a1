// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Spec describes one process.
type Spec struct {
	// Name is unique in the group; the log file is named after it.
	Name string
	// Args is the program and its arguments; the program is looked up in PATH.
	Args []string
	// Env is added to the supervisor's own environment.
	Env []string
	Dir string
	// Remake, if set, is asked after the process has ended by itself, with the end of
	// what it wrote in that life. Of the Spec that it returns, unless nil, Args and Env
	// are used from then on: another port, when the old one was taken.
	Remake func(output string) *Spec
	// Grace is how long Stop waits after SIGTERM; 0 means 5 s.
	Grace time.Duration
}

// Group is a set of supervised processes. Its methods are safe for concurrent use.
type Group struct {
	logs string
	log  *slog.Logger

	mu    sync.Mutex // guards procs and closed
	procs map[string]*Proc
	// closed refuses Start after Close.
	closed bool
}

// Proc is one supervised process.
type Proc struct {
	spec Spec
	log  *slog.Logger
	file string

	mu       sync.Mutex // guards the fields below
	cmd      *exec.Cmd
	restarts int
	changed  chan struct{} // closed and replaced whenever pid changes

	stop context.CancelFunc
	done chan struct{}
}

// New returns an empty group whose processes log to files in the folder logs.
func New(logs string, log *slog.Logger) (*Group, error) {
	if err := os.MkdirAll(logs, 0o700); err != nil {
		return nil, err
	}
	return &Group{logs: logs, log: log, procs: map[string]*Proc{}}, nil
}

// Start runs a process and keeps it running. The error is about the first start
// only: a program that does not exist, a name in use, a closed group.
func (g *Group) Start(s Spec) (*Proc, error) {
	if s.Grace == 0 {
		s.Grace = 5 * time.Second
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errors.New("supervise: the group is closed")
	}
	if _, ok := g.procs[s.Name]; ok {
		return nil, fmt.Errorf("supervise: there is a process %q already", s.Name)
	}
	if _, err := exec.LookPath(s.Args[0]); err != nil {
		return nil, fmt.Errorf("supervise: %s: %w", s.Name, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proc{spec: s, log: g.log, file: filepath.Join(g.logs, s.Name+".log"), stop: cancel,
		done: make(chan struct{}), changed: make(chan struct{})}
	started := make(chan error, 1)
	go p.run(ctx, started)
	if err := <-started; err != nil {
		cancel()
		<-p.done
		return nil, fmt.Errorf("supervise: %s: %w", s.Name, err)
	}
	g.procs[s.Name] = p
	return p, nil
}

// Proc returns the process of that name, or nil.
func (g *Group) Proc(name string) *Proc {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.procs[name]
}

// Remove stops a process and forgets it, so that the name can be used again.
func (g *Group) Remove(name string) {
	g.mu.Lock()
	p := g.procs[name]
	delete(g.procs, name)
	g.mu.Unlock()
	if p != nil {
		p.Stop()
	}
}

// Names lists the processes in order.
func (g *Group) Names() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var names []string
	for n := range g.procs {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Close stops every process and waits for the last.
func (g *Group) Close() {
	g.mu.Lock()
	g.closed = true
	procs := g.procs
	g.procs = map[string]*Proc{}
	g.mu.Unlock()
	var wg sync.WaitGroup
	for _, p := range procs {
		wg.Go(p.Stop)
	}
	wg.Wait()
}

// run starts the process again and again. Pdeathsig is tied to the thread that
// forks, so this goroutine keeps one thread for itself.
func (p *Proc) run(ctx context.Context, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(p.done)
	first := true
	backoff := 50 * time.Millisecond
	for ctx.Err() == nil {
		born, from := time.Now(), p.logSize()
		exit, err := p.once(ctx, func() {
			if first {
				started <- nil
			}
		})
		if err != nil && first {
			started <- err
			return
		}
		first = false
		if ctx.Err() != nil {
			return
		}
		if time.Since(born) > 10*time.Second {
			backoff = 50 * time.Millisecond
		}
		p.mu.Lock()
		p.restarts++
		p.mu.Unlock()
		p.log.Warn("process ended; starting it again", "name", p.spec.Name, "exit", exit, "err", err, "in", backoff, "log", p.file)
		if p.spec.Remake != nil {
			if s := p.spec.Remake(p.Output(from)); s != nil {
				p.spec.Args, p.spec.Env = s.Args, s.Env
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, 2*time.Second)
	}
}

func (p *Proc) logSize() int64 {
	st, err := os.Stat(p.file)
	if err != nil {
		return 0
	}
	return st.Size()
}

// outputTail bounds what [Proc.Output] returns.
const outputTail = 16 << 10

// Output returns the end of what the process wrote after the first from bytes of its
// log; at most 16 KiB.
func (p *Proc) Output(from int64) string {
	f, err := os.Open(p.file)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() <= from {
		return ""
	}
	from = max(from, st.Size()-outputTail)
	b := make([]byte, st.Size()-from)
	n, _ := f.ReadAt(b, from)
	return string(b[:n])
}

func (p *Proc) once(ctx context.Context, onStart func()) (exit string, err error) {
	out, err := os.OpenFile(p.file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	defer out.Close()
	cmd := exec.Command(p.spec.Args[0], p.spec.Args[1:]...)
	cmd.Env = append(os.Environ(), p.spec.Env...)
	cmd.Dir = p.spec.Dir
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	p.setCmd(cmd)
	onStart()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer p.setCmd(nil)
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		select {
		case err = <-ended:
		case <-time.After(p.spec.Grace):
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			err = <-ended
		}
	}
	// Whatever the process left in its group goes with it.
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if err != nil {
		var ee *exec.ExitError
		if errors.As(err, &ee) {
			return ee.String(), nil
		}
		return "", err
	}
	return "exit status 0", nil
}

func (p *Proc) setCmd(cmd *exec.Cmd) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = cmd
	close(p.changed)
	p.changed = make(chan struct{})
}

// PID returns the running process's id, or 0 between two lives.
func (p *Proc) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// Restarts counts how often the process ended by itself and was started again.
func (p *Proc) Restarts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.restarts
}

// Log is the path of the process's output.
func (p *Proc) Log() string { return p.file }

// Signal sends a signal to the running process; an error if none is running.
func (p *Proc) Signal(sig syscall.Signal) error {
	pid := p.PID()
	if pid == 0 {
		return fmt.Errorf("supervise: %s is not running", p.spec.Name)
	}
	return syscall.Kill(pid, sig)
}

// WaitRestart waits until the process runs under another id than pid.
func (p *Proc) WaitRestart(ctx context.Context, pid int) error {
	for {
		p.mu.Lock()
		ch, now := p.changed, 0
		if p.cmd != nil {
			now = p.cmd.Process.Pid
		}
		p.mu.Unlock()
		if now != 0 && now != pid {
			return nil
		}
		select {
		case <-ch:
		case <-p.done:
			return fmt.Errorf("supervise: %s was stopped", p.spec.Name)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Stop ends the process for good and waits for it. Safe to call twice.
func (p *Proc) Stop() {
	p.stop()
	<-p.done
}
