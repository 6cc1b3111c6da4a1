// SPDX-License-Identifier: Apache-2.0

// Command memory serves the agent-memory service, in a cell or alone.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/cloister-dev/cloister/services/memory/app"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := app.Main(ctx, os.Args[1:], os.Stderr)
	stop()
	os.Exit(code)
}
