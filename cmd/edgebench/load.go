// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"time"
)

// loadStall is how long no answer may come before a measurement is given up.
const loadStall = 30 * time.Second

// load is what is asked of a proxy by HTTP/1.1.
type load struct {
	port     int
	conns    int      // connections, each with one request at a time
	requests [][]byte // sent in turns
	bytes    int      // of each answer's body
}

// loadResult is what was seen of it.
type loadResult struct {
	requests int
	took     time.Duration
	latency  histogram
}

// loadConn is one connection of the generator.
type loadConn struct {
	fd     int
	sent   time.Time
	out    []byte // of the request, what could not be written yet
	head   []byte // of the answer, while its head is not whole
	left   int    // bytes of the body that are to come; -1 while the head is
	closed bool
}

// generator holds connections to one proxy.
type generator struct {
	l     load
	poll  *poller
	conns map[int32]*loadConn
	next  int
	buf   [128 << 10]byte
}

// newGenerator connects.
func newGenerator(l load) (*generator, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	g := &generator{l: l, poll: p, conns: map[int32]*loadConn{}}
	for range l.conns {
		fd, err := dial(l.port)
		if err != nil {
			g.close()
			return nil, fmt.Errorf("connect to port %d: %w", l.port, err)
		}
		g.conns[int32(fd)] = &loadConn{fd: fd}
		if err := p.add(fd, syscall.EPOLLIN); err != nil {
			g.close()
			return nil, err
		}
	}
	return g, nil
}

func (g *generator) close() {
	for _, c := range g.conns {
		_ = syscall.Close(c.fd)
	}
	g.poll.close()
}

// run sends n requests and waits for all their answers.
func (g *generator) run(n int) (*loadResult, error) {
	res := &loadResult{}
	started := time.Now()
	toSend := n
	for _, c := range g.conns {
		if toSend == 0 {
			break
		}
		toSend--
		if err := g.send(c); err != nil {
			return nil, err
		}
	}
	for heard := started; res.requests < n; {
		events, err := g.poll.wait(1000)
		if err != nil {
			return nil, err
		}
		now := time.Now()
		if len(events) > 0 {
			heard = now
		} else if now.Sub(heard) > loadStall {
			return nil, fmt.Errorf("no answer for %v, %d of %d requests are done", loadStall, res.requests, n)
		}
		for i := range events {
			c := g.conns[events[i].Fd]
			if len(c.out) > 0 {
				if err := g.flush(c); err != nil {
					return nil, err
				}
			}
			done, err := g.receive(c)
			if err != nil {
				return nil, err
			}
			if !done {
				continue
			}
			res.latency.add(time.Since(c.sent))
			res.requests++
			if toSend > 0 {
				toSend--
				if err := g.send(c); err != nil {
					return nil, err
				}
			}
		}
	}
	res.took = time.Since(started)
	return res, nil
}

// send writes the next request.
func (g *generator) send(c *loadConn) error {
	c.out = g.l.requests[g.next%len(g.l.requests)]
	g.next++
	c.sent, c.left, c.head = time.Now(), -1, c.head[:0]
	return g.flush(c)
}

func (g *generator) flush(c *loadConn) error {
	n, err := syscall.Write(c.fd, c.out)
	if n > 0 {
		waited := len(c.out) - n
		c.out = c.out[n:]
		if waited == 0 {
			return nil
		}
		return g.poll.change(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
	}
	if again(err) {
		return g.poll.change(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
	}
	return fmt.Errorf("write a request: %w", err)
}

// receive reads what is there and reports whether the answer is whole.
func (g *generator) receive(c *loadConn) (bool, error) {
	n, err := syscall.Read(c.fd, g.buf[:])
	if n <= 0 {
		if err != nil && again(err) {
			return false, nil
		}
		return false, fmt.Errorf("the connection was closed instead of an answer: %w", errors.Join(err, errClosed))
	}
	data := g.buf[:n]
	if c.left < 0 {
		if len(c.head) > 0 {
			c.head = append(c.head, data...)
			data = c.head
		}
		end := bytes.Index(data, []byte("\r\n\r\n"))
		if end < 0 {
			if len(c.head) == 0 {
				c.head = append(c.head, data...)
			}
			return false, nil
		}
		length, err := checkHead(data[:end+2])
		if err != nil {
			return false, err
		}
		if length != g.l.bytes {
			return false, fmt.Errorf("an answer of %d bytes, want %d", length, g.l.bytes)
		}
		c.left = length
		data = data[end+4:]
	}
	if len(data) > c.left {
		return false, fmt.Errorf("%d bytes behind an answer", len(data)-c.left)
	}
	c.left -= len(data)
	return c.left == 0, nil
}

var errClosed = errors.New("end of stream")

// checkHead returns the length of a good answer's body.
func checkHead(head []byte) (int, error) {
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 ")) {
		return 0, fmt.Errorf("not the answer that was expected: %q", head)
	}
	for len(head) > 0 {
		var line []byte
		line, head, _ = bytes.Cut(head, []byte("\r\n"))
		const name = "content-length:"
		if len(line) > len(name) && (line[0]|0x20) == 'c' && bytes.EqualFold(line[:len(name)], []byte(name)) {
			return strconv.Atoi(string(bytes.TrimSpace(line[len(name):])))
		}
	}
	return 0, errors.New("an answer without a length")
}
