// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/edge"
)

// sides are an edge with the fast path and one without, each in front of a service that
// records what reaches it.
type sides struct {
	fleets [2]*fleet
	mu     sync.Mutex // guards seen
	seen   [2][]string
}

func newSides(t testing.TB) *sides {
	t.Setenv("EDGE_FAST_PATH", "") // one side is without it, whatever the others are
	x := &sides{}
	for i := range x.fleets {
		x.fleets[i] = newFleet(t, fleetOptions{cfg: edge.Config{FastPath: i == 0, ReadHeaderTimeout: time.Minute}, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			h := r.Header.Clone()
			h.Del("Cell-Admission") // of another key's cell, but for its presence
			var lines []string
			for k, v := range h {
				lines = append(lines, fmt.Sprintf("%s=%q", k, v))
			}
			slices.Sort(lines)
			x.mu.Lock()
			x.seen[i] = append(x.seen[i], fmt.Sprintf("%s %s %s %d %v %q %v %s %t", r.Method, r.RequestURI, r.Host, r.ContentLength, r.TransferEncoding, body, err != nil, strings.Join(lines, " "), r.Header.Get("Cell-Admission") != ""))
			x.mu.Unlock()
			switch r.URL.Path {
			case "/chunks":
				for range 3 {
					_, _ = io.WriteString(w, "part")
					_ = http.NewResponseController(w).Flush()
				}
				return
			case "/none":
				w.WriteHeader(http.StatusNoContent)
				return
			}
			_, _ = fmt.Fprintf(w, "%s %d", r.RequestURI, len(body))
		})})
		x.fleets[i].place("acme", "a")
		x.fleets[i].place("beta", "b")
	}
	return x
}

const lastRequest = "GET /last HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nConnection: close\r\n\r\n"

// ask sends the bytes and a last request behind them to a side. It returns what the
// service saw, and the answers.
func (x *sides) ask(t testing.TB, i int, raw string, wait time.Duration) (seen, answers []string) {
	x.mu.Lock()
	x.seen[i] = nil
	x.mu.Unlock()
	c, err := net.Dial("tcp", x.fleets[i].edge.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(wait)) // half a request waits for the rest
	_, _ = io.WriteString(c, raw+lastRequest)
	from := bufio.NewReader(c)
	for {
		resp, err := http.ReadResponse(from, nil)
		if err != nil {
			break
		}
		body, err := io.ReadAll(resp.Body)
		if resp.StatusCode >= 400 {
			body = regexp.MustCompile(`"age_ms":\d+`).ReplaceAll(body, nil)
		}
		// What was not read of a refused request may take the end of the answer along.
		answers = append(answers, fmt.Sprintf("%d %q %t", resp.StatusCode, body, err != nil && resp.StatusCode < 400))
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.seen[i] { // a request without a host gets the process's address
		seen = append(seen, address.ReplaceAllString(s, "ADDRESS"))
	}
	return seen, answers
}

var address = regexp.MustCompile(`127\.0\.0\.1:\d+`)

// same fails unless both sides made the same of the bytes.
func (x *sides) same(t testing.TB, raw string) {
	t.Helper()
	if strings.Contains(strings.ToUpper(raw), "HEAD ") {
		return // an answer cannot be read without knowing that it is HEAD's
	}
	var seenFast, fast, seenSlow, slow []string
	// A difference may be one of time: it is looked at once more.
	for _, wait := range []time.Duration{300 * time.Millisecond, time.Minute} {
		seenFast, fast = x.ask(t, 0, raw, wait)
		seenSlow, slow = x.ask(t, 1, raw, wait)
		if n := len(fast) - 1; n >= 0 && n < len(slow) && strings.HasPrefix(fast[n], "400 ") && len(seenFast) <= len(seenSlow) {
			// net/http forgives line breaks behind a POST, if it has read that itself. To refuse
			// more is no harm.
			seenSlow, slow = seenSlow[:len(seenFast)], append(slow[:n:n], fast[n])
		}
		if slices.Equal(seenFast, seenSlow) && slices.Equal(fast, slow) {
			return
		}
	}
	if !slices.Equal(seenFast, seenSlow) {
		t.Errorf("of %q the service saw\n%s\nby the fast path, and\n%s\nwithout it", raw, strings.Join(seenFast, "\n"), strings.Join(seenSlow, "\n"))
	}
	if !slices.Equal(fast, slow) {
		t.Errorf("%q was answered\n%s\nby the fast path, and\n%s\nwithout it", raw, strings.Join(fast, "\n"), strings.Join(slow, "\n"))
	}
}

// smuggled are requests that some servers read in another way than others, and ordinary
// ones.
var smuggled = []string{
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /chunks HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\nGET /none HTTP/1.1\r\nhost: h\r\nx-tenant: beta\r\n\r\n",
	"POST /a?b=c;d HTTP/1.1\r\nHost: h:80\r\nX-Tenant: acme\r\nContent-Length: 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 3, 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: +3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 0x3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 3 \r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 003\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: -1\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 99999999999999999999\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length:\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTransfer_Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent_Length: 9\r\nContent-Length: 3\r\n\r\nabc",
	"GET / HTTP/1.1\nHost: h\nX-Tenant: acme\n\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX: a\rb\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX: a\nb: c\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX: a\x00b\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX: a\r\n b\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nHost: g\r\nX-Tenant: acme\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: u@h\r\nX-Tenant: acme\r\n\r\n", "GET / HTTP/1.1\r\nHost: h/x\r\nX-Tenant: acme\r\n\r\n",
	"GET / HTTP/1.1\r\nX-Tenant: acme\r\n\r\n", "GET / HTTP/1.1\r\nHost:\r\nX-Tenant: acme\r\n\r\n",
	"GET http://g/ HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "CONNECT h:80 HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET //cells/x HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET /%63ells/x HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /a/../cells/x HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET /Cells HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /cells;x/y HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET /cells./y HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /\\cells/x HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET /a#b HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /a b HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET  / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /a?x y HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET /a?x=%zz HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET / HTTP/1.0\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "GET / HTTP/1.2\r\nHost: h\r\nX-Tenant: acme\r\n\r\n", "get / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX-Tenant: beta\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: nobody\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: a b\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nX-Tenant:\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nCell-Tenant: beta\r\ncell_epoch: 9\r\nCELL.ADMISSION: x\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX-Forwarded-For: 9.9.9.9\r\nX_Forwarded_Proto: https\r\nForwarded: for=1\r\nX-Real-Ip: 1\r\nX-Forward: 1\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nConnection: X-Tenant\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nConnection: keep-alive, Cell-Epoch\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nConnection: keep-alive\r\nKeep-Alive: 5\r\nProxy-Authorization: x\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nConnection: close\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nExpect: 100-continue\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nTE: trailers\r\nTrailer: X\r\n\r\n", "PURGE / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX: \x80\xff\r\nY:\t a \t\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n: x\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nb@d: x\r\n\r\n", "\r\nGET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n\r\n",
	"GET /t/acme/x HTTP/1.1\r\nHost: h\r\n\r\n", "GET / HTTP/1.1\r\nHost: acme.localhost\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nX: " + strings.Repeat("a", 9<<10) + "\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\n" + strings.Repeat("X: a\r\n", 100) + "\r\n",
	"POST / HTTP/1.1\r\nHost: h\r\nX-Tenant: acme\r\nContent-Length: 9000\r\n\r\n" + strings.Repeat("b", 9000),
}

// What the fast path makes of requests is what net/http makes of them.
func TestFastPathIsTheSame(t *testing.T) {
	x := newSides(t)
	for _, raw := range smuggled {
		x.same(t, raw)
	}
	if n, err := strconv.Atoi(x.fleets[0].metric("cell_edge_fast_path_requests_total")); err != nil || n < 10 {
		t.Errorf("%d requests went by the fast path, %v", n, err)
	}
	if n := x.fleets[1].metric("cell_edge_fast_path_requests_total"); n != "0" {
		t.Errorf("%s requests went by a fast path that is off", n)
	}
}

func FuzzFastPath(f *testing.F) {
	for _, raw := range smuggled {
		f.Add([]byte(raw))
	}
	x := newSides(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 4096 {
			return
		}
		x.same(t, string(bytes.Clone(raw)))
	})
}
