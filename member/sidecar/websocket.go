// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// upgradeWriter gives the proxy a connection that says goodbye: a WebSocket that the
// gate has ended is closed with status 1012 (service restart), so that its client
// connects again.
type upgradeWriter struct {
	http.ResponseWriter
	c *call
}

func isWebSocket(r *http.Request) bool {
	return r.ProtoMajor == 1 && strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
}

// Unwrap is for [http.ResponseController].
func (w *upgradeWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Hijack implements [http.Hijacker].
func (w *upgradeWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	return &webSocket{Conn: conn, c: w.c}, rw, nil
}

// webSocket is the client's connection behind the service's answer: what is written
// are the service's frames.
type webSocket struct {
	net.Conn
	c *call

	mu     sync.Mutex // guards the rest, and the order of writes
	pos    boundary
	closed bool
}

// serviceRestart is a close frame with status 1012, as a server sends it.
var serviceRestart = []byte{0x88, 0x02, 0x03, 0xf4}

// Write implements [net.Conn].
func (w *webSocket) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.Conn.Write(p)
	w.pos.pass(p[:n])
	return n, err
}

// Close implements [net.Conn]. Between two frames it says goodbye; within one nothing
// could be said.
func (w *webSocket) Close() error {
	if !w.c.gateClosed() {
		return w.Conn.Close()
	}
	// A write that waits for the client must not hold the end up.
	_ = w.Conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed && w.pos.between() {
		_, _ = w.Conn.Write(serviceRestart)
	}
	w.closed = true
	return w.Conn.Close()
}

// boundary follows a server's frames (RFC 6455, section 5.2).
type boundary struct {
	head []byte // of the frame, as far as it has come
	left uint64 // of its payload
}

func (b *boundary) between() bool { return len(b.head) == 0 && b.left == 0 }

func (b *boundary) pass(p []byte) {
	for len(p) > 0 {
		if b.left > 0 {
			n := min(b.left, uint64(len(p)))
			b.left -= n
			p = p[n:]
			continue
		}
		b.head = append(b.head, p[0])
		p = p[1:]
		if len(b.head) < 2 {
			continue
		}
		size, extra := uint64(b.head[1]&0x7f), 0
		switch size {
		case 126:
			extra = 2
		case 127:
			extra = 8
		}
		if len(b.head) < 2+extra {
			continue
		}
		if extra > 0 {
			size = 0
			for _, c := range b.head[2:] {
				size = size<<8 | uint64(c)
			}
		}
		if b.head[1]&0x80 != 0 {
			size += 4 // a mask, which a server has no business to send
		}
		b.head, b.left = b.head[:0], size
	}
}
