// SPDX-License-Identifier: Apache-2.0

// Command idp serves an OpenID Provider for trials: idp --listen ADDR --config FILE,
// where FILE is a JSON object of package idp's Options.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/cloister-dev/cloister/services/idp"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8090", "address of the provider")
	config := flag.String("config", "", "file with the issuer, the client and the users, as JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *listen, *config); err != nil {
		fmt.Fprintln(os.Stderr, "idp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen, config string) error {
	b, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	o := idp.Options{Log: slog.Default()}
	if err := json.Unmarshal(b, &o); err != nil {
		return fmt.Errorf("%s: %w", config, err)
	}
	p, err := idp.New(o)
	if err != nil {
		return err
	}
	srv := &http.Server{Addr: listen, Handler: p.Handler(), ReadHeaderTimeout: 10 * time.Second}
	end := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		_ = srv.Shutdown(ctx)
	})
	defer end()
	if err := srv.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
