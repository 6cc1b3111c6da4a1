// SPDX-License-Identifier: Apache-2.0

// Command connect is a Connect service in two cells. Connect speaks over net/http,
// so that the HTTP middleware of package cells is all that it needs; the same
// handler serves Connect's own protocol, gRPC and gRPC-Web.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/services/examples/local"
)

// What is generated from a .proto file otherwise.
const (
	greetProcedure = "/example.Greeter/Greet"
	countProcedure = "/example.Greeter/Count"
)

type (
	text     = wrapperspb.StringValue
	textSend = connect.ServerStream[text]
)

func greet(ctx context.Context, req *connect.Request[text]) (*connect.Response[text], error) {
	a, _ := cells.AdmissionFromContext(ctx)
	return connect.NewResponse(wrapperspb.String(fmt.Sprintf("hello %s, from %s", req.Msg.Value, a.Cell))), nil
}

// count sends numbers until the client has enough. A stream says so to the gate:
// its context ends when the tenant moves, and the client gets UNAVAILABLE.
func count(ctx context.Context, _ *connect.Request[text], s *textSend) error {
	ctx = cells.MarkStream(ctx)
	a, _ := cells.AdmissionFromContext(ctx)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for n := 1; ; n++ {
		if err := s.Send(wrapperspb.String(fmt.Sprintf("%d from %s", n, a.Cell))); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), cells.ErrGateClosed) {
				return connect.NewError(connect.CodeUnavailable, errors.New("the tenant moves, connect again"))
			}
			return ctx.Err()
		}
	}
}

func service(*local.Cell) http.Handler {
	mux := http.NewServeMux()
	mux.Handle(greetProcedure, connect.NewUnaryHandler(greetProcedure, greet))
	mux.Handle(countProcedure, connect.NewServerStreamHandler(countProcedure, count))
	return mux
}

func forTenant[T any](req *connect.Request[T]) *connect.Request[T] {
	req.Header().Set("X-Tenant", "acme")
	return req
}

// run calls the service by one of its protocols.
func run(ctx context.Context, out io.Writer, opts ...connect.ClientOption) error {
	f, err := local.Start(ctx, local.Options{HTTP: service})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Place(ctx, "acme", "cell-a"); err != nil {
		return err
	}
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	hc := &http.Client{Transport: transport}
	greeter := connect.NewClient[text, text](hc, f.URL+greetProcedure, opts...)
	counter := connect.NewClient[text, text](hc, f.URL+countProcedure, opts...)
	for _, to := range []cells.CellID{"cell-b", "cell-a"} {
		resp, err := greeter.CallUnary(ctx, forTenant(connect.NewRequest(wrapperspb.String("ann"))))
		if err != nil {
			return err
		}
		fmt.Fprintln(out, "call:  ", resp.Msg.Value)
		s, err := counter.CallServerStream(ctx, forTenant(connect.NewRequest(wrapperspb.String(""))))
		if err != nil {
			return err
		}
		if !s.Receive() {
			return errors.Join(errors.New("the stream has ended at once"), s.Err())
		}
		fmt.Fprintln(out, "stream:", s.Msg().Value)
		moved := make(chan error, 1)
		go func() { _, err := f.Move(ctx, "acme", to); moved <- err }()
		for s.Receive() {
		}
		fmt.Fprintln(out, "stream: ended,", connect.CodeOf(s.Err()))
		if err := errors.Join(s.Close(), <-moved); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
