// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/cloister-dev/cloister/cells"
)

// GRPC says how a service's calls are checked.
type GRPC struct {
	// Classify sorts full methods ("/package.Service/Method"); nil takes every one as
	// Checked.
	Classify func(method string) Class
	// Resolve is HTTP.Resolve for a call: the context has its metadata, and req is a
	// unary call's message, nil for a stream.
	Resolve func(ctx context.Context, method string, req any) (cells.TenantID, Principal, error)
}

// UnaryServerInterceptor checks each call as [Process.Handler] does each request:
// the same decision, with statuses of [cells.AnswerStatus].
func (p *Process) UnaryServerInterceptor(g GRPC) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		ctx, err := p.call(ctx, g, info.FullMethod, req)
		if err != nil {
			return nil, cells.AnswerStatus(answer(err)).Err()
		}
		return handler(ctx, req)
	}
}

// StreamServerInterceptor is [Process.UnaryServerInterceptor] for streams; they are
// checked when they begin.
func (p *Process) StreamServerInterceptor(g GRPC) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx, err := p.call(ss.Context(), g, info.FullMethod, nil)
		if err != nil {
			return cells.AnswerStatus(answer(err)).Err()
		}
		return handler(srv, &checkedStream{ss, ctx})
	}
}

type checkedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *checkedStream) Context() context.Context { return s.ctx }

func (p *Process) call(ctx context.Context, g GRPC, method string, req any) (context.Context, error) {
	class := Checked
	if g.Classify != nil {
		class = g.Classify(method)
	}
	if class == Exempt {
		return ctx, nil
	}
	if a := p.Gate(ctx); a != nil {
		return nil, a
	}
	if class == Free {
		return ctx, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	return p.check(ctx, md.Get(cells.HeaderTenant), func() (cells.TenantID, Principal, error) {
		if g.Resolve == nil {
			return "", Principal{}, &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "nothing verifies credentials here"}
		}
		return g.Resolve(ctx, method, req)
	})
}
