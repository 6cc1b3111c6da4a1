// SPDX-License-Identifier: Apache-2.0

package etcdtest

import (
	"net"
	"sync"
)

// Proxy passes TCP connections on to a server until it is told otherwise.
type Proxy struct {
	l      net.Listener
	target string
	going  sync.WaitGroup

	mu     sync.Mutex // guards all below
	mute   bool       // answers are swallowed
	cut    bool       // connections are refused
	closed bool
	conns  map[net.Conn]bool
}

// NewProxy listens on the loopback for target, a host and port. Close it.
func NewProxy(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{l: l, target: target, conns: map[net.Conn]bool{}}
	p.going.Add(1)
	go p.accept()
	return p, nil
}

// Addr is the host and port that the proxy listens on.
func (p *Proxy) Addr() string { return p.l.Addr().String() }

// Mute swallows what the server says, from now on; requests pass. Connections stay
// open, as on a path that drops packets.
func (p *Proxy) Mute(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = on
}

// Cut breaks every connection and refuses new ones, or takes them again.
func (p *Proxy) Cut(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = on
	if on {
		for c := range p.conns {
			_ = c.Close()
		}
	}
}

// Close ends the proxy and its connections.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	_ = p.l.Close()
	p.going.Wait()
}

// keep registers a connection, or closes it if there may be none.
func (p *Proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut || p.closed {
		_ = c.Close()
		return false
	}
	p.conns[c] = true
	return true
}

func (p *Proxy) accept() {
	defer p.going.Done()
	for {
		in, err := p.l.Accept()
		if err != nil {
			return
		}
		if !p.keep(in) {
			continue
		}
		out, err := net.Dial("tcp", p.target)
		if err != nil || !p.keep(out) {
			_ = in.Close()
			continue
		}
		p.going.Add(2)
		go p.pass(in, out, false)
		go p.pass(out, in, true)
	}
}

func (p *Proxy) pass(from, to net.Conn, answers bool) {
	defer p.going.Done()
	defer func() {
		_ = from.Close()
		_ = to.Close()
		p.mu.Lock()
		delete(p.conns, from)
		p.mu.Unlock()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		mute := p.mute && answers
		p.mu.Unlock()
		if n > 0 && !mute {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
