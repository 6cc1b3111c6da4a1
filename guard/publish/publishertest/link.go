// SPDX-License-Identifier: Apache-2.0

package publishertest

import (
	"net"
	"sync"
)

// Link forwards TCP connections to a broker and back.
type Link struct {
	ln     net.Listener
	target string

	mu    sync.Mutex // guards below
	state *sync.Cond
	mode  linkMode
	conns map[net.Conn]struct{}
	ended bool
	wg    sync.WaitGroup
}

type linkMode struct {
	holdRequests, holdAnswers bool // wait
	loseAnswers               bool // are read and thrown away
}

// NewLink listens on a port of this machine and forwards to target, host:port.
func NewLink(target string) (*Link, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &Link{ln: ln, target: target, conns: map[net.Conn]struct{}{}}
	l.state = sync.NewCond(&l.mu)
	l.wg.Go(l.accept)
	return l, nil
}

// Addr is what to connect to.
func (l *Link) Addr() string { return l.ln.Addr().String() }

// Hold keeps back what goes to the broker, until Release. What a client had sent is
// delivered then, even if it has hung up meanwhile.
func (l *Link) Hold() { l.set(linkMode{holdRequests: true}) }

// HoldAnswers keeps back what comes from the broker, until Release.
func (l *Link) HoldAnswers() { l.set(linkMode{holdAnswers: true}) }

// LoseAnswers throws away what comes from the broker, until Release.
func (l *Link) LoseAnswers() { l.set(linkMode{loseAnswers: true}) }

// Release forwards everything again.
func (l *Link) Release() { l.set(linkMode{}) }

// Cut closes all connections; new ones are taken.
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close()
	}
}

// Close ends the link.
func (l *Link) Close() {
	_ = l.ln.Close()
	l.mu.Lock()
	l.ended = true
	l.state.Broadcast()
	l.mu.Unlock()
	l.Cut()
	l.wg.Wait()
}

func (l *Link) set(m linkMode) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mode = m
	l.state.Broadcast()
}

// track notes a connection; false when the link has ended.
func (l *Link) track(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		_ = c.Close()
		return false
	}
	l.conns[c] = struct{}{}
	return true
}

func (l *Link) drop(c net.Conn) {
	_ = c.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
}

func (l *Link) accept() {
	for {
		c, err := l.ln.Accept()
		if err != nil {
			return
		}
		if !l.track(c) {
			return
		}
		l.wg.Go(func() { l.serve(c) })
	}
}

func (l *Link) serve(client net.Conn) {
	defer l.drop(client)
	broker, err := net.Dial("tcp", l.target)
	if err != nil || !l.track(broker) {
		return
	}
	defer l.drop(broker)
	answers := make(chan struct{})
	go func() {
		defer close(answers)
		defer client.Close()
		l.pump(client, broker, func(m linkMode) (hold, lose bool) { return m.holdAnswers, m.loseAnswers })
	}()
	l.pump(broker, client, func(m linkMode) (hold, lose bool) { return m.holdRequests, false })
	_ = broker.Close()
	<-answers
}

// pump copies until one side ends. What was read is written even if the reader's
// side has ended meanwhile.
func (l *Link) pump(to, from net.Conn, mode func(linkMode) (hold, lose bool)) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		l.mu.Lock()
		hold, lose := mode(l.mode)
		for hold && !l.ended {
			l.state.Wait()
			hold, lose = mode(l.mode)
		}
		ended := l.ended
		l.mu.Unlock()
		if ended {
			return
		}
		if n > 0 && !lose {
			if _, werr := to.Write(buf[:n]); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
