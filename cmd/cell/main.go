// SPDX-License-Identifier: Apache-2.0

// Command cell runs a multi-tenant service as a fleet of isolated cells: the edge,
// the directory, a fleet for development, and every operator command.
package main

import (
	"context"
	"os"

	"github.com/cloister-dev/cloister/cmd/cell/cli"
)

// version is set by the linker.
var version = "dev"

func main() {
	os.Exit(cli.Main(context.Background(), version, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
