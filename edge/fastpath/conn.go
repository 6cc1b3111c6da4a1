// SPDX-License-Identifier: Apache-2.0

package fastpath

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// bufferSize bounds the head of a request together with its body, and the head of an
// answer.
const bufferSize = 8 << 10

// working are the buffers of a request that is under way.
type working struct {
	out    []byte // the request as it is sent, then the answer's head
	in     []byte // what comes from the process
	fields [maxFields]Field
}

var workings = sync.Pool{New: func() any {
	return &working{out: make([]byte, 0, 2*bufferSize), in: make([]byte, 64<<10)}
}}

// conn is a client's connection. It belongs to its goroutine but for what mu guards.
type conn struct {
	s      *Server
	c      net.Conn
	buf    []byte
	r, w   int // buf[r:w] was read and not used
	fields [maxFields]Field
	req    Request
	target Target
	until  time.Time // the deadline for reading that is set; zero for none

	mu     sync.Mutex // guards what follows
	busy   bool       // a request is under way
	ending bool       // do not wait for another one
	up     *upConn    // that of the request under way
	stream bool       // the answer is a stream of events
	ended  bool       // and the server has ended it
}

var errGone = errors.New("fastpath: the client has gone")

func (x *conn) serve() {
	defer x.s.forget(x)
	x.buf = make([]byte, bufferSize)
	for {
		head, ok := x.head()
		if !ok {
			return
		}
		req := x.buf[x.r : x.r+head]
		if !x.req.parse(req, x.fields[:0]) || head+x.req.Length > len(x.buf) {
			x.handOver()
			return
		}
		if !x.body(head + x.req.Length) {
			return
		}
		x.target = Target{}
		if !x.s.cfg.Backend.Route(&x.req, &x.target) {
			x.handOver()
			return
		}
		if !x.exchange(head) {
			return
		}
		if x.r += head + x.req.Length; x.r == x.w {
			x.r, x.w = 0, 0
		}
	}
}

// head waits for a whole head and returns its length. The connection is closed or
// handed over if it returns false.
func (x *conn) head() (int, bool) {
	seen := 0
	for {
		if n := endOfHead(x.buf[x.r:x.w], seen); n > 0 {
			return n, true
		}
		seen = x.w - x.r
		if seen > 0 && !upper(x.buf[x.r]) || seen == len(x.buf) {
			x.handOver()
			return 0, false
		}
		if x.r > 0 {
			copy(x.buf, x.buf[x.r:x.w])
			x.r, x.w = 0, seen
		}
		if !x.more(seen > 0) {
			return 0, false
		}
	}
}

func upper(c byte) bool { return c >= 'A' && c <= 'Z' }

// body waits until n bytes are there from the beginning of the request.
func (x *conn) body(n int) bool {
	if x.w-x.r >= n {
		return true
	}
	if x.r+n > len(x.buf) {
		// It does not fit behind the request before it, and what is parsed must not move.
		x.handOver()
		return false
	}
	for x.w-x.r < n {
		if !x.more(true) {
			return false
		}
	}
	return true
}

// more reads more; begun says that a request has. Where it returns false the connection
// is closed or handed over.
func (x *conn) more(begun bool) bool {
	now := time.Now()
	switch {
	case begun:
		if x.until.IsZero() || x.until.Sub(now) > x.s.cfg.ReadTimeout {
			x.deadline(now.Add(x.s.cfg.ReadTimeout))
		}
	case x.until.Sub(now) < x.s.cfg.IdleTimeout*7/8:
		x.deadline(now.Add(x.s.cfg.IdleTimeout))
	}
	if !x.idle(!begun) {
		_ = x.c.Close()
		return false
	}
	n, err := x.c.Read(x.buf[x.w:])
	x.w += n
	if n > 0 {
		return true
	}
	if begun && errors.Is(err, os.ErrDeadlineExceeded) && !x.s.draining.Load() {
		x.handOver() // the other server knows what to say
		return false
	}
	_ = x.c.Close()
	return false
}

func (x *conn) deadline(at time.Time) {
	x.until = at
	_ = x.c.SetReadDeadline(at)
}

// idle notes whether a request is under way; false means that none is to be waited for.
func (x *conn) idle(idle bool) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.busy = !idle
	return !idle || !x.ending
}

// stopIdle ends the wait for a request.
func (x *conn) stopIdle() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ending = true
	if !x.busy {
		_ = x.c.SetReadDeadline(time.Unix(1, 0))
	}
}

// cut closes both connections.
func (x *conn) cut() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ending = true
	_ = x.c.Close()
	if x.up != nil {
		_ = x.up.Close()
	}
}

// holds notes the process's connection, for cut.
func (x *conn) holds(up *upConn) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.up = up
}

// streams notes whether the answer is a stream of events.
func (x *conn) streams(stream bool) {
	if !stream && !x.stream {
		return // only this goroutine sets it
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stream = stream
}

// endStream ends a stream of events where its next chunk would begin.
func (x *conn) endStream() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ending = true
	if x.stream && x.up != nil {
		x.ended = true
		_ = x.up.SetReadDeadline(time.Unix(1, 0))
	}
}

func (x *conn) endedStream() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.ended
}

// handOver gives the connection away, with everything that was read and not answered.
func (x *conn) handOver() {
	_ = x.c.SetReadDeadline(time.Time{})
	before := append([]byte(nil), x.buf[x.r:x.w]...)
	x.s.cfg.Backend.HandOver(&replayed{Conn: x.c, before: before})
}
