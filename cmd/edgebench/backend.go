// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// The paths of the backend, and what it answers.
const (
	pathSmall = "/v1/small" // 200 bytes
	pathLarge = "/v1/large" // 64 KiB
	pathPost  = "/v1/post"  // reads a body, 200 bytes
	pathHead  = "/v1/head"  // the request's head as it came, and the cell's port

	smallBytes = 200
	largeBytes = 64 << 10
	postBytes  = 1 << 10
)

// backend answers HTTP/1.1 on several ports, as cells of one fleet would, by one epoll
// loop. It looks at the path and at Content-Length, and takes every other header
// (Cell-* among them) for what it is: somebody else's.
type backend struct {
	poll         *poller
	listeners    map[int]int // their ports
	conns        map[int]*backendConn
	small, large []byte
	dated        int64 // the second that the answers carry
	buf          [16 << 10]byte
}

type backendConn struct {
	port int    // the cell
	in   []byte // what was read and not yet answered
	skip int    // bytes of a body that are still to come
	next []byte // the answer once the body is there
	out  []byte // what could not be written yet
}

// runBackend is the program.
func runBackend(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("backend", flag.ContinueOnError)
	ports := fs.String("ports", "", "ports of 127.0.0.1 to answer on, with commas")
	if err := fs.Parse(args); err != nil {
		return err
	}
	p, err := newPoller()
	if err != nil {
		return err
	}
	defer p.close()
	b := &backend{poll: p, listeners: map[int]int{}, conns: map[int]*backendConn{}}
	for s := range strings.SplitSeq(*ports, ",") {
		port, err := strconv.Atoi(s)
		if err != nil {
			return err
		}
		fd, err := listen(port)
		if err != nil {
			return err
		}
		b.listeners[fd] = port
		if err := p.add(fd, syscall.EPOLLIN); err != nil {
			return err
		}
	}
	for ctx.Err() == nil {
		events, err := p.wait(200)
		if err != nil {
			return err
		}
		b.date(time.Now())
		for _, ev := range events {
			b.ready(int(ev.Fd), ev.Events)
		}
	}
	return nil
}

// date makes the answers of this second.
func (b *backend) date(now time.Time) {
	if now.Unix() == b.dated {
		return
	}
	b.dated = now.Unix()
	b.small, b.large = answer(now, bytes.Repeat([]byte("x"), smallBytes)), answer(now, bytes.Repeat([]byte("x"), largeBytes))
}

func answer(now time.Time, body []byte) []byte {
	head := fmt.Sprintf("HTTP/1.1 200 OK\r\nDate: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", now.UTC().Format(http.TimeFormat), len(body))
	return append([]byte(head), body...)
}

func (b *backend) ready(fd int, events uint32) {
	if port := b.listeners[fd]; port != 0 {
		for {
			c, _, err := syscall.Accept4(fd, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			_ = syscall.SetsockoptInt(c, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
			b.conns[c] = &backendConn{port: port}
			if b.poll.add(c, syscall.EPOLLIN) != nil {
				b.end(c)
			}
		}
	}
	c := b.conns[fd]
	if c == nil {
		return
	}
	if len(c.out) > 0 {
		if !b.write(fd, c, c.out) || len(c.out) > 0 {
			return
		}
		if b.poll.change(fd, syscall.EPOLLIN) != nil {
			b.end(fd)
			return
		}
		if !b.serve(fd, c, c.in) {
			return
		}
	}
	if events&(syscall.EPOLLIN|syscall.EPOLLHUP|syscall.EPOLLERR) == 0 {
		return
	}
	n, err := syscall.Read(fd, b.buf[:])
	switch {
	case n > 0:
		data := b.buf[:n]
		if len(c.in) > 0 {
			c.in = append(c.in, data...)
			data = c.in
		}
		b.serve(fd, c, data)
	case n == 0 && err == nil, !again(err):
		b.end(fd)
	}
}

// serve answers the requests that are whole and keeps the rest; false means that the
// connection is gone.
func (b *backend) serve(fd int, c *backendConn, data []byte) bool {
	for len(c.out) == 0 {
		if c.next == nil {
			end := bytes.Index(data, []byte("\r\n\r\n"))
			if end < 0 {
				break
			}
			if err := c.request(b, data[:end+2]); err != nil {
				b.end(fd)
				return false
			}
			data = data[end+4:]
		}
		k := min(c.skip, len(data))
		c.skip -= k
		data = data[k:]
		if c.skip > 0 {
			break
		}
		answer := c.next
		c.next = nil
		if !b.write(fd, c, answer) {
			return false
		}
	}
	c.in = append(c.in[:0], data...)
	return true
}

var errRequest = errors.New("a request that the backend does not know")

// request finds the answer to a request, and how long its body is.
func (c *backendConn) request(b *backend, head []byte) error {
	line, rest, _ := bytes.Cut(head, []byte("\r\n"))
	switch {
	case bytes.HasPrefix(line, []byte("GET "+pathSmall)), bytes.HasPrefix(line, []byte("POST "+pathPost)):
		c.next = b.small
	case bytes.HasPrefix(line, []byte("GET "+pathLarge)):
		c.next = b.large
	case bytes.HasPrefix(line, []byte("GET "+pathHead)):
		c.next = answer(time.Now(), fmt.Appendf(nil, "%sPort: %d\r\n", head, c.port))
	default:
		return errRequest
	}
	for len(rest) > 0 {
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		const name = "content-length:"
		if len(line) > len(name) && (line[0]|0x20) == 'c' && bytes.EqualFold(line[:len(name)], []byte(name)) {
			n, err := strconv.Atoi(string(bytes.TrimSpace(line[len(name):])))
			if err != nil || n < 0 {
				return errRequest
			}
			c.skip = n
		}
		if (line[0]|0x20) == 't' && bytes.HasPrefix(bytes.ToLower(line), []byte("transfer-encoding:")) {
			return errRequest // all bodies here have a length
		}
	}
	return nil
}

// write sends what it can and keeps the rest; false means that the connection is gone.
func (b *backend) write(fd int, c *backendConn, p []byte) bool {
	for len(p) > 0 {
		n, err := syscall.Write(fd, p)
		if n > 0 {
			p = p[n:]
			continue
		}
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if errors.Is(err, syscall.EAGAIN) {
			first := len(c.out) == 0
			c.out = p
			if first && b.poll.change(fd, syscall.EPOLLIN|syscall.EPOLLOUT) != nil {
				break
			}
			return true
		}
		break
	}
	if len(p) > 0 {
		b.end(fd)
		return false
	}
	c.out = nil
	return true
}

func (b *backend) end(fd int) {
	delete(b.conns, fd)
	_ = syscall.Close(fd)
}
