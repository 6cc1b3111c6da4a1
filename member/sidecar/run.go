// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cloister-dev/cloister/member"
)

// Run runs the sidecar until ctx ends, then retires: edges send nothing more, what
// runs ends, the process leaves the cell, the service's process is ended. It returns
// nil then, and an error when it could not start or the service's process has
// ended by itself. Errors of the configuration wrap cells.ErrInvalid.
func Run(ctx context.Context, cfg Config) (err error) {
	if err := cfg.normalize(); err != nil {
		return err
	}
	ln := cfg.Listener
	if ln == nil {
		if ln, err = net.Listen("tcp", cfg.Listen); err != nil {
			return fmt.Errorf("sidecar: %w", err)
		}
	}
	defer ln.Close()
	target, service, err := startService(&cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if service != nil {
		defer service.stop()
		go func() {
			<-service.done
			cancel(service.ended())
		}()
	}
	// What the service's end cuts off says so.
	defer func() {
		if service == nil {
			return
		}
		select {
		case <-service.done:
			err = errors.Join(service.ended(), err)
		default:
		}
	}()
	p := newProxy(&cfg, target)
	defer p.close()
	metrics := prometheus.NewRegistry()
	opts := []member.Option{member.WithLogger(cfg.Log), member.WithMetrics(metrics), member.WithCheck(p.check)}
	if cfg.Engine != "" {
		st, oerr := openStore(ctx, &cfg)
		if oerr != nil {
			return oerr
		}
		defer func() { err = errors.Join(err, st.close()) }()
		opts = append(opts, member.WithStore(st.Store))
	}
	m, err := member.Join(ctx, cfg.Member, opts...)
	if err != nil {
		return err
	}
	err = serve(ctx, &cfg, ln, m, p, metrics)
	end, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer done()
	return errors.Join(err, m.Close(end))
}

// startService starts the service if that was asked for, and returns where it is.
func startService(cfg *Config) (*url.URL, *process, error) {
	var port string
	if cfg.Upstream == "" {
		var err error
		if port, err = freePort(); err != nil {
			return nil, nil, fmt.Errorf("sidecar: %w", err)
		}
		cfg.Upstream = "http://" + net.JoinHostPort("127.0.0.1", port)
	}
	target, err := url.Parse(cfg.Upstream)
	if err != nil || len(cfg.Command) == 0 {
		return target, nil, err
	}
	if port == "" {
		port = target.Port()
	}
	service, err := startProcess(cfg.Command, cfg.Member.Cell, port)
	return target, service, err
}

// check asks the service for its health.
func (p *proxy) check(ctx context.Context) error {
	if p.cfg.HealthPath == "" {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.target.Host)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.target.JoinPath(p.cfg.HealthPath).String(), nil)
	if err != nil {
		return err
	}
	t := p.h1
	if p.cfg.HTTP2 {
		t = p.h2
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10)
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s answers %s", p.cfg.HealthPath, resp.Status)
	}
	return nil
}

// serve serves until ctx ends.
func serve(ctx context.Context, cfg *Config, ln net.Listener, m *member.Member, p *proxy, reg *prometheus.Registry) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: m.Handler(p), Protocols: protocols, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
	failed := make(chan error, 2)
	var admin *http.Server
	if cfg.AdminListen != "" {
		al, err := net.Listen("tcp", cfg.AdminListen)
		if err != nil {
			return fmt.Errorf("sidecar: %w", err)
		}
		mux := http.NewServeMux()
		mux.Handle(member.PathLive, m.HealthHandler())
		mux.Handle(member.PathReady, m.HealthHandler())
		mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
		admin = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
		go func() { failed <- admin.Serve(al) }()
	}
	go func() { failed <- srv.Serve(ln) }()
	cfg.Log.Info("sidecar: serving", "listen", ln.Addr(), "upstream", cfg.Upstream, "cell", cfg.Member.Cell)
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.StopTimeout)
	defer cancel()
	if rerr := m.Retire(end); rerr != nil {
		cfg.Log.Warn("sidecar: not everything has ended", "err", rerr)
	}
	if srv.Shutdown(end) != nil {
		_ = srv.Close() // streams that do not end by themselves
	}
	if admin != nil {
		err = errors.Join(err, admin.Close())
	}
	return err
}
