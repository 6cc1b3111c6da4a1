// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// responseWriter passes a response on, without a Cell-Answer that the service has
// set itself.
type responseWriter struct {
	w       http.ResponseWriter
	prepare func(http.Header) // called before headers go out
	wrote   bool
	status  int  // of the head that went out; 0 before
	answer  Code // set by WriteProblem: the answer is the platform's
}

func (w *responseWriter) Header() http.Header         { return w.w.Header() }
func (w *responseWriter) Unwrap() http.ResponseWriter { return w.w }
func (w *responseWriter) platformAnswer(c Code)       { w.answer = c }

// clean makes the headers those of a service's answer, or of the platform's.
func (w *responseWriter) clean() {
	h := w.w.Header()
	if w.answer == "" {
		h.Del(HeaderAnswer)
	} else {
		h.Set(HeaderAnswer, string(w.answer))
	}
	h.Del(http.TrailerPrefix + HeaderAnswer)
	h.Del(HeaderStreamEnd)
	h.Del(http.TrailerPrefix + HeaderStreamEnd)
	if w.prepare != nil {
		w.prepare(h)
	}
}

func (w *responseWriter) WriteHeader(status int) {
	if !w.wrote {
		w.clean()
		w.wrote = status >= 200 || status == http.StatusSwitchingProtocols
		w.status = status
	}
	w.w.WriteHeader(status)
}

func (w *responseWriter) Write(b []byte) (int, error) {
	w.begin()
	return w.w.Write(b)
}

func (w *responseWriter) begin() {
	if !w.wrote {
		w.clean()
		w.wrote, w.status = true, http.StatusOK
	}
}

// ReadFrom keeps the copying of files in the kernel.
func (w *responseWriter) ReadFrom(r io.Reader) (int64, error) {
	w.begin()
	return io.Copy(w.w, r)
}

func (w *responseWriter) Flush() { _ = w.FlushError() }

func (w *responseWriter) FlushError() error {
	w.begin()
	return http.NewResponseController(w.w).Flush()
}

// end is called when the handler has returned: the headers may not have been
// written yet, and trailers never are.
func (w *responseWriter) end() {
	if !w.wrote {
		w.clean()
		return
	}
	// What is left of the header map now can only go out as trailers.
	h := w.w.Header()
	h.Del(HeaderAnswer)
	h.Del(http.TrailerPrefix + HeaderAnswer)
	h.Del(HeaderStreamEnd)
	h.Del(http.TrailerPrefix + HeaderStreamEnd)
}

// unguardedWriter is for requests that pass without an admission.
type unguardedWriter struct{ responseWriter }

func (w *unguardedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return http.NewResponseController(w.w).Hijack()
}

// admittedWriter belongs to one admission, and counts it out.
type admittedWriter struct {
	responseWriter
	admission   *Admission
	cell, epoch string
	websocket   bool // the request asks for one

	mu       sync.Mutex // guards below
	conn     *hijackedConn
	returned bool
	forced   bool
}

func (w *admittedWriter) stamp(h http.Header) {
	h.Set(HeaderCell, w.cell)
	h.Set(HeaderEpoch, w.epoch)
}

// finish counts the admission out when the handler has returned or panicked,
// unless it has taken the connection over and not closed it: then closing it does.
func (w *admittedWriter) finish() {
	w.mu.Lock()
	w.returned = true
	open := w.conn != nil && !w.conn.closed
	if w.forced && w.conn == nil {
		// The connection goes on to other requests.
		c := http.NewResponseController(w.w)
		_ = c.SetReadDeadline(time.Time{})
		_ = c.SetWriteDeadline(time.Time{})
	}
	w.mu.Unlock()
	if w.conn == nil {
		w.end()
		w.markEnd()
	}
	if !open {
		w.admission.Done()
	}
}

// markEnd tells the client that the gate has ended the response, in a trailer if it
// has begun. A response of a known length has no trailers, and needs none.
func (w *admittedWriter) markEnd() {
	closed := w.admission.endedBy()
	if closed == nil {
		return
	}
	name := HeaderStreamEnd
	if w.wrote {
		name = http.TrailerPrefix + name
	}
	w.w.Header().Set(name, string(closed.Code))
}

// serviceRestart is a WebSocket's close frame with status 1012, as a server sends it.
var serviceRestart = []byte{0x88, 0x02, 0x03, 0xf4}

// sayGoodbye tells a WebSocket's client to connect again, where its handler did not.
// If the handler stands in the middle of a frame, the client sees a broken one, as it
// would without.
func (w *admittedWriter) sayGoodbye(c net.Conn) {
	if w.websocket {
		_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		_, _ = c.Write(serviceRestart)
	}
}

// forceEnd is called when a stream should have ended: whoever waits for the
// client, to read from it or to write to it, stops waiting.
func (w *admittedWriter) forceEnd() {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.conn != nil:
		if !w.conn.closed {
			w.sayGoodbye(w.conn.Conn)
		}
		_ = w.conn.Conn.Close() // its owner finds out, and closes it too
	case !w.returned:
		w.forced = true
		c := http.NewResponseController(w.w)
		_ = c.SetReadDeadline(time.Unix(1, 0))
		_ = c.SetWriteDeadline(time.Unix(1, 0))
	}
}

// forHandler hides Hijack where the connection cannot be taken over, as handlers
// look for it.
func (w *admittedWriter) forHandler() http.ResponseWriter {
	if canHijack(w.w) {
		return &hijackWriter{w}
	}
	return w
}

// canHijack looks through wrappers, as [http.ResponseController] does.
func canHijack(w http.ResponseWriter) bool {
	for {
		if _, ok := w.(http.Hijacker); ok {
			return true
		}
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return false
		}
		w = u.Unwrap()
	}
}

// allowAnswer tells the middleware below which w was given out that the answer to
// come is the platform's.
func allowAnswer(w http.ResponseWriter, c Code) {
	for {
		if p, ok := w.(interface{ platformAnswer(Code) }); ok {
			p.platformAnswer(c)
		}
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return
		}
		w = u.Unwrap()
	}
}

type hijackWriter struct{ *admittedWriter }

func (w *hijackWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(w.w).Hijack()
	if err != nil {
		return nil, nil, err
	}
	h := &hijackedConn{Conn: conn, writer: w.admittedWriter}
	w.mu.Lock()
	w.conn = h
	w.mu.Unlock()
	// Whatever it was asked for as, it may go on for long from now on.
	w.admission.stream(context.Background(), w.forceEnd)
	// The buffered reader and writer go to the connection below: only Close matters
	// here.
	return h, rw, nil
}

// hijackedConn is in flight until its owner has closed it.
type hijackedConn struct {
	net.Conn
	writer *admittedWriter
	closed bool // guarded by writer.mu
}

func (c *hijackedConn) Close() error {
	err := c.Conn.Close()
	w := c.writer
	w.mu.Lock()
	c.closed = true
	over := w.returned
	w.mu.Unlock()
	if over {
		w.admission.Done()
	}
	return err
}
