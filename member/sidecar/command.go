// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// stopGrace is how long the service has between SIGTERM and SIGKILL.
const stopGrace = 5 * time.Second

// process is the service's, started by the sidecar. It ends with it, however that
// ends.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // why; valid then
}

// startProcess starts the service. port is what it is to listen at on the loopback.
func startProcess(command []string, cell cells.CellID, port string) (*process, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	for _, v := range os.Environ() {
		// It is no member, and has no use for a member's keys.
		if !strings.HasPrefix(v, "CELL_") && !strings.HasPrefix(v, "PORT=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "CELL_NAME="+string(cell), "PORT="+port)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig comes when the thread that forked ends: this one is kept.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.done)
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("sidecar: start the service: %w", err)
	}
	return p, nil
}

// ended returns the error for a service that has ended by itself.
func (p *process) ended() error {
	if p.err == nil {
		return fmt.Errorf("sidecar: the service's process has ended")
	}
	return fmt.Errorf("sidecar: the service's process has ended: %w", p.err)
}

// stop ends the process and all that it has left in its group.
func (p *process) stop() {
	pid := p.cmd.Process.Pid
	_ = syscall.Kill(-pid, syscall.SIGTERM)
	t := time.NewTimer(stopGrace)
	defer t.Stop()
	select {
	case <-p.done:
	case <-t.C:
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	<-p.done
}

// freePort returns a port of the loopback that was free just now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
