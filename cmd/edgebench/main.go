// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "edgebench:", err)
		os.Exit(1)
	}
}

// run is the command without the process around it.
func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("which one: http, grpc, tls (or backend, grpc-backend, edge, reverseproxy)")
	}
	switch name, rest := args[0], args[1:]; name {
	case "http", "grpc", "tls":
		return measure(ctx, name, rest, out)
	case "backend":
		return runBackend(ctx, rest)
	case "grpc-backend":
		return runGRPCBackend(ctx, rest)
	case "edge":
		return runEdge(ctx, rest)
	case "reverseproxy":
		return runReverseProxy(ctx, rest)
	default:
		return fmt.Errorf("%q is no command", name)
	}
}
