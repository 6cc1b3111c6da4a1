// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// network is the wires between the processes of a fleet: who reaches whom through
// which. The zero value cuts nothing.
type network struct {
	t     *testing.T
	mu    sync.Mutex // guards wires and procs
	wires []*wire
	// procs gives the process id of each process of the fleet, once there is one.
	procs func() map[string]int
}

// via puts a wire between two processes; for fleet.Options.
func (n *network) via(from, to, addr string) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		n.t.Error(err)
		return addr
	}
	w := &wire{n: n, from: from, to: to, addr: addr, ln: ln, cut: map[string]bool{}, open: map[net.Conn]bool{}}
	w.turn = sync.NewCond(&w.mu)
	n.mu.Lock()
	n.wires = append(n.wires, w)
	n.mu.Unlock()
	w.wg.Go(w.serve)
	return ln.Addr().String()
}

// cut stops what travels between two processes ("edge", "directory", a cell), in
// both directions and on connections that are open, until heal. Nothing is lost:
// what was on its way arrives late.
func (n *network) cut(a, b string) (heal func()) {
	n.mu.Lock()
	wires := append([]*wire(nil), n.wires...)
	n.mu.Unlock()
	for _, w := range wires {
		for _, pair := range [][2]string{{a, b}, {b, a}} {
			if w.to == pair[1] && (w.from == pair[0] || w.from == "") {
				w.set(pair[0], true)
			}
		}
	}
	return func() {
		for _, w := range wires {
			w.set(a, false)
			w.set(b, false)
		}
	}
}

func (n *network) close() {
	n.mu.Lock()
	wires := n.wires
	n.mu.Unlock()
	for _, w := range wires {
		w.close()
	}
}

// owner names the process that has the other end of a connection from this machine.
func (n *network) owner(remote net.Addr) string {
	n.mu.Lock()
	procs := n.procs
	n.mu.Unlock()
	tcp, ok := remote.(*net.TCPAddr)
	if !ok || procs == nil {
		return ""
	}
	inode := inodeOf(tcp.Port)
	if inode == "" {
		return ""
	}
	for name, pid := range procs() {
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, fd := range fds {
			if l, err := os.Readlink(fd); err == nil && l == "socket:["+inode+"]" {
				if i := strings.LastIndexByte(name, '-'); i > 0 { // of a cell's process
					name = name[:i]
				}
				return name
			}
		}
	}
	return ""
}

// inodeOf finds the socket that has the local port 127.0.0.1:port.
func inodeOf(port int) string {
	b, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return ""
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) > 9 && f[1] == fmt.Sprintf("0100007F:%04X", port) {
			return f[9]
		}
	}
	return ""
}

// wire is one way from a process, or from all, to another.
type wire struct {
	n              *network
	from, to, addr string
	ln             net.Listener
	wg             sync.WaitGroup

	mu     sync.Mutex // guards the rest
	turn   *sync.Cond // cut or closed has changed
	cut    map[string]bool
	open   map[net.Conn]bool
	closed bool
}

func (w *wire) set(peer string, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[peer] = cut
	w.turn.Broadcast()
}

// pass waits while the peer is cut off; false when the wire is gone.
func (w *wire) pass(peer string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.cut[peer] && !w.closed {
		w.turn.Wait()
	}
	return !w.closed
}

func (w *wire) keep(c net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.open[c] = true
	}
	return !w.closed
}

func (w *wire) drop(c net.Conn) {
	_ = c.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, c)
}

func (w *wire) close() {
	w.mu.Lock()
	w.closed = true
	for c := range w.open {
		_ = c.Close()
	}
	w.turn.Broadcast()
	w.mu.Unlock()
	_ = w.ln.Close()
	w.wg.Wait()
}

func (w *wire) serve() {
	for {
		in, err := w.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		w.wg.Go(func() { w.carry(in) })
	}
}

func (w *wire) carry(in net.Conn) {
	defer w.drop(in)
	if !w.keep(in) {
		return
	}
	peer := w.from
	if peer == "" {
		peer = w.n.owner(in.RemoteAddr())
	}
	if !w.pass(peer) {
		return
	}
	out, err := net.Dial("tcp", w.addr)
	if err != nil {
		return
	}
	defer w.drop(out)
	if !w.keep(out) {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { w.copy(out, in, peer) })
	w.copy(in, out, peer)
	both.Wait()
}

func (w *wire) copy(to, from net.Conn, peer string) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if !w.pass(peer) {
			return
		}
		if n > 0 {
			if _, werr := to.Write(buf[:n]); werr != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	if c, ok := to.(*net.TCPConn); ok {
		_ = c.CloseWrite()
	}
	if c, ok := from.(*net.TCPConn); ok {
		_ = c.CloseRead()
	}
}
