// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/cloister-dev/cloister/cells"
)

// world is a gate with a sidecar's proxy behind it, in front of a service.
type world struct {
	*testing.T
	gates *cells.Gates
	table *cells.MemTable
	proxy *proxy
	front *httptest.Server
	key   []byte
}

// serveH2C serves HTTP/1.1 and HTTP/2 without TLS.
func serveH2C(t *testing.T, h http.Handler) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func newWorld(t *testing.T, cfg Config, upstream string) *world {
	t.Helper()
	current := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, current) })
	w := &world{T: t, table: cells.NewMemTable(), key: []byte("0123456789abcdef")}
	if err := cells.NewMoveController(w.table).Assign(t.Context(), "acme", "cell-a", "test"); err != nil {
		t.Fatal(err)
	}
	router := cells.NewRouter(w.table)
	if err := router.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = router.Close() })
	w.gates = cells.NewGates("cell-a", router, cells.WithAdmissionKey(w.key), cells.WithStreamGrace(2*time.Second))
	cfg.Upstream, cfg.Log = upstream, slog.New(slog.DiscardHandler)
	if err := cfg.normalize(); err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(upstream)
	if err != nil {
		t.Fatal(err)
	}
	w.proxy = newProxy(&cfg, target)
	t.Cleanup(w.proxy.close)
	w.front = serveH2C(t, cells.HTTPMiddleware(router, w.gates)(w.proxy))
	return w
}

// headers are what an edge sends.
func (w *world) headers() http.Header {
	return http.Header{cells.HeaderTenant: {"acme"}, cells.HeaderEpoch: {"1"}, cells.HeaderAdmission: {cells.MintToken(w.key, "acme", "cell-a", 1)}}
}

func (w *world) do(method, path string, h http.Header, body io.Reader) *http.Response {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), method, w.front.URL+path, body)
	if err != nil {
		w.Fatal(err)
	}
	req.Header = w.headers()
	for k, v := range h {
		req.Header[k] = v
	}
	resp, err := w.front.Client().Do(req)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { resp.Body.Close() })
	return resp
}

// drain closes the gate as a move does, and fails if something stays in flight.
func (w *world) drain() {
	w.Helper()
	route, err := w.table.Get(w.Context(), "acme")
	if err != nil {
		w.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
	defer cancel()
	if err := w.gates.Drain(ctx, route); err != nil {
		w.Errorf("drain: %v", err)
	}
}

func TestHeaders(t *testing.T) {
	var got *http.Request
	upstream := serveH2C(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		got = r
		w.Header().Set("Cell-Tenant", "globex")
		w.Header().Set("Cell-Answer", "MOVING")
		w.Header().Set("Cell-Admission", "stolen")
		w.Header().Set("X-Own", "kept")
		w.WriteHeader(http.StatusTeapot)
	}))
	w := newWorld(t, Config{}, upstream.URL)
	resp := w.do("POST", "/a%2Fb?x=1;y=%zz", http.Header{
		"Cell_tenant": {"globex"}, "CELL_EPOCH": {"9"}, "Cell.Cell": {"cell-b"}, "Cell-Whatever": {"x"}, "Cellular": {"kept"},
		"X-Forwarded-For": {"192.0.2.7"}, "X-Forwarded-Proto": {"https"}, "Authorization": {"Bearer t"},
	}, strings.NewReader("body"))
	if resp.StatusCode != http.StatusTeapot || resp.Header.Get("X-Own") != "kept" {
		t.Errorf("answer: %s %v", resp.Status, resp.Header)
	}
	if resp.Header.Get("Cell-Answer") != "" || resp.Header.Get("Cell-Tenant") != "" || resp.Header.Get("Cell-Admission") != "" || resp.Header.Get("Cell-Cell") != "cell-a" {
		t.Errorf("the platform's headers of the answer: %v", resp.Header)
	}
	if got == nil {
		t.Fatal("nothing arrived")
	}
	want := map[string]string{"Cell-Tenant": "acme", "Cell-Epoch": "1", "Cell-Cell": "cell-a", "Cellular": "kept", "X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https", "Authorization": "Bearer t"}
	for k, v := range want {
		if got.Header.Get(k) != v || len(got.Header.Values(k)) != 1 {
			t.Errorf("%s is %v, want %s", k, got.Header.Values(k), v)
		}
	}
	for k := range got.Header {
		if strings.HasPrefix(strings.ToLower(strings.NewReplacer("_", "-", ".", "-").Replace(k)), "cell-") && want[k] == "" {
			t.Errorf("%s: %v got through", k, got.Header[k])
		}
	}
	if got.URL.EscapedPath() != "/a%2Fb" || got.URL.RawQuery != "x=1;y=%zz" || got.Host != strings.TrimPrefix(w.front.URL, "http://") {
		t.Errorf("path %s, query %s, host %s", got.URL.EscapedPath(), got.URL.RawQuery, got.Host)
	}
	// Without a token nothing arrives.
	got = nil
	if resp := w.do("GET", "/", http.Header{cells.HeaderAdmission: {"1." + strings.Repeat("A", 43)}}, nil); resp.StatusCode != 400 || got != nil {
		t.Errorf("a forged token: %s", resp.Status)
	}
}

func TestFailures(t *testing.T) {
	upstream := serveH2C(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/fenced":
			w.Header().Set(HeaderFenced, "true")
			w.WriteHeader(http.StatusConflict)
			io.WriteString(w, `{"code":"FENCED"}`)
		case "/said":
			w.Header().Set(HeaderFenced, "true") // of an answer that is none: a success was written
			io.WriteString(w, "done")
		case "/broken":
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				conn.Close()
			}
		}
	}))
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
	for name, c := range map[string]struct {
		upstream, path string
		status         int
		code           cells.Code
	}{
		"fenced":   {upstream.URL, "/fenced", 409, cells.CodeStaleRoute},
		"said":     {upstream.URL, "/said", 200, ""},
		"broken":   {upstream.URL, "/broken", 502, cells.CodeCellUnreachable},
		"not sent": {"http://" + gone.Addr().String(), "/", 503, cells.CodeBackendUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			resp := newWorld(t, Config{}, c.upstream).do("POST", c.path, nil, strings.NewReader("{}"))
			a, ok := cells.ReadProblem(resp)
			if resp.StatusCode != c.status || ok != (c.code != "") || ok && a.Code != c.code || ok && c.code == cells.CodeCellUnreachable && a.Code.Retry() {
				t.Errorf("%s %v", resp.Status, a)
			}
		})
	}
}

// What goes on for long is ended by a drain, cleanly; what does not is waited for.
func TestStreamsEndAtADrain(t *testing.T) {
	release := make(chan struct{})
	upstream := serveH2C(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/events", "/feed": // the first says so, the second is configured
			if r.URL.Path == "/events" {
				w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			}
			fmt.Fprint(w, "data: 1\n\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case "/ws":
			c, err := websocket.Accept(w, r, nil)
			if err != nil {
				return
			}
			defer c.CloseNow()
			for {
				typ, b, err := c.Read(r.Context())
				if err != nil || c.Write(r.Context(), typ, b) != nil {
					return
				}
			}
		case "/slow":
			<-release
			io.WriteString(w, "done")
		}
	}))
	for _, path := range []string{"/events", "/feed"} {
		t.Run(path, func(t *testing.T) {
			w := newWorld(t, Config{Streams: []string{"/fe*"}}, upstream.URL)
			resp := w.do("GET", path, nil, nil)
			r := bufio.NewReader(resp.Body)
			if line, err := r.ReadString('\n'); err != nil || line != "data: 1\n" {
				t.Fatalf("%q, %v", line, err)
			}
			w.drain()
			if rest, err := io.ReadAll(r); err != nil || string(rest) != "\n" {
				t.Errorf("the end of the stream: %q, %v", rest, err)
			}
		})
	}
	t.Run("websocket", func(t *testing.T) {
		w := newWorld(t, Config{}, upstream.URL)
		c, _, err := websocket.Dial(t.Context(), w.front.URL+"/ws", &websocket.DialOptions{HTTPHeader: w.headers(), HTTPClient: w.front.Client()})
		if err != nil {
			t.Fatal(err)
		}
		defer c.CloseNow()
		if err := c.Write(t.Context(), websocket.MessageText, []byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, b, err := c.Read(t.Context()); err != nil || string(b) != "hello" {
			t.Fatalf("echo %q, %v", b, err)
		}
		w.drain()
		if _, _, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusServiceRestart {
			t.Errorf("the end of the socket: %v", err)
		}
	})
	t.Run("request", func(t *testing.T) {
		w := newWorld(t, Config{}, upstream.URL)
		answered := make(chan string, 1)
		go func() {
			resp := w.do("GET", "/slow", nil, nil)
			b, err := io.ReadAll(resp.Body)
			answered <- fmt.Sprint(string(b), err)
		}()
		deadline := time.Now().Add(time.Minute)
		for w.gates.Total() == 0 && time.Now().Before(deadline) {
			<-time.After(time.Millisecond)
		}
		route, err := w.table.Get(t.Context(), "acme")
		if err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		var busy *cells.DrainError
		if err := w.gates.Drain(short, route); !errors.As(err, &busy) {
			t.Errorf("a drain did not wait for a request: %v", err)
		}
		close(release)
		w.drain()
		if got := <-answered; got != "done<nil>" {
			t.Errorf("the request that was waited for: %s", got)
		}
	})
}

func TestGRPC(t *testing.T) {
	svc := health.NewServer()
	seen := make(chan metadata.MD, 10)
	g := grpc.NewServer(grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		seen <- md
		if req.(*healthpb.HealthCheckRequest).Service == "fenced" {
			_ = grpc.SetTrailer(ctx, metadata.Pairs("cell-fenced", "true"))
			return nil, status.Error(codes.Aborted, "LT001")
		}
		return next(ctx, req)
	}))
	healthpb.RegisterHealthServer(g, svc)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(ln) }()
	t.Cleanup(g.Stop)
	w := newWorld(t, Config{}, "http://"+ln.Addr().String())
	conn, err := grpc.NewClient(strings.TrimPrefix(w.front.URL, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	md := metadata.MD{}
	for k, v := range w.headers() {
		md.Append(k, v...)
	}
	md.Append("cell-forged", "x")
	ctx := metadata.NewOutgoingContext(t.Context(), md)
	client := healthpb.NewHealthClient(conn)
	if r, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil || r.Status != healthpb.HealthCheckResponse_SERVING {
		t.Fatalf("unary: %v, %v", r, err)
	}
	if md := <-seen; md.Get("cell-tenant")[0] != "acme" || md.Get("cell-epoch")[0] != "1" || len(md.Get("cell-forged"))+len(md.Get("cell-admission")) > 0 {
		t.Errorf("the service saw %v", md)
	}
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{Service: "none"}); status.Code(err) != codes.NotFound {
		t.Errorf("an error of the service: %v", err)
	}
	_, err = client.Check(ctx, &healthpb.HealthCheckRequest{Service: "fenced"})
	if a, ok := cells.AnswerFromStatus(status.Convert(err)); !ok || a.Code != cells.CodeStaleRoute {
		t.Errorf("a call that the fence refused: %v", err)
	}
	// One that is told by its second message, and one by going on behind its first.
	two, err := client.Watch(ctx, &healthpb.HealthCheckRequest{Service: "two"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := two.Recv(); err != nil {
		t.Fatal(err)
	}
	svc.SetServingStatus("two", healthpb.HealthCheckResponse_SERVING)
	if r, err := two.Recv(); err != nil || r.Status != healthpb.HealthCheckResponse_SERVING {
		t.Fatalf("second message: %v, %v", r, err)
	}
	one, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := one.Recv(); err != nil {
		t.Fatal(err)
	}
	w.drain()
	for name, s := range map[string]grpc.ServerStreamingClient[healthpb.HealthCheckResponse]{"two": two, "one": one} {
		if _, err := s.Recv(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "moving") {
			t.Errorf("the end of %s: %v", name, err)
		}
	}
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a call behind the drain: %v", err)
	}
}
