// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
)

// service is one service behind both protocols, on real sockets.
type service struct {
	gates *cells.Gates
	http  *httptest.Server
	conn  *grpc.ClientConn
	ran   atomic.Int64 // handlers that began
	// The handlers' bodies; nil answers at once.
	serveHTTP  http.HandlerFunc
	serveUnary func(context.Context) error
	serveBidi  func(grpc.ServerStream) error
}

const (
	unaryMethod  = "/test.Service/Unary"
	streamMethod = "/test.Service/Stream"
)

func newService(t *testing.T, gates *cells.Gates, opts ...cells.MiddlewareOption) *service {
	t.Helper()
	s := &service{gates: gates}
	s.http = httptest.NewServer(cells.HTTPMiddleware(nil, gates, opts...)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.ran.Add(1)
		if s.serveHTTP != nil {
			s.serveHTTP(w, r)
		}
	})))
	t.Cleanup(s.http.Close)

	server := grpc.NewServer(
		grpc.UnaryInterceptor(cells.UnaryServerInterceptor(nil, gates, opts...)),
		grpc.StreamInterceptor(cells.StreamServerInterceptor(nil, gates, opts...)))
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "test.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, ctx context.Context, dec func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			m := &wrapperspb.StringValue{}
			if err := dec(m); err != nil {
				return nil, err
			}
			return in(ctx, m, &grpc.UnaryServerInfo{Server: s, FullMethod: unaryMethod}, func(ctx context.Context, _ any) (any, error) {
				s.ran.Add(1)
				if s.serveUnary != nil {
					if err := s.serveUnary(ctx); err != nil {
						return nil, err
					}
				}
				return m, nil
			})
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true, Handler: func(_ any, ss grpc.ServerStream) error {
			s.ran.Add(1)
			if s.serveBidi != nil {
				return s.serveBidi(ss)
			}
			return nil
		}}},
	}, s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	s.conn, err = grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.conn.Close() })
	return s
}

// reply is what a client got, whatever the protocol.
type reply struct {
	answer *cells.Answer // nil: the service answered
	// cell and epoch are what the platform says on every answer.
	cell, epoch string
	mark        string // Cell-Answer
	body        string
	err         error
}

// overHTTP sends a request with the headers.
func (s *service) overHTTP(t *testing.T, method string, h http.Header) (reply, *http.Response) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, method, s.http.URL+"/v1/do", strings.NewReader(""))
	if err != nil {
		t.Fatal(err)
	}
	req.Header = h.Clone()
	resp, err := s.http.Client().Do(req)
	if err != nil {
		return reply{err: err}, nil
	}
	defer resp.Body.Close()
	a, _ := cells.ReadProblem(resp)
	var body strings.Builder
	_, err = copyAll(&body, resp)
	return reply{
		answer: a, cell: resp.Header.Get(cells.HeaderCell), epoch: resp.Header.Get(cells.HeaderEpoch),
		mark: resp.Header.Get(cells.HeaderAnswer), body: body.String(), err: err,
	}, resp
}

func copyAll(b *strings.Builder, resp *http.Response) (int64, error) {
	var n int64
	buf := make([]byte, 4096)
	for {
		k, err := resp.Body.Read(buf)
		b.Write(buf[:k])
		n += int64(k)
		if err != nil {
			if err.Error() == "EOF" {
				return n, nil
			}
			return n, err
		}
	}
}

func outgoing(ctx context.Context, h http.Header) context.Context {
	md := metadata.MD{}
	for k, vs := range h {
		md.Append(k, vs...)
	}
	return metadata.NewOutgoingContext(ctx, md)
}

func first(mds ...metadata.MD) func(name string) string {
	return func(name string) string {
		for _, md := range mds {
			if v := md.Get(name); len(v) > 0 {
				return v[0]
			}
		}
		return ""
	}
}

// overUnary makes a call with the headers as metadata.
func (s *service) overUnary(t *testing.T, h http.Header) reply {
	t.Helper()
	ctx, cancel := context.WithTimeout(outgoing(t.Context(), h), time.Minute)
	defer cancel()
	var header, trailer metadata.MD
	err := s.conn.Invoke(ctx, unaryMethod, wrapperspb.String("x"), &wrapperspb.StringValue{}, grpc.Header(&header), grpc.Trailer(&trailer))
	return replyOf(err, header, trailer)
}

// overStream opens a stream and waits for its end.
func (s *service) overStream(t *testing.T, h http.Header) reply {
	t.Helper()
	ctx, cancel := context.WithTimeout(outgoing(t.Context(), h), time.Minute)
	defer cancel()
	cs, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, streamMethod)
	if err != nil {
		return reply{err: err}
	}
	for err == nil {
		err = cs.RecvMsg(&wrapperspb.StringValue{})
	}
	if err.Error() == "EOF" {
		err = nil
	}
	header, herr := cs.Header()
	if herr != nil {
		header = nil
	}
	return replyOf(err, header, cs.Trailer())
}

func replyOf(err error, header, trailer metadata.MD) reply {
	get := first(header, trailer)
	r := reply{cell: get(cells.HeaderCell), epoch: get(cells.HeaderEpoch), mark: get(cells.HeaderAnswer), err: err}
	if a, ok := cells.AnswerFromStatus(status.Convert(err)); ok {
		r.answer, r.err = a, nil
	}
	return r
}

// hdr makes headers of pairs; their names are not repeated.
func hdr(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}
