// SPDX-License-Identifier: Apache-2.0

// Command http-stateless is a service that keeps nothing: it says where it runs. A
// move of its tenants changes the route and nothing else: no fencer, no data mover.
// Requests that are under way end where they began, new ones wait for a moment and
// go to the other cell.
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/services/examples/local"
)

// service is what a cell runs. It knows of cells only what it wants to.
func service(*local.Cell) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /where", func(w http.ResponseWriter, r *http.Request) {
		a, _ := cells.AdmissionFromContext(r.Context()) // put there by cells.HTTPMiddleware
		fmt.Fprintf(w, "%s is served by %s at epoch %d\n", a.Tenant, a.Cell, a.Epoch)
	})
	return mux
}

func run(ctx context.Context, out io.Writer) error {
	f, err := local.Start(ctx, local.Options{HTTP: service})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Place(ctx, "acme", "cell-a"); err != nil {
		return err
	}
	ask := func() error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.URL+"/where", nil)
		if err != nil {
			return err
		}
		req.Header.Set("X-Tenant", "acme")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, err = io.Copy(out, resp.Body)
		return err
	}
	for _, to := range []cells.CellID{"cell-b", "cell-a"} {
		if err := ask(); err != nil {
			return err
		}
		if _, err := f.Move(ctx, "acme", to); err != nil {
			return err
		}
	}
	return ask()
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
