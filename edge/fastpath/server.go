// SPDX-License-Identifier: Apache-2.0

package fastpath

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Target is where a request goes, and what the cell is told.
type Target struct {
	Upstream *Upstream
	// Headers are whole header lines that are added to the request.
	Headers []byte
	// Drop is a header that is not passed on, in lower case; "" for none.
	Drop string
	// Note is the backend's own.
	Note any
}

// Ending is how a request that was taken ended.
type Ending struct {
	Start  time.Time
	Status int
	Bytes  int64 // of the answer's body
	Cut    bool  // the answer broke off
	Gone   bool  // the client went before its answer was whole
	Stream bool  // the answer is a stream of events
}

// Backend decides about requests and hears of their ends. Its methods are called by the
// goroutines of connections and must not keep what belongs to a connection.
type Backend interface {
	// Route says where a request goes; false leaves it to the other server. It changes
	// nothing.
	Route(r *Request, t *Target) bool
	// Passes reports whether a client's header is passed on.
	Passes(name []byte) bool
	// Forwarded appends the header lines that say who the client is.
	Forwarded(b []byte, client net.Addr, r *Request) []byte
	// Began and Over surround a request that is sent; Ended counts it.
	Began()
	Over()
	Ended(r *Request, t *Target, e Ending)
	// Refuse returns the whole answer to a request that was sent and that got none, and
	// counts it in place of Ended. The connection is closed after it.
	Refuse(r *Request, t *Target, start time.Time, client net.Addr, err error) []byte
	// HandOver gives a connection away: it has bytes to be read already.
	HandOver(c net.Conn)
}

// Config configures a [Server]. All fields are needed.
type Config struct {
	Backend Backend
	// ReadTimeout bounds the time for a head, or a body, that has begun to come;
	// IdleTimeout that without a request; AnswerTimeout the wait for an answer's head.
	ReadTimeout, IdleTimeout, AnswerTimeout time.Duration
}

// Server serves connections. Safe for concurrent use.
type Server struct {
	cfg      Config
	draining atomic.Bool
	mu       sync.Mutex // guards conns
	conns    map[*conn]struct{}
	wg       sync.WaitGroup
}

// NewServer returns a server without connections.
func NewServer(cfg Config) *Server { return &Server{cfg: cfg, conns: map[*conn]struct{}{}} }

// Serve serves a connection until it ends or is handed over; it returns at once.
func (s *Server) Serve(c net.Conn) {
	x := &conn{s: s, c: c}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining.Load() {
		_ = c.Close()
		return
	}
	s.conns[x] = struct{}{}
	s.wg.Go(x.serve)
}

func (s *Server) forget(x *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, x)
}

// Drain closes the connections without a request, lets the others answer theirs, and
// waits for that until ctx ends.
func (s *Server) Drain(ctx context.Context) error {
	s.draining.Store(true)
	s.mu.Lock()
	for x := range s.conns {
		x.stopIdle()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.wg.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// EndStreams ends streams of events, each with a whole chunk.
func (s *Server) EndStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.conns {
		x.endStream()
	}
}

// Close cuts what is left, and waits for its end.
func (s *Server) Close() {
	s.draining.Store(true)
	s.mu.Lock()
	for x := range s.conns {
		x.cut()
	}
	s.mu.Unlock()
	s.wg.Wait()
}
