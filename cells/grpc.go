// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// UnaryServerInterceptor admits each call before its handler runs, as
// [HTTPMiddleware] does each request: the same decision, by the same metadata.
// Refusals are statuses of [AnswerStatus]. A handler that wants to refuse a call of
// which nothing has run returns the [*Answer] itself; an answer that reached it in
// a status of another service does not pass as this one's.
func UnaryServerInterceptor(router *Router, gates *Gates, opts ...MiddlewareOption) grpc.UnaryServerInterceptor {
	if gates == nil {
		return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			return handler(ctx, req)
		}
	}
	gates.checkRouter(router)
	cfg := middlewareOf(opts)
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if cfg.unguarded != nil && cfg.unguarded(info.FullMethod) {
			resp, err := handler(cleanTransport(ctx), req)
			return resp, gates.serviceError(ctx, err)
		}
		begun := time.Now()
		a, err := gates.admitCall(ctx, info.FullMethod, false)
		if err != nil {
			gates.servedCall(ctx, false, begun, err)
			return nil, err
		}
		defer a.Done()
		gates.stampCall(ctx, a)
		resp, err := handler(ContextWithAdmission(cleanTransport(ctx), a), req)
		err = gates.serviceError(ctx, err)
		gates.servedCall(ctx, false, begun, err)
		return resp, err
	}
}

// StreamServerInterceptor is [UnaryServerInterceptor] for streams. The stream's
// context is cancelled when the gate closes, and a RecvMsg that waits returns; the
// client gets the answer as the stream's status, with "retry" false, since the
// stream had begun.
func StreamServerInterceptor(router *Router, gates *Gates, opts ...MiddlewareOption) grpc.StreamServerInterceptor {
	if gates == nil {
		return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			return handler(srv, ss)
		}
	}
	gates.checkRouter(router)
	cfg := middlewareOf(opts)
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := ss.Context()
		if cfg.unguarded != nil && cfg.unguarded(info.FullMethod) {
			return gates.serviceError(ctx, handler(srv, &guardedStream{ServerStream: ss, ctx: cleanTransport(ctx)}))
		}
		begun := time.Now()
		a, err := gates.admitCall(ctx, info.FullMethod, true)
		if err != nil {
			gates.servedCall(ctx, true, begun, err)
			return err
		}
		defer a.Done()
		gates.stampCall(ctx, a)
		s := &guardedStream{ServerStream: ss, ctx: cleanTransport(a.Context()), waits: info.IsClientStream, stop: make(chan struct{}), grace: gates.cfg.grace}
		defer close(s.stop)
		if err = handler(srv, s); err != nil {
			if closed := AnswerOf(context.Cause(s.ctx)); closed != nil && errors.Is(closed, ErrGateClosed) {
				err = answerStatus(closed, false).Err()
			} else {
				err = gates.serviceError(ctx, err)
			}
		}
		gates.servedCall(ctx, true, begun, err)
		return err
	}
}

// admitCall is the part of a call that is the same for both interceptors.
func (g *Gates) admitCall(ctx context.Context, method string, stream bool) (*Admission, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	req, bad := admitRequestOf(func(name string) []string { return md[strings.ToLower(name)] })
	if bad != nil {
		return nil, g.refuseCall(ctx, bad)
	}
	req.Stream, req.Label = stream, method
	a, err := g.Admit(ctx, req)
	if err != nil {
		return nil, g.refuseCall(ctx, AnswerOf(err))
	}
	return a, nil
}

// refuseCall sets the answer's trailers and returns its status as an error.
func (g *Gates) refuseCall(ctx context.Context, a *Answer) error {
	s := AnswerStatus(a)
	if a.Code.Known() {
		// Trailers only: an edge that forwards the call finds them as headers.
		_ = grpc.SetTrailer(ctx, metadata.Pairs(
			strings.ToLower(HeaderAnswer), string(a.Code),
			strings.ToLower(HeaderCell), string(g.cell),
			strings.ToLower(HeaderRevision), strconv.FormatUint(uint64(a.Revision), 10),
			strings.ToLower(HeaderAge), strconv.FormatInt(ageMS(a.Age), 10)))
	}
	return s.Err()
}

func (g *Gates) stampCall(ctx context.Context, a *Admission) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(
		strings.ToLower(HeaderCell), string(a.Cell),
		strings.ToLower(HeaderEpoch), strconv.FormatUint(uint64(a.Epoch), 10)))
}

// serviceError is what a handler's error goes out as.
func (g *Gates) serviceError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if a, ok := err.(*Answer); ok && a.Code.Known() && !errors.Is(a, ErrGateClosed) {
		return g.refuseCall(ctx, a)
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	if clean, changed := withoutAnswer(s); changed {
		return clean.Err()
	}
	return err
}

// cleanTransport keeps a handler from setting Cell-Answer itself, with the
// functions of package grpc that find the call by its context.
func cleanTransport(ctx context.Context) context.Context {
	t := grpc.ServerTransportStreamFromContext(ctx)
	if t == nil {
		return ctx
	}
	return grpc.NewContextWithServerTransportStream(ctx, cleanStream{t})
}

type cleanStream struct{ grpc.ServerTransportStream }

func (s cleanStream) SetHeader(md metadata.MD) error {
	return s.ServerTransportStream.SetHeader(withoutAnswerMD(md))
}

func (s cleanStream) SendHeader(md metadata.MD) error {
	return s.ServerTransportStream.SendHeader(withoutAnswerMD(md))
}

func (s cleanStream) SetTrailer(md metadata.MD) error {
	return s.ServerTransportStream.SetTrailer(withoutAnswerMD(md))
}

func withoutAnswerMD(md metadata.MD) metadata.MD {
	for k := range md {
		if strings.EqualFold(k, HeaderAnswer) {
			md = md.Copy()
			for k := range md {
				if strings.EqualFold(k, HeaderAnswer) {
					delete(md, k)
				}
			}
			return md
		}
	}
	return md
}

// guardedStream is a stream with an admission's context.
type guardedStream struct {
	grpc.ServerStream
	ctx context.Context
	// stop is closed when the handler has returned; nil without an admission.
	stop  chan struct{}
	grace time.Duration
	// waits: the client may keep RecvMsg waiting for as long as it likes.
	waits bool

	receive, send *sideCall // made at the first use, by RecvMsg and SendMsg alone
}

func (s *guardedStream) Context() context.Context { return s.ctx }

func (s *guardedStream) SetHeader(md metadata.MD) error {
	return s.ServerStream.SetHeader(withoutAnswerMD(md))
}

func (s *guardedStream) SendHeader(md metadata.MD) error {
	return s.ServerStream.SendHeader(withoutAnswerMD(md))
}

func (s *guardedStream) SetTrailer(md metadata.MD) { s.ServerStream.SetTrailer(withoutAnswerMD(md)) }

// RecvMsg returns when there is a message, or when the gate closes.
func (s *guardedStream) RecvMsg(m any) error {
	if !s.waits {
		return s.ServerStream.RecvMsg(m) // there is one message, and it is there
	}
	if s.receive == nil {
		s.receive = newSideCall(s.stop, s.ServerStream.RecvMsg)
	}
	return s.receive.do(s, m, 0)
}

// SendMsg returns when the message is on its way. Once the gate has closed, a
// client that takes nothing keeps it waiting for the grace of [WithStreamGrace].
func (s *guardedStream) SendMsg(m any) error {
	if s.stop == nil {
		return s.ServerStream.SendMsg(m)
	}
	if s.send == nil {
		s.send = newSideCall(s.stop, s.ServerStream.SendMsg)
	}
	return s.send.do(s, m, s.grace)
}

func (s *guardedStream) ended() error {
	if closed := AnswerOf(context.Cause(s.ctx)); closed != nil && errors.Is(closed, ErrGateClosed) {
		return answerStatus(closed, false).Err()
	}
	return status.Error(codes.Canceled, "the stream has ended")
}

// sideCall makes the calls of one direction of a stream in a goroutine of their
// own, where one that blocks can be left behind: it returns when the call has
// ended, which it does once the handler has.
type sideCall struct {
	in   chan any
	out  chan error // has room for the result of a call that was left behind
	left bool       // a call was left behind; used by the caller alone
}

func newSideCall(stop <-chan struct{}, call func(any) error) *sideCall {
	c := &sideCall{in: make(chan any), out: make(chan error, 1)}
	go func() {
		for {
			select {
			case m := <-c.in:
				c.out <- call(m)
			case <-stop:
				return
			}
		}
	}()
	return c
}

// do returns the call's result. When the stream's context ends it waits for that
// no longer than grace.
func (c *sideCall) do(s *guardedStream, m any, grace time.Duration) error {
	if c.left || grace == 0 && s.ctx.Err() != nil {
		return s.ended()
	}
	select {
	case c.in <- m: // the goroutine is idle
	case <-s.stop:
		return s.ended()
	}
	select {
	case err := <-c.out:
		return err
	case <-s.ctx.Done():
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case err := <-c.out:
		return err
	case <-t.C:
		c.left = true
		return s.ended()
	}
}
