// SPDX-License-Identifier: Apache-2.0

package fastpath

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stage is a backend of one process, which answers each request with the next of its
// answers, as bytes.
type stage struct {
	t       testing.TB
	up      *Upstream
	answers chan string
	handed  chan net.Conn
	ended   chan Ending
	refused chan error
	open    atomic.Int64
	s       *Server
	dials   atomic.Int64
}

func newStage(t testing.TB) *stage {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	x := &stage{t: t, answers: make(chan string, 16), handed: make(chan net.Conn, 16), ended: make(chan Ending, 16), refused: make(chan error, 16)}
	x.up = NewUpstream(l.Addr().String(), new(atomic.Int64), Options{DialTimeout: time.Minute, IdleTimeout: time.Minute, MaxIdle: 4})
	x.s = NewServer(Config{Backend: x, ReadTimeout: time.Minute, IdleTimeout: time.Minute, AnswerTimeout: time.Minute})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			x.dials.Add(1)
			go func() {
				defer c.Close()
				from := bufio.NewReader(c)
				for {
					r, err := http.ReadRequest(from)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, r.Body)
					a, closes := strings.CutSuffix(<-x.answers, "CLOSE")
					if _, err := io.WriteString(c, a); err != nil || closes {
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		x.s.Close()
		x.up.Close()
		_ = l.Close()
		<-done
	})
	return x
}

func (x *stage) Route(_ *Request, t *Target) bool { t.Upstream = x.up; return true }
func (x *stage) Passes([]byte) bool               { return true }
func (x *stage) Forwarded(b []byte, _ net.Addr, _ *Request) []byte {
	return b
}
func (x *stage) Began()                                { x.open.Add(1) }
func (x *stage) Over()                                 { x.open.Add(-1) }
func (x *stage) Ended(_ *Request, _ *Target, e Ending) { x.ended <- e }
func (x *stage) HandOver(c net.Conn)                   { x.handed <- c }
func (x *stage) Refuse(_ *Request, _ *Target, _ time.Time, _ net.Addr, err error) []byte {
	x.refused <- err
	return []byte("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 7\r\nConnection: close\r\n\r\nrefused")
}

// client is a connection to the stage's server.
func (x *stage) client() (net.Conn, *bufio.Reader) {
	x.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		x.t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		x.t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		x.t.Fatal(err)
	}
	x.s.Serve(in)
	x.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c, bufio.NewReader(c)
}

const get = "GET / HTTP/1.1\r\nHost: h\r\n\r\n"

// Answers as a process may give them: what the client reads, whether its connection and
// the process's are used again.
func TestAnswers(t *testing.T) {
	ok := "HTTP/1.1 200 OK\r\n"
	for _, c := range []struct {
		what, method, answer string
		status               int
		body                 string
		broken, kept, reused bool
	}{
		{"a length", "GET", ok + "Content-Length: 3\r\n\r\nabc", 200, "abc", false, true, true},
		{"chunks", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n", 200, "abc0123456789", false, true, true},
		{"no body", "GET", "HTTP/1.1 204 No Content\r\n\r\n", 204, "", false, true, true},
		{"not modified, with a length", "GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, "", false, true, true},
		{"to HEAD", "HEAD", ok + "Content-Length: 9\r\n\r\n", 200, "", false, true, true},
		{"hints before it", "GET", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok + "Content-Length: 1\r\n\r\na", 200, "a", false, true, true},
		{"the process closes", "GET", ok + "Connection: close\r\nContent-Length: 1\r\n\r\naCLOSE", 200, "a", false, true, false},
		{"to the end", "GET", ok + "\r\nabcCLOSE", 200, "abc", false, false, false},
		{"of an old process", "GET", "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\naCLOSE", 200, "a", false, true, false},
		{"trailers", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Sum: 1\r\ncell-admission: secret\r\n\r\n", 200, "a", false, true, true},
		{"a connection's header", "GET", ok + "Connection: X-Hop\r\nX-Hop: 1\r\nContent-Length: 1\r\n\r\na", 200, "a", false, false, false},
		{"bytes behind it", "GET", ok + "Content-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", 200, "a", false, true, false},
		{"bytes behind chunks", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", 200, "", false, true, false},
		{"bytes behind no body", "GET", "HTTP/1.1 204 No Content\r\n\r\nevil", 204, "", false, true, false},
		{"both lengths", "GET", ok + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200, "", false, false, false},
		{"two lengths", "GET", ok + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 502, "refused", false, false, false},
		{"a length that is none", "GET", ok + "Content-Length: +3\r\n\r\nabc", 502, "refused", false, false, false},
		{"an unknown coding", "GET", ok + "Transfer-Encoding: gzip\r\n\r\nabc", 502, "refused", false, false, false},
		{"another protocol", "GET", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", 502, "refused", false, false, false},
		{"no HTTP", "GET", "220 mail\r\n\r\nCLOSE", 502, "refused", false, false, false},
		{"half a head", "GET", "HTTP/1.1 200 OK\r\nContent-LeCLOSE", 502, "refused", false, false, false},
		{"nothing", "GET", "CLOSE", 502, "refused", false, false, false},
		{"half a body", "GET", ok + "Content-Length: 9\r\n\r\nabcCLOSE", 200, "abc", true, false, false},
		{"half a chunk", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n9\r\nabcCLOSE", 200, "abc", true, false, false},
		{"an extension", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n0\r\n\r\n", 200, "", true, false, false},
		{"a chunk without its end", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd0\r\n\r\n", 200, "abc", true, false, false},
		{"a bare line feed in chunks", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n", 200, "", true, false, false},
		{"a huge chunk", "GET", ok + "Transfer-Encoding: chunked\r\n\r\n123456789\r\n", 200, "", true, false, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			x := newStage(t)
			conn, from := x.client()
			x.answers <- c.answer
			if _, err := io.WriteString(conn, c.method+get[3:]); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(from, &http.Request{Method: c.method})
			for err == nil && resp.StatusCode < 200 {
				resp, err = http.ReadResponse(from, &http.Request{Method: c.method})
			}
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if resp.StatusCode != c.status || !c.broken && string(body) != c.body || (err != nil) != c.broken {
				t.Errorf("%d %q, %v; want %d %q", resp.StatusCode, body, err, c.status, c.body)
			}
			if resp.Header.Get("X-Hop") != "" || resp.Trailer.Get("Cell-Admission") != "" {
				t.Errorf("headers %v, trailers %v", resp.Header, resp.Trailer)
			}
			if c.broken {
				return
			}
			x.answers <- ok + "Content-Length: 6\r\n\r\nsecond"
			_, _ = io.WriteString(conn, get)
			resp, err = http.ReadResponse(from, nil)
			if !c.kept {
				if err == nil {
					t.Errorf("a second answer on the connection: %s", resp.Status)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if body, err = io.ReadAll(resp.Body); err != nil || string(body) != "second" {
				t.Errorf("the second answer is %q, %v", body, err)
			}
			if got := x.dials.Load() == 1; got != c.reused {
				t.Errorf("%d connections to the process", x.dials.Load())
			}
		})
	}
}

// A gate's refusal is not passed on: the connection is handed over with the request.
func TestGateRefuses(t *testing.T) {
	x := newStage(t)
	conn, _ := x.client()
	x.answers <- "HTTP/1.1 503 Service Unavailable\r\nCell-Answer: MOVING\r\nContent-Length: 2\r\n\r\n{}"
	const post = "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
	if _, err := io.WriteString(conn, post+get); err != nil {
		t.Fatal(err)
	}
	c := <-x.handed
	defer c.Close()
	got := make([]byte, len(post))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != post {
		t.Errorf("handed over with %q, %v", got, err)
	}
	if n := x.open.Load(); n != 0 {
		t.Errorf("%d requests are open", n)
	}
	select {
	case e := <-x.ended:
		t.Errorf("it was counted: %+v", e)
	default:
	}
}

// What is in use and what is not, when the server ends.
func TestDrain(t *testing.T) {
	x := newStage(t)
	idle, fromIdle := x.client()
	busy, fromBusy := x.client()
	if _, err := io.WriteString(busy, get); err != nil {
		t.Fatal(err)
	}
	for by := time.Now().Add(time.Minute); x.open.Load() == 0; runtime.Gosched() {
		if time.Now().After(by) {
			t.Fatal("the request was not taken")
		}
	}
	drained := make(chan error, 1)
	go func() { drained <- x.s.Drain(context.Background()) }()
	if _, err := fromIdle.ReadByte(); err != io.EOF {
		t.Errorf("the idle connection: %v", err)
	}
	_ = idle.Close()
	x.answers <- "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"
	resp, err := http.ReadResponse(fromBusy, nil)
	if err != nil || !resp.Close {
		t.Fatalf("%+v, %v", resp, err)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
}

// A client that goes while the process works takes its request along.
func TestClientGoes(t *testing.T) {
	x := newStage(t)
	conn, _ := x.client()
	if _, err := io.WriteString(conn, get); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if e := <-x.ended; !e.Gone {
		t.Errorf("%+v", e)
	}
	x.answers <- "CLOSE"
}

// Reading heads makes no garbage.
func TestAllocations(t *testing.T) {
	request, head := []byte(get), []byte("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\n")
	fields := make([]Field, maxFields)
	var r Request
	var a answer
	if n := testing.AllocsPerRun(100, func() {
		if !r.parse(request, fields[:0]) || !a.parse(head, fields[:0], false) {
			t.Fatal("not parsed")
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzChunks: what is followed is what net/http reads.
func FuzzChunks(f *testing.F) {
	for _, s := range []string{"0\r\n\r\n", "3\r\nabc\r\n0\r\n\r\n", "3;x\r\nabc\r\n0\r\n\r\n", "03\r\nabc\r\n0\r\n\r\n", "3\nabc\n0\n\n", "fffffffff\r\n", "3\r\nabcd\r\n0\r\n\r\n", "g\r\n"} {
		f.Add([]byte(s), 1)
	}
	f.Fuzz(func(t *testing.T, b []byte, step int) {
		var c chunks
		used, done := 0, false
		for rest := b; len(rest) > 0 && !done; {
			n := min(max(step, 1), len(rest))
			u, d, ok := c.follow(rest[:n])
			used, done = used+u, d
			if !ok || c.state == chunkTrailers {
				return // refused, or left to others
			}
			rest = rest[n:]
		}
		resp, err := http.ReadResponse(bufio.NewReader(io.MultiReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"), bytes.NewReader(b[:used]))), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.ReadAll(resp.Body)
		if done != (err == nil) {
			t.Errorf("%q of %q: done %t, net/http says %v", b[:used], b, done, err)
		}
	})
}
