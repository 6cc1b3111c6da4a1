// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

const (
	methodUnary   = "/edgebench.Echo/Unary"
	methodStream  = "/edgebench.Echo/Stream"
	unaryBytes    = 100
	chunkBytes    = 32 << 10
	streamBytes   = 8 << 20 // of one stream
	grpcConns     = 8       // connections of the load, which share its calls
	streamsAtOnce = 8
)

// rawCodec passes bytes, so that no time goes into messages.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("%T is not bytes", v)
	}
	return *b, nil
}

func (rawCodec) Unmarshal(data []byte, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("%T is not bytes", v)
	}
	*b = append((*b)[:0], data...)
	return nil
}

// runGRPCBackend is the backend of gRPC: it gives back what it gets, or sends as many
// bytes as it is asked for.
func runGRPCBackend(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("grpc-backend", flag.ContinueOnError)
	ports := fs.String("ports", "", "ports of 127.0.0.1 to answer on, with commas")
	if err := fs.Parse(args); err != nil {
		return err
	}
	s := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.MaxConcurrentStreams(1000))
	s.RegisterService(&grpc.ServiceDesc{ServiceName: "edgebench.Echo", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, _ context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var in []byte
			if err := dec(&in); err != nil {
				return nil, err
			}
			return &in, nil
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, Handler: func(_ any, ss grpc.ServerStream) error {
			var in []byte
			if err := ss.RecvMsg(&in); err != nil {
				return err
			}
			if len(in) != 8 {
				return errors.New("how many bytes?")
			}
			chunk := make([]byte, chunkBytes)
			for left := binary.BigEndian.Uint64(in); left > 0; left -= min(left, chunkBytes) {
				out := chunk[:min(left, chunkBytes)]
				if err := ss.SendMsg(&out); err != nil {
					return err
				}
			}
			return nil
		}}},
	}, nil)
	failed := make(chan error, cellCount)
	for port := range strings.SplitSeq(*ports, ",") {
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			return err
		}
		go func() { failed <- s.Serve(l) }()
	}
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		s.Stop()
		return nil
	}
}

func (b *bench) grpcCases() []testCase {
	connect := func(stream bool) func(context.Context, *peer) (runner, error) {
		return func(ctx context.Context, p *peer) (runner, error) {
			l := &grpcLoad{ctx: ctx, atOnce: b.opt.conns, stream: stream}
			if stream {
				l.atOnce = min(l.atOnce, streamsAtOnce)
			}
			for range grpcConns {
				c, err := grpc.NewClient("passthrough:///127.0.0.1:"+strconv.Itoa(p.port), grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})), grpc.WithInitialWindowSize(1<<20), grpc.WithInitialConnWindowSize(2<<20))
				if err != nil {
					l.close()
					return nil, err
				}
				l.conns = append(l.conns, c)
			}
			return l, nil
		}
	}
	return []testCase{
		{name: "grpc-unary", share: 1, connect: connect(false)},
		{name: "grpc-stream-8m", share: 0.004, bytes: streamBytes, connect: connect(true)},
	}
}

// grpcLoad calls a proxy.
type grpcLoad struct {
	ctx    context.Context
	conns  []*grpc.ClientConn
	atOnce int
	stream bool
}

func (l *grpcLoad) close() {
	for _, c := range l.conns {
		_ = c.Close()
	}
}

func (l *grpcLoad) run(n int) (*loadResult, error) {
	in, outs := make([]byte, unaryBytes), make([][]byte, l.atOnce)
	for i := range outs {
		outs[i] = make([]byte, 0, chunkBytes)
	}
	return timed(l.atOnce, n, func(i, k int) error {
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(l.ctx, strings.ToLower(tenantHeader), tenantName(k%tenants)), loadStall)
		defer cancel()
		if l.stream {
			return pull(ctx, l.conns[i%len(l.conns)], &outs[i])
		}
		return echo(ctx, l.conns[i%len(l.conns)], in, &outs[i])
	})
}

func echo(ctx context.Context, c *grpc.ClientConn, in []byte, out *[]byte) error {
	if err := c.Invoke(ctx, methodUnary, &in, out); err != nil {
		return err
	}
	if len(*out) != len(in) {
		return fmt.Errorf("an answer of %d bytes, want %d", len(*out), len(in))
	}
	return nil
}

// pull reads one stream to its end.
func pull(ctx context.Context, c *grpc.ClientConn, out *[]byte) error {
	s, err := c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, methodStream)
	if err != nil {
		return err
	}
	ask := binary.BigEndian.AppendUint64(nil, streamBytes)
	if err := s.SendMsg(&ask); err != nil {
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	got := 0
	for {
		err := s.RecvMsg(out)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		got += len(*out)
	}
	if got != streamBytes {
		return fmt.Errorf("a stream of %d bytes, want %d", got, streamBytes)
	}
	return nil
}
