// SPDX-License-Identifier: Apache-2.0

package fastpath

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// slow is how long a process may take before it is watched whether the client goes.
const slow = time.Second

var (
	errMalformed = errors.New("fastpath: the answer is malformed")
	errTruncated = fmt.Errorf("fastpath: the answer broke off: %w", io.ErrUnexpectedEOF)
)

// exchange carries out the request at the beginning of the buffer. It returns whether
// the connection is fit for another one; if not it is closed or handed over.
func (x *conn) exchange(head int) bool {
	up, err := x.target.Upstream.get()
	if err != nil {
		x.handOver() // nothing was sent
		return false
	}
	b := x.s.cfg.Backend
	work := workings.Get().(*working)
	defer workings.Put(work)
	start := time.Now()
	work.out = x.request(work.out[:0], head)
	x.idle(false)
	if n, err := up.Write(work.out); err != nil && n == 0 {
		_ = up.Close()
		x.handOver()
		return false
	} else if err != nil {
		_ = up.Close()
		return x.refuse(start, err)
	}
	b.Began()
	defer b.Over()
	x.target.Upstream.Open.Add(1)
	x.holds(up)
	fit, keep, again := x.relay(work, up, start)
	x.holds(nil)
	x.target.Upstream.Open.Add(-1)
	if keep {
		x.target.Upstream.put(up)
	} else {
		_ = up.Close()
	}
	switch {
	case again:
		x.handOver()
	case !fit:
		_ = x.c.Close()
	}
	return fit
}

// refuse answers a request that may have run.
func (x *conn) refuse(start time.Time, err error) bool {
	_, _ = x.c.Write(x.s.cfg.Backend.Refuse(&x.req, &x.target, start, x.c.RemoteAddr(), err))
	_ = x.c.Close()
	return false
}

// request appends the request as it goes to the process.
func (x *conn) request(out []byte, head int) []byte {
	r := &x.req
	out = append(out, r.Method...)
	out = append(out, ' ')
	out = append(out, r.Target...)
	out = append(out, " HTTP/1.1\r\nHost: "...)
	out = append(out, r.Host...)
	out = append(out, "\r\n"...)
	for i := range r.Fields {
		f := &r.Fields[i]
		if !x.s.cfg.Backend.Passes(f.Name) || x.target.Drop != "" && equalLower(f.Name, x.target.Drop) {
			continue
		}
		out = appendField(out, f)
	}
	// As net/http sends it: always where a body is usual, never of nothing where it is not.
	if r.Length > 0 || r.Method[0] == 'P' {
		out = append(out, "Content-Length: "...)
		out = strconv.AppendInt(out, int64(r.Length), 10)
		out = append(out, "\r\n"...)
	}
	out = x.s.cfg.Backend.Forwarded(out, x.c.RemoteAddr(), r)
	out = append(out, x.target.Headers...)
	out = append(out, "\r\n"...)
	return append(out, x.buf[x.r+head:x.r+head+r.Length]...)
}

func appendField(out []byte, f *Field) []byte {
	out = append(out, f.Name...)
	out = append(out, ": "...)
	out = append(out, f.Value...)
	return append(out, "\r\n"...)
}

// relay waits for the answer and passes it on. fit: the client's connection may carry
// another request; keep: the process's may; again: a gate refused the request, and the
// other server is to deal with it.
func (x *conn) relay(work *working, up *upConn, start time.Time) (fit, keep, again bool) {
	in, n := work.in, 0
	for {
		size, err := x.answerHead(up, in, &n, start)
		if err != nil {
			if errors.Is(err, errGone) {
				x.s.cfg.Backend.Ended(&x.req, &x.target, Ending{Start: start, Gone: true})
				return false, false, false
			}
			return x.refuse(start, err), false, false
		}
		var a answer
		if !a.parse(in[:size], work.fields[:0], string(x.req.Method) == "HEAD") {
			return x.relayAny(up, in[:n], start), false, false
		}
		if a.status < 200 {
			out := append(work.out[:0], in[:bytes.IndexByte(in, '\n')+1]...)
			for i := range a.fields {
				out = appendField(out, &a.fields[i])
			}
			work.out = append(out, "\r\n"...)
			if _, err := x.c.Write(work.out); err != nil {
				x.s.cfg.Backend.Ended(&x.req, &x.target, Ending{Start: start, Gone: true})
				return false, false, false
			}
			n = copy(in, in[size:n])
			continue
		}
		if a.gate {
			return false, false, true
		}
		return x.pass(work, up, &a, size, n, start)
	}
}

// answerHead reads until a whole head is in in[:*n] and returns its length.
func (x *conn) answerHead(up *upConn, in []byte, n *int, start time.Time) (int, error) {
	seen, watched := 0, false
	defer func() {
		if watched {
			_ = up.SetReadDeadline(time.Time{})
		}
	}()
	_ = up.SetReadDeadline(time.Now().Add(slow))
	for {
		if size := endOfHead(in[:*n], seen); size > 0 {
			return size, nil
		}
		seen = *n
		if *n == len(in) {
			return 0, errMalformed
		}
		m, err := up.Read(in[*n:])
		*n += m
		switch {
		case m > 0:
		case errors.Is(err, os.ErrDeadlineExceeded) && !watched:
			watched = true
			_ = up.SetReadDeadline(start.Add(x.s.cfg.AnswerTimeout))
			stop := x.watch(up)
			m, err = up.Read(in[*n:])
			*n += m
			if gone := stop(); gone {
				return 0, errGone
			}
			if m == 0 {
				return 0, err
			}
		case err == io.EOF:
			return 0, errTruncated
		default:
			return 0, err
		}
	}
}

// watch closes the process's connection when the client goes. What it sends meanwhile
// is kept for the next request. stop ends the watch and says whether the client went.
func (x *conn) watch(up *upConn) (stop func() bool) {
	done, gone := make(chan struct{}), false
	x.deadline(time.Time{})
	if x.w == len(x.buf) {
		close(done) // no room for what it may send
	} else {
		go func() {
			defer close(done)
			n, err := x.c.Read(x.buf[x.w:])
			x.w += n
			if n == 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
				gone = true
				_ = up.Close()
			}
		}()
	}
	return func() bool {
		_ = x.c.SetReadDeadline(time.Unix(1, 0))
		<-done
		x.deadline(time.Time{})
		return gone
	}
}

// pass passes an answer on, of which in[:n] was read, the head in[:size].
func (x *conn) pass(work *working, up *upConn, a *answer, size, n int, start time.Time) (fit, keep, again bool) {
	in := work.in
	closes := x.req.Close || a.framing == bodyToClose || x.s.draining.Load()
	out := append(work.out[:0], "HTTP/1.1"...)
	out = append(out, in[8:bytes.IndexByte(in, '\n')+1]...)
	stream := false
	for i := range a.fields {
		f := &a.fields[i]
		stream = stream || equalLower(f.Name, "content-type") && bytes.HasPrefix(f.Value, []byte("text/event-stream"))
		out = appendField(out, f)
	}
	switch {
	case a.framing == bodyChunks:
		out = append(out, "Transfer-Encoding: chunked\r\n"...)
	case a.framing == bodyLength, a.length < 0:
		length := a.length
		if length < 0 {
			length = -1 - length
		}
		out = append(out, "Content-Length: "...)
		out = strconv.AppendInt(out, int64(length), 10)
		out = append(out, "\r\n"...)
	}
	if closes {
		out = append(out, "Connection: close\r\n"...)
	}
	out = append(out, "\r\n"...)
	e := Ending{Start: start, Status: a.status, Stream: stream}
	x.streams(stream)
	p := passing{x: x, up: up, in: in, rest: in[size:n], out: out}
	whole := false
	switch a.framing {
	case bodyNone:
		p.extra = len(p.rest) > 0
		whole = p.send(nil) && !p.extra
	case bodyLength:
		whole = p.length(a.length)
	case bodyChunks:
		whole = p.chunks()
	case bodyToClose:
		whole = p.toClose()
	}
	if stream {
		x.streams(false)
		closes = closes || x.endedStream()
	}
	work.out = p.out[:0]
	e.Bytes, e.Gone, e.Cut = p.bytes, p.gone, !whole && !p.gone && !p.extra
	x.s.cfg.Backend.Ended(&x.req, &x.target, e)
	return (whole || p.extra) && !closes, whole && !a.close && !x.endedStream(), false
}

// passing passes a body on. The head waits in out for the first bytes of the body, so
// that small answers are one write.
type passing struct {
	x     *conn
	up    *upConn
	in    []byte
	rest  []byte // read, and not passed on
	out   []byte
	bytes int64
	gone  bool // the client could not be written to
	extra bool // the answer was whole, and bytes came behind it
	fresh bool // the deadline of the answer's head is lifted
}

// send sends what waits and the part of the body.
func (p *passing) send(part []byte) bool {
	if len(p.out) > 0 && len(p.out)+len(part) <= cap(p.out) {
		p.out = append(p.out, part...)
		part = nil
	}
	if len(p.out) > 0 {
		if _, err := p.x.c.Write(p.out); err != nil {
			p.gone = true
			return false
		}
		p.out = p.out[:0]
	}
	if len(part) > 0 {
		if _, err := p.x.c.Write(part); err != nil {
			p.gone = true
			return false
		}
	}
	return true
}

// read reads more of the body.
func (p *passing) read() bool {
	if !p.fresh {
		p.fresh = true
		_ = p.up.SetReadDeadline(time.Time{})
	}
	n, _ := p.up.Read(p.in)
	p.rest = p.in[:n]
	return n > 0
}

func (p *passing) length(left int) bool {
	for {
		part := p.rest[:min(left, len(p.rest))]
		behind := len(p.rest) > len(part)
		left -= len(part)
		p.bytes += int64(len(part))
		if !p.send(part) {
			return false
		}
		if left == 0 {
			p.extra = behind
			return !behind
		}
		if !p.read() {
			return false
		}
	}
}

func (p *passing) chunks() bool {
	var c chunks
	for {
		used, done, ok := c.follow(p.rest)
		p.bytes += int64(used)
		if !p.send(p.rest[:used]) {
			return false
		}
		if !ok {
			return false
		}
		if done {
			p.extra = used < len(p.rest)
			return !p.extra
		}
		if c.state == chunkTrailers {
			return p.trailers(p.rest[used:])
		}
		if !p.read() {
			// Between two chunks a stream can be ended as a whole one.
			return p.x.endedStream() && c.state == chunkSize && c.n == 0 && p.send([]byte("0\r\n\r\n"))
		}
	}
}

// trailers passes the trailers on, of which the first bytes are there.
func (p *passing) trailers(first []byte) bool {
	block := append([]byte("\r\n"), first...) // as a head with an empty first line
	for endOfHead(block, 0) == 0 {
		if len(block) > bufferSize || !p.read() {
			return false
		}
		block = append(block, p.rest...)
	}
	size := endOfHead(block, 0)
	_, fields, ok := lines(append([]byte("x"), block[:size]...), make([]Field, 0, maxFields))
	if !ok {
		return false
	}
	var out []byte
	for i := range fields {
		if !equalLower(fields[i].Name, "cell-admission") && !odd(fields[i].Name) {
			out = appendField(out, &fields[i])
		}
	}
	p.extra = size < len(block)
	return p.send(append(out, "\r\n"...)) && !p.extra
}

func (p *passing) toClose() bool {
	for {
		p.bytes += int64(len(p.rest))
		if !p.send(p.rest) {
			return false
		}
		if !p.fresh {
			p.fresh = true
			_ = p.up.SetReadDeadline(time.Time{})
		}
		n, err := p.up.Read(p.in)
		p.rest = p.in[:n]
		if n == 0 {
			return err == io.EOF
		}
	}
}

// relayAny passes an answer on that this package does not read, by net/http's reading of
// it. The process's connection is not used again, nor is the client's.
func (x *conn) relayAny(up *upConn, read []byte, start time.Time) bool {
	from := bufio.NewReader(io.MultiReader(bytes.NewReader(read), up))
	out := &counted{w: x.c}
	for {
		resp, err := http.ReadResponse(from, &http.Request{Method: string(x.req.Method)})
		switch {
		case err != nil:
			return x.refuse(start, err)
		case resp.StatusCode == http.StatusSwitchingProtocols || resp.StatusCode >= 600:
			return x.refuse(start, errMalformed)
		}
		clean(resp.Header)
		if resp.StatusCode < 200 {
			_, _ = fmt.Fprintf(out, "HTTP/1.1 %03d %s\r\n", resp.StatusCode, http.StatusText(resp.StatusCode))
			_ = resp.Header.Write(out)
			_, _ = io.WriteString(out, "\r\n")
			continue
		}
		_ = up.SetReadDeadline(time.Time{})
		resp.Close, resp.ProtoMajor, resp.ProtoMinor = true, 1, 1
		resp.Body = &cleanTrailers{resp.Body, resp}
		err = resp.Write(out)
		_ = resp.Body.Close()
		x.s.cfg.Backend.Ended(&x.req, &x.target, Ending{Start: start, Status: resp.StatusCode, Bytes: out.n, Cut: err != nil && out.err == nil, Gone: out.err != nil})
		_ = x.c.Close()
		return false
	}
}

// cleanTrailers drops from the trailers, at the body's end, what clean drops.
type cleanTrailers struct {
	io.ReadCloser
	resp *http.Response
}

func (c *cleanTrailers) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	if err == io.EOF {
		clean(c.resp.Trailer)
	}
	return n, err
}

// clean drops the headers of the connection, and what must not leave the fleet.
func clean(h http.Header) {
	for _, list := range h["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			h.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Upgrade", "Cell-Admission"} {
		h.Del(name)
	}
}

type counted struct {
	w   net.Conn
	n   int64
	err error
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	if err != nil {
		c.err = err
	}
	return n, err
}
