// SPDX-License-Identifier: Apache-2.0

package fastpath

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Upstream is a process that is reached without TLS, with the connections to it that
// are not in use. Safe for concurrent use.
type Upstream struct {
	// Addr is host:port.
	Addr string
	// Open counts the requests that have not ended; whoever chooses processes reads it.
	Open *atomic.Int64

	opts Options
	mu   sync.Mutex // guards what follows
	idle []*upConn  // the last used at the end
	shut bool
}

// Options bound what upstreams do.
type Options struct {
	DialTimeout, IdleTimeout time.Duration
	MaxIdle                  int
}

// NewUpstream returns an upstream without connections. Close it.
func NewUpstream(addr string, open *atomic.Int64, o Options) *Upstream {
	return &Upstream{Addr: addr, Open: open, opts: o}
}

// Close closes the connections that are not in use, and those in use as they become so.
func (u *Upstream) Close() {
	u.mu.Lock()
	idle := u.idle
	u.idle, u.shut = nil, true
	u.mu.Unlock()
	for _, c := range idle {
		_ = c.Close()
	}
}

// upConn is a connection to a process.
type upConn struct {
	net.Conn
	raw   syscall.RawConn
	since time.Time // when it became idle
	// check is peek's, so that a check makes no garbage.
	check func(fd uintptr) bool
	quiet bool
}

// get returns a connection: one that was used before, if the process has not closed it
// or sent anything on it, else a new one.
func (u *Upstream) get() (*upConn, error) {
	now := time.Now()
	for {
		u.mu.Lock()
		n := len(u.idle)
		if n == 0 {
			u.mu.Unlock()
			return u.dial()
		}
		c := u.idle[n-1]
		u.idle[n-1] = nil
		u.idle = u.idle[:n-1]
		u.mu.Unlock()
		if now.Sub(c.since) < u.opts.IdleTimeout && c.peek() {
			return c, nil
		}
		_ = c.Close()
	}
}

func (u *Upstream) dial() (*upConn, error) {
	c, err := (&net.Dialer{Timeout: u.opts.DialTimeout, KeepAlive: 15 * time.Second}).Dial("tcp", u.Addr)
	if err != nil {
		return nil, err
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil, errors.Join(errors.New("fastpath: no system connection"), c.Close())
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	up := &upConn{Conn: c, raw: raw}
	up.check = func(fd uintptr) bool {
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		up.quiet = n <= 0 && (errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EWOULDBLOCK))
		return true
	}
	return up, nil
}

// peek reports whether nothing has come on a connection that is idle: bytes that nobody
// asked for, or its end.
func (c *upConn) peek() bool {
	c.quiet = false
	return c.raw.Read(c.check) == nil && c.quiet
}

// put keeps a connection for the next request. What is too many, or has been idle for
// too long, is closed.
func (u *Upstream) put(c *upConn) {
	now := time.Now()
	c.since = now
	u.mu.Lock()
	if u.shut || len(u.idle) >= u.opts.MaxIdle {
		u.mu.Unlock()
		_ = c.Close()
		return
	}
	var old *upConn
	if len(u.idle) > 0 && now.Sub(u.idle[0].since) > u.opts.IdleTimeout {
		old = u.idle[0]
		u.idle = append(u.idle[:0], u.idle[1:]...)
	}
	u.idle = append(u.idle, c)
	u.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
}

// replayed is a connection whose first bytes were read before.
type replayed struct {
	net.Conn
	mu     sync.Mutex // guards before
	before []byte
}

func (r *replayed) Read(p []byte) (int, error) {
	r.mu.Lock()
	if len(r.before) > 0 {
		n := copy(p, r.before)
		r.before = r.before[n:]
		r.mu.Unlock()
		return n, nil
	}
	r.before = nil
	r.mu.Unlock()
	return r.Conn.Read(p)
}

// WriteTo would hide the bytes from copies that ask the connection itself.
func (r *replayed) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{r})
}

// CloseWrite half-closes the connection if it can be.
func (r *replayed) CloseWrite() error {
	if h, ok := r.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}
