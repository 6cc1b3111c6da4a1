// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
)

// greeter is the service; what is below it stands for generated code.
type greeter struct{}

// Greet answers one call. The interceptor has put the admission into ctx.
func (greeter) Greet(ctx context.Context, name *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
	a, _ := cells.AdmissionFromContext(ctx)
	return wrapperspb.String(fmt.Sprintf("hello %s, from %s", name.Value, a.Cell)), nil
}

// Chat answers each message until the client has no more. When the tenant moves,
// Recv returns an error and the client gets the platform's answer as the status: to
// return what Recv returned is all that it takes.
func (greeter) Chat(s grpc.BidiStreamingServer[wrapperspb.StringValue, wrapperspb.StringValue]) error {
	for {
		in, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		out, err := greeter{}.Greet(s.Context(), in)
		if err != nil {
			return err
		}
		if err := s.Send(out); err != nil {
			return err
		}
	}
}

// greeterServer is what a server has to be.
type greeterServer interface {
	Greet(context.Context, *wrapperspb.StringValue) (*wrapperspb.StringValue, error)
	Chat(grpc.BidiStreamingServer[wrapperspb.StringValue, wrapperspb.StringValue]) error
}

const (
	greetMethod = "/example.Greeter/Greet"
	chatMethod  = "/example.Greeter/Chat"
)

var greeterDesc = grpc.ServiceDesc{
	ServiceName: "example.Greeter",
	HandlerType: (*greeterServer)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Greet", Handler: func(srv any, ctx context.Context, dec func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.StringValue)
		if err := dec(in); err != nil {
			return nil, err
		}
		call := func(ctx context.Context, req any) (any, error) {
			return srv.(greeterServer).Greet(ctx, req.(*wrapperspb.StringValue))
		}
		if intercept == nil {
			return call(ctx, in)
		}
		return intercept(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: greetMethod}, call)
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(srv any, ss grpc.ServerStream) error {
		return srv.(greeterServer).Chat(&grpc.GenericServerStream[wrapperspb.StringValue, wrapperspb.StringValue]{ServerStream: ss})
	}}},
}
