// SPDX-License-Identifier: Apache-2.0

// Command grpc is a gRPC service in two cells: a call and a stream. Calls that come
// while their tenant moves wait for a moment. A stream is ended with UNAVAILABLE and
// the platform's answer as its detail, and the client opens it again.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/services/examples/local"
)

// server has the two interceptors of package cells; that is all that makes it a
// process of a cell.
func server(c *local.Cell) *grpc.Server {
	s := grpc.NewServer(
		grpc.ChainUnaryInterceptor(cells.UnaryServerInterceptor(c.Router, c.Gates)),
		grpc.ChainStreamInterceptor(cells.StreamServerInterceptor(c.Router, c.Gates)),
	)
	s.RegisterService(&greeterDesc, greeter{})
	return s
}

// client talks to the edge.
type client struct{ conn *grpc.ClientConn }

func dial(url string) (client, error) {
	conn, err := grpc.NewClient(strings.TrimPrefix(url, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	return client{conn}, err
}

func forTenant(ctx context.Context, tenant string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "x-tenant", tenant)
}

func (c client) greet(ctx context.Context, tenant, name string) (string, error) {
	out := new(wrapperspb.StringValue)
	err := c.conn.Invoke(forTenant(ctx, tenant), greetMethod, wrapperspb.String(name), out)
	return out.Value, err
}

type chat = grpc.BidiStreamingClient[wrapperspb.StringValue, wrapperspb.StringValue]

func (c client) chat(ctx context.Context, tenant string) (chat, error) {
	s, err := c.conn.NewStream(forTenant(ctx, tenant), &greeterDesc.Streams[0], chatMethod)
	if err != nil {
		return nil, err
	}
	return &grpc.GenericClientStream[wrapperspb.StringValue, wrapperspb.StringValue]{ClientStream: s}, nil
}

// say sends a message and returns its answer. moved is set when the stream was ended
// because the tenant moves: the message has had no answer, and the client opens a
// new stream.
func say(s chat, name string) (answer string, moved bool, err error) {
	if err := s.Send(wrapperspb.String(name)); err != nil && err != io.EOF {
		return "", false, err
	}
	out, err := s.Recv()
	if err == nil {
		return out.Value, false, nil
	}
	a, ok := cells.AnswerFromStatus(status.Convert(err))
	return "", ok && a.Code == cells.CodeMoving, err
}

func run(ctx context.Context, out io.Writer) error {
	f, err := local.Start(ctx, local.Options{GRPC: server})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Place(ctx, "acme", "cell-a"); err != nil {
		return err
	}
	c, err := dial(f.URL)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	s, err := c.chat(ctx, "acme")
	if err != nil {
		return err
	}
	for i, name := range []string{"ann", "bob", "cy"} {
		greeting, err := c.greet(ctx, "acme", name)
		if err != nil {
			return err
		}
		fmt.Fprintln(out, "call:  ", greeting)
		answer, moved, err := say(s, name)
		if moved {
			fmt.Fprintln(out, "stream: ended,", status.Code(err), "- again")
			if s, err = c.chat(ctx, "acme"); err == nil {
				answer, _, err = say(s, name)
			}
		}
		if err != nil {
			return err
		}
		fmt.Fprintln(out, "stream:", answer)
		if i == 0 {
			if _, err := f.Move(ctx, "acme", "cell-b"); err != nil {
				return err
			}
		}
	}
	return s.CloseSend()
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
