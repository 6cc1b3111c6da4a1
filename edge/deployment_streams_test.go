// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// pair answers each chunk of a request's body before the next one comes.
func pair(w http.ResponseWriter, r *http.Request) {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex()
	buf := make([]byte, 100)
	for {
		n, err := r.Body.Read(buf)
		if n > 0 {
			fmt.Fprintf(w, "<%s>", buf[:n])
			if rc.Flush() != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// Both bodies stream: what the client has sent is answered before it sends more.
func TestDeploymentBodies(t *testing.T) {
	f := newFront(t, frontOptions{table: serving, handler: http.HandlerFunc(pair)})
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		body, feed := io.Pipe()
		r, err := http.NewRequestWithContext(t.Context(), "POST", f.url+"/", body)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = bHost
		go func() { _, _ = io.WriteString(feed, "one") }() // the answer's headers come with the first answer
		resp, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		for i, chunk := range []string{"one", "two", "three"} {
			if i > 0 {
				if _, err := io.WriteString(feed, chunk); err != nil {
					t.Fatal(err)
				}
			}
			got := make([]byte, len(chunk)+2)
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "<"+chunk+">" {
				t.Fatalf("%s: %s %v", name, got, err)
			}
		}
		feed.Close()
		if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
			t.Errorf("%s: %s %v", name, rest, err)
		}
		resp.Body.Close()
		// A long one, of which nobody keeps a copy.
		a := f.must(c, "POST", "/", io.LimitReader(endless{}, 20<<20), host(bHost))
		if a.StatusCode != 200 || len(a.body) < 20<<20 {
			t.Errorf("%s: %d, %d bytes", name, a.StatusCode, len(a.body))
		}
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestDeploymentEvents(t *testing.T) {
	next := make(chan struct{})
	f := newFront(t, frontOptions{table: serving, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for n := 1; n <= 3; n++ {
			fmt.Fprintf(w, "id: %d\n\n", n)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	})})
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		r, err := http.NewRequestWithContext(t.Context(), "GET", f.url+"/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = sharedHost
		r.Header.Set("Authorization", "Bearer "+issued("iss-b"))
		resp, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if where(resp) != "b" {
			t.Fatal(where(resp))
		}
		sc := bufio.NewScanner(resp.Body)
		for n := 1; n <= 3; n++ {
			if !sc.Scan() || sc.Text() != fmt.Sprintf("id: %d", n) || !sc.Scan() {
				t.Fatalf("%s: %q %v", name, sc.Text(), sc.Err())
			}
			next <- struct{}{}
		}
		if sc.Scan() || sc.Err() != nil {
			t.Errorf("%s: %q %v", name, sc.Text(), sc.Err())
		}
		resp.Body.Close()
	}
}

func TestDeploymentWebSocket(t *testing.T) {
	f := newFront(t, frontOptions{table: serving, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, p, err := c.Read(r.Context())
			if err != nil || c.Write(r.Context(), kind, append([]byte(r.Host+" "), p...)) != nil {
				return
			}
		}
	})})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, _, err := websocket.Dial(ctx, f.url+"/ws", &websocket.DialOptions{Host: bHost, HTTPClient: f.http})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	for _, s := range []string{"one", strings.Repeat("x", 20000)} {
		if err := c.Write(ctx, websocket.MessageText, []byte(s)); err != nil {
			t.Fatal(err)
		}
		if _, p, err := c.Read(ctx); err != nil || string(p) != bHost+" "+s {
			t.Fatalf("%.40s %v", p, err)
		}
	}
	if err := c.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Error(err)
	}
	if f.ran("a") != 0 {
		t.Error("the other deployment was asked")
	}
}

// plainEcho is a gRPC service without gates.
type plainEcho struct{ name string }

func (s plainEcho) say(ctx context.Context, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
	if in.Value == "fail" {
		return nil, status.Error(codes.AlreadyExists, "it is there")
	}
	md, _ := metadata.FromIncomingContext(ctx)
	return wrapperspb.String(s.name + " " + strings.Join(md.Get(":authority"), ",") + " " + in.Value), nil
}

func (s plainEcho) talk(ss grpc.ServerStream) error {
	for {
		in := new(wrapperspb.StringValue)
		if err := ss.RecvMsg(in); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := ss.SendMsg(wrapperspb.String(s.name + " " + in.Value)); err != nil {
			return err
		}
	}
}

func TestDeploymentGRPC(t *testing.T) {
	f := newFront(t, frontOptions{})
	table := serving(f)
	for i, name := range []string{"a", "b"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			return h(ctx, req)
		}))
		s.RegisterService(&echoDesc, plainEcho{name})
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = s.Serve(l)
		}()
		t.Cleanup(func() {
			s.Stop()
			<-done
		})
		table.Cells[i].Upstream = "http://" + l.Addr().String()
	}
	f.set(table)
	call := func(authority, tok, say string) (string, error) {
		cc, err := grpc.NewClient(strings.TrimPrefix(f.url, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(authority), grpc.WithDisableRetry())
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if tok != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+tok)
		}
		out := new(wrapperspb.StringValue)
		err = cc.Invoke(ctx, "/test.Echo/Say", wrapperspb.String(say), out)
		if err != nil {
			return "", err
		}
		ss, err := cc.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Talk")
		if err != nil {
			return "", err
		}
		for _, m := range []string{"1", "2"} {
			in := new(wrapperspb.StringValue)
			if err := ss.SendMsg(wrapperspb.String(m)); err != nil {
				return "", err
			}
			if err := ss.RecvMsg(in); err != nil || in.Value != out.Value[:1]+" "+m {
				return "", fmt.Errorf("stream: %s %w", in.Value, err)
			}
		}
		return out.Value, ss.CloseSend()
	}
	for _, c := range []struct{ authority, token, want string }{
		{bHost, "", "b " + bHost + " hi"}, {sharedHost, "", "a " + sharedHost + " hi"}, {sharedHost, issued("iss-b"), "b " + sharedHost + " hi"},
	} {
		if got, err := call(c.authority, c.token, "hi"); err != nil || got != c.want {
			t.Errorf("%+v: %q %v", c, got, err)
		}
	}
	for _, c := range []struct {
		authority, token, say string
		want                  codes.Code
	}{
		{"nobody.example.com", "", "hi", codes.InvalidArgument}, {sharedHost, issued("nobody"), "hi", codes.Unauthenticated}, {bHost, "", "fail", codes.AlreadyExists},
		{"[2001:db8::7]", "", "hi", codes.Unavailable},
	} {
		if _, err := call(c.authority, c.token, c.say); status.Code(err) != c.want {
			t.Errorf("%+v: %v", c, err)
		}
	}
	table.Cells[1].Upstream = ""
	f.set(table)
	if _, err := call(bHost, "", "hi"); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
}
