// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
)

// echoServer answers calls with the cell, the epoch and what it got.
type echoServer struct{ f *fleet }

type echoService interface {
	say(ctx context.Context, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error)
	talk(ss grpc.ServerStream) error
}

var echoDesc = grpc.ServiceDesc{
	ServiceName: "test.Echo", HandlerType: (*echoService)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Say", Handler: func(srv any, ctx context.Context, dec func(any) error, ic grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.StringValue)
		if err := dec(in); err != nil {
			return nil, err
		}
		return ic(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/test.Echo/Say"}, func(ctx context.Context, req any) (any, error) {
			return srv.(echoService).say(ctx, req.(*wrapperspb.StringValue))
		})
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Talk", ServerStreams: true, ClientStreams: true, Handler: func(srv any, ss grpc.ServerStream) error {
		return srv.(echoService).talk(ss)
	}}},
}

func (s echoServer) say(ctx context.Context, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if op := md.Get("x-op"); len(op) > 0 {
		s.f.ran(op[0])
	}
	_ = grpc.SetTrailer(ctx, metadata.Pairs("x-trailer", "t"))
	if code, ok := strings.CutPrefix(in.Value, "code "); ok {
		n, err := strconv.Atoi(code)
		if err != nil {
			return nil, err
		}
		return nil, status.Error(codes.Code(n), "as asked")
	}
	if in.Value == "fail" {
		return nil, status.Error(codes.AlreadyExists, "it is there: 100%")
	}
	a, _ := cells.AdmissionFromContext(ctx)
	return wrapperspb.String(fmt.Sprintf("%s %d %d", a.Cell, a.Epoch, len(in.Value))), nil
}

func (s echoServer) talk(ss grpc.ServerStream) error {
	a, _ := cells.AdmissionFromContext(ss.Context())
	for {
		in := new(wrapperspb.StringValue)
		if err := ss.RecvMsg(in); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		md, _ := metadata.FromIncomingContext(ss.Context())
		if op := md.Get("x-op"); len(op) > 0 {
			s.f.ran(op[0] + " " + in.Value)
		}
		if strings.HasPrefix(in.Value, "quiet") {
			continue
		}
		if err := ss.SendMsg(wrapperspb.String(string(a.Cell) + " " + in.Value)); err != nil {
			return err
		}
	}
}

func grpcFleet(t *testing.T, o fleetOptions) (*fleet, *grpc.ClientConn) {
	t.Helper()
	var f *fleet
	o.grpc = func(p *process) *grpc.Server {
		s := grpc.NewServer(grpc.UnaryInterceptor(cells.UnaryServerInterceptor(p.router, p.gates)), grpc.StreamInterceptor(cells.StreamServerInterceptor(p.router, p.gates)))
		s.RegisterService(&echoDesc, &lateEcho{func() *fleet { return f }})
		return s
	}
	f = newFleet(t, o)
	return f, dialGRPC(t, f)
}

// lateEcho finds its fleet when it is called.
type lateEcho struct{ f func() *fleet }

func (s *lateEcho) say(ctx context.Context, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
	return echoServer{s.f()}.say(ctx, in)
}
func (s *lateEcho) talk(ss grpc.ServerStream) error { return echoServer{s.f()}.talk(ss) }

func dialGRPC(t *testing.T, f *fleet) *grpc.ClientConn {
	t.Helper()
	cc, err := grpc.NewClient(strings.TrimPrefix(f.url, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableRetry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
}

func callCtx(t *testing.T, tenant, op string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	return metadata.AppendToOutgoingContext(ctx, "x-tenant", tenant, "x-op", op, "cell-tenant", "evil"), cancel
}

func say(t *testing.T, cc *grpc.ClientConn, tenant, op, text string, opts ...grpc.CallOption) (string, error) {
	ctx, cancel := callCtx(t, tenant, op)
	defer cancel()
	out := new(wrapperspb.StringValue)
	err := cc.Invoke(ctx, "/test.Echo/Say", wrapperspb.String(text), out, opts...)
	return out.Value, err
}

func TestGRPC(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	var head, trail metadata.MD
	got, err := say(t, cc, "acme", "1", "hello", grpc.Header(&head), grpc.Trailer(&trail))
	if err != nil || got != "a 1 5" || len(trail.Get("x-trailer")) != 1 || head.Get("cell-cell")[0] != "a" {
		t.Fatalf("%q %v %v %v", got, err, head, trail)
	}
	if got, err := say(t, cc, "acme", "2", strings.Repeat("x", 3<<20)); err != nil || got != "a 1 3145728" {
		t.Fatalf("%q %v", got, err)
	}
	if _, err := say(t, cc, "acme", "3", "fail"); status.Code(err) != codes.AlreadyExists || status.Convert(err).Message() != "it is there: 100%" {
		t.Fatal(err)
	}
	_, err = say(t, cc, "nobody", "4", "x")
	if a, ok := cells.AnswerFromStatus(status.Convert(err)); !ok || a.Code != cells.CodeUnknownTenant || a.Revision == 0 {
		t.Fatalf("%v %+v", err, a)
	}
	_, err = say(t, cc, "bad/tenant", "5", "x")
	if a, ok := cells.AnswerFromStatus(status.Convert(err)); !ok || a.Code != cells.CodeInvalidTenant {
		t.Fatalf("%v %+v", err, a)
	}
}

// Unary calls and streams hammer a tenant that is moved: no call fails, each runs
// once, and streams end with a status that says so.
func TestGRPCThroughMoves(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var calls, ends atomic.Int64
	for w, text := range []string{"", "small", strings.Repeat("x", 100<<10), strings.Repeat("x", 2<<20)} {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				op := fmt.Sprintf("%d-%d", w, n)
				got, err := say(t, cc, "acme", op, text)
				if err != nil || !strings.HasSuffix(got, fmt.Sprint(" ", len(text))) || f.executions(op) != 1 {
					t.Errorf("%s: %q %v, ran %d times", op, got, err, f.executions(op))
					return
				}
				calls.Add(1)
			}
		})
	}
	for w := range 3 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				err := talk(t, ctx, f, cc, fmt.Sprintf("s%d-%d", w, n))
				if err != nil {
					t.Error(err)
					return
				}
				ends.Add(1)
			}
		})
	}
	from, to := cells.CellID("a"), cells.CellID("b")
	for range 6 {
		c := calls.Load()
		f.wait(func() bool { return calls.Load() > c+10 || t.Failed() }, "calls between moves")
		f.move("acme", from, to)
		from, to = to, from
	}
	stop()
	wg.Wait()
	t.Logf("%d calls, %d streams", calls.Load(), ends.Load())
}

// talk opens a stream and speaks until it is ended by a cut. Each message must be
// executed once at most, and each that was answered exactly once.
func talk(t *testing.T, ctx context.Context, f *fleet, cc *grpc.ClientConn, op string) error {
	sctx, cancel := callCtx(t, "acme", op)
	defer cancel()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	s, err := cc.NewStream(sctx, &echoDesc.Streams[0], "/test.Echo/Talk")
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("%s: %w", op, err)
	}
	for n := 0; ; n++ {
		text := fmt.Sprint(n)
		err := s.SendMsg(wrapperspb.String(text))
		out := new(wrapperspb.StringValue)
		if err == nil || errors.Is(err, io.EOF) {
			err = s.RecvMsg(out)
		}
		ran := f.executions(op + " " + text)
		if err == nil {
			if ran != 1 || !strings.HasSuffix(out.Value, " "+text) {
				return fmt.Errorf("%s: message %d ran %d times, answer %q", op, n, ran, out.Value)
			}
			continue
		}
		if ran > 1 {
			return fmt.Errorf("%s: message %d ran %d times", op, n, ran)
		}
		if ctx.Err() != nil {
			return nil
		}
		a, ok := cells.AnswerFromStatus(status.Convert(err))
		if !ok || a.Code != cells.CodeMoving || !errors.Is(a, cells.ErrGateClosed) {
			return fmt.Errorf("%s: after %d messages: %w", op, n, err)
		}
		return nil
	}
}

// A stream that has begun but not answered yet is not begun again elsewhere.
func TestGRPCStreamWithoutAnswerIsNotRepeated(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	ctx, cancel := callCtx(t, "acme", "op")
	defer cancel()
	s, err := cc.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Talk")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SendMsg(wrapperspb.String("quiet")); err != nil {
		t.Fatal(err)
	}
	f.wait(func() bool { return f.executions("op quiet") == 1 }, "the message has run")
	f.move("acme", "a", "b")
	err = s.RecvMsg(new(wrapperspb.StringValue))
	a, ok := cells.AnswerFromStatus(status.Convert(err))
	if !ok || a.Code != cells.CodeMoving || f.executions("op quiet") != 1 {
		t.Fatalf("%v, ran %d times", err, f.executions("op quiet"))
	}
}

// A stream that is opened during the cut is held, and begins at the new owner.
func TestGRPCStreamIsHeld(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	release := f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	ctx, cancel := callCtx(t, "acme", "op")
	defer cancel()
	s, err := cc.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Talk")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if err := s.SendMsg(wrapperspb.String(fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	f.wait(func() bool { return f.held("acme") == 1 }, "held")
	release()
	for i := range 3 {
		out := new(wrapperspb.StringValue)
		if err := s.RecvMsg(out); err != nil || out.Value != fmt.Sprint("b ", i) {
			t.Fatalf("%q %v", out.Value, err)
		}
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if err := s.RecvMsg(new(wrapperspb.StringValue)); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

// The client's deadline ends a held call.
func TestGRPCHeldDeadline(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	f.paused("acme", "a", "b")
	f.wait(func() bool { return f.moving("acme") }, "the edge sees the cut")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "x-tenant", "acme")
	err := cc.Invoke(ctx, "/test.Echo/Say", wrapperspb.String("x"), new(wrapperspb.StringValue))
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatal(err)
	}
	f.wait(func() bool { return f.held("acme") == 0 }, "the place is free")
}

// A message above what can be recorded: the gate's refusal is passed on, as a
// status that says that nothing has run.
func TestGRPCTooLargeToRepeat(t *testing.T) {
	lag := &lagging{frozen: map[cells.TenantID]cells.Decision{}}
	table := cells.NewMemTable()
	t.Cleanup(func() { table.Close() })
	r := cells.NewRouter(table, cells.WithRouterLogger(quiet()))
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	lag.edgeRoutes = r
	f, cc := grpcFleet(t, fleetOptions{table: table, routes: lag, cfg: edge.Config{ReplayGRPCBytes: 1000}})
	f.place("acme", "a")
	f.wait(func() bool { return r.Lookup("acme").Cell == "a" }, "the view")
	lag.freeze("acme")
	f.move("acme", "a", "b")
	f.wait(func() bool { return f.process("a").router.Lookup("acme").Cell == "b" }, "the old cell knows")
	_, err := say(t, cc, "acme", "op", strings.Repeat("x", 100000))
	a, ok := cells.AnswerFromStatus(status.Convert(err))
	if !ok || !a.Code.Retry() || f.executions("op") != 0 {
		t.Fatalf("%v, ran %d times", err, f.executions("op"))
	}
	if f.metric("cell_edge_unrepeatable_total") != "1" {
		t.Fatal("not counted")
	}
}

func TestGRPCKilled(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{cfg: edge.Config{ConnectWait: 50 * time.Millisecond}})
	f.place("acme", "a")
	ctx, cancel := callCtx(t, "acme", "op")
	defer cancel()
	s, err := cc.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Talk")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SendMsg(wrapperspb.String("quiet")); err != nil {
		t.Fatal(err)
	}
	f.wait(func() bool { return f.executions("op quiet") == 1 }, "the message has run")
	f.process("a").kill()
	err = s.RecvMsg(new(wrapperspb.StringValue))
	a, ok := cells.AnswerFromStatus(status.Convert(err))
	if !ok || a.Code != cells.CodeCellUnreachable || f.executions("op quiet") != 1 {
		t.Fatalf("%v, ran %d times", err, f.executions("op quiet"))
	}
	_, err = say(t, cc, "acme", "op2", "x")
	if a, ok := cells.AnswerFromStatus(status.Convert(err)); !ok || a.Code != cells.CodeCellUnreachable {
		t.Fatal(err)
	}
}

// What only looks like gRPC is an ordinary request.
func TestGRPCWebIsOrdinary(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo)})
	f.place("acme", "a")
	for _, ct := range []string{"application/grpc-web+proto", "application/grpcish", "application/grpc"} {
		e := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"), header("Content-Type", ct))
		if e.StatusCode != 200 || e.ProtoMajor != 1 {
			t.Fatal(ct, e.Status)
		}
	}
}

// At the end of the edge a stream gets a status, not a reset.
func TestGRPCShutdown(t *testing.T) {
	f, _ := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	s, err := edge.New(f.config(edge.Config{StreamGrace: time.Millisecond, DrainTimeout: 100 * time.Millisecond}), f.view, f.topo)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.url = "http://" + s.Addr()
	stop := f.run(s)
	cc := dialGRPC(t, f)
	ctx, cancel := callCtx(t, "acme", "op")
	defer cancel()
	str, err := cc.NewStream(ctx, &echoDesc.Streams[0], "/test.Echo/Talk")
	if err != nil {
		t.Fatal(err)
	}
	if err := str.SendMsg(wrapperspb.String("1")); err != nil {
		t.Fatal(err)
	}
	if err := str.RecvMsg(new(wrapperspb.StringValue)); err != nil {
		t.Fatal(err)
	}
	stop()
	err = str.RecvMsg(new(wrapperspb.StringValue))
	if status.Code(err) != codes.Unavailable || !strings.Contains(status.Convert(err).Message(), "shutting down") {
		t.Fatal(err)
	}
}

// An answer that is only trailers arrives as one, every time.
func TestGRPCTrailersOnly(t *testing.T) {
	f, cc := grpcFleet(t, fleetOptions{})
	f.place("acme", "a")
	for range 300 {
		ctx, cancel := callCtx(t, "acme", "")
		err := cc.Invoke(ctx, "/test.Echo/Nope", wrapperspb.String("x"), new(wrapperspb.StringValue))
		cancel()
		if status.Code(err) != codes.Unimplemented {
			t.Fatal(err)
		}
	}
}
