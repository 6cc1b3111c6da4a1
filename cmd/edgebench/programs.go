// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/topology"
)

// program is what the two Go proxies are told.
type program struct {
	addr, tlsAddr, cert, key string
	cells                    []string // addresses, by number
	log                      string
	cpuprofile               string
	h2                       bool
}

func parseProgram(name string, args []string) (*program, error) {
	p := &program{}
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.StringVar(&p.addr, "addr", "", "address to listen on")
	fs.StringVar(&p.tlsAddr, "tls-addr", "", "address to listen on with TLS")
	fs.StringVar(&p.cert, "cert", "", "certificate for --tls-addr")
	fs.StringVar(&p.key, "key", "", "its key")
	list := fs.String("cells", "", "addresses of the cells, with commas")
	fs.StringVar(&p.log, "log", os.DevNull, "file of the access log")
	fs.StringVar(&p.cpuprofile, "cpuprofile", "", "write a CPU profile of the whole life of the process to this file")
	fs.BoolVar(&p.h2, "h2", false, "speak HTTP/2 with the cells")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if p.cells = strings.Split(*list, ","); len(p.cells) != cellCount {
		return nil, fmt.Errorf("--cells has %d addresses, want %d", len(p.cells), cellCount)
	}
	return p, nil
}

// profile records until the returned function is called.
func (p *program) profile() (stop func() error, err error) {
	if p.cpuprofile == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(p.cpuprofile)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}

// logFile is a log that is written when 64 KiB have gathered or a second has passed, as
// nginx's is with buffer=64k flush=1s.
type logFile struct {
	mu sync.Mutex // guards what follows
	w  *bufio.Writer
	f  *os.File
}

func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// openLog opens the log; it is flushed once more and closed when ctx ends.
func openLog(ctx context.Context, name string) (*logFile, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	l := &logFile{w: bufio.NewWriterSize(f, 64<<10), f: f}
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for ctx.Err() == nil {
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
			l.mu.Lock()
			_ = l.w.Flush()
			l.mu.Unlock()
		}
		_ = f.Close()
	}()
	return l, nil
}

// runEdge is the edge, with a view of the routes of a table in memory.
func runEdge(ctx context.Context, args []string) error {
	p, err := parseProgram("edge", args)
	if err != nil {
		return err
	}
	// The log outlives the server, which writes to it while it drains.
	logging, endLog := context.WithCancel(context.WithoutCancel(ctx))
	defer endLog()
	file, err := openLog(logging, p.log)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(file, nil))
	table := cells.NewMemTable()
	defer table.Close()
	ctrl := cells.NewMoveController(table, cells.WithControllerLogger(slog.New(slog.DiscardHandler)))
	for i := range tenants {
		if err := ctrl.Assign(ctx, cells.TenantID(tenantName(i)), cells.CellID(cellName(cellOf(i))), "edgebench"); err != nil {
			return err
		}
	}
	view := cells.NewRouter(table, cells.WithRouterLogger(log))
	if err := view.Start(ctx); err != nil {
		return err
	}
	defer view.Close()
	topo := topology.NewStatic(nil)
	for i, addr := range p.cells {
		topo.Set(cells.CellID(cellName(i)), "http://"+addr)
	}
	cfg := edge.Config{
		Addr: p.addr, AdminAddr: "127.0.0.1:0", Extractors: []extract.Spec{{Header: tenantHeader}},
		AdmissionKey: []byte("edgebench edgebench edgebench 32"), AccessLog: 1, Log: log, IdleTimeout: time.Hour, FastPath: true,
	}
	if p.tlsAddr != "" {
		cert, err := tls.LoadX509KeyPair(p.cert, p.key)
		if err != nil {
			return err
		}
		cfg.TLSAddr, cfg.TLS = p.tlsAddr, serverTLS(cert)
	}
	s, err := edge.New(cfg, view, topo)
	if err != nil {
		return err
	}
	stop, err := p.profile()
	if err != nil {
		return err
	}
	return errors.Join(s.Run(ctx), stop())
}

// serverTLS is the same for all: TLS 1.3 without resumption.
func serverTLS(cert tls.Certificate) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, SessionTicketsDisabled: true, CurvePreferences: []tls.CurveID{tls.X25519}}
}

// runReverseProxy is httputil.ReverseProxy, tuned: a pool of idle connections that is
// never too small, lent buffers, no compression, and only the headers that are needed.
func runReverseProxy(ctx context.Context, args []string) error {
	p, err := parseProgram("reverseproxy", args)
	if err != nil {
		return err
	}
	file, err := openLog(ctx, p.log)
	if err != nil {
		return err
	}
	routes := make(map[string]*url.URL, tenants)
	for i := range tenants {
		routes[tenantName(i)] = &url.URL{Scheme: "http", Host: p.cells[cellOf(i)]}
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!p.h2)
	protocols.SetUnencryptedHTTP2(p.h2)
	tr := &http.Transport{MaxIdleConnsPerHost: 4096, IdleConnTimeout: time.Hour, DisableCompression: true, Protocols: protocols}
	flush := time.Duration(0)
	if p.h2 {
		flush = -1 // messages of a stream must not wait
	}
	proxy := &httputil.ReverseProxy{
		Transport: tr, BufferPool: &buffers{}, FlushInterval: flush,
		Rewrite: func(pr *httputil.ProxyRequest) {
			tenant := pr.In.Header.Get(tenantHeader)
			if to := routes[tenant]; to != nil {
				pr.Out.URL.Scheme, pr.Out.URL.Host, pr.Out.Host = to.Scheme, to.Host, pr.In.Host
			}
			pr.SetXForwarded()
			pr.Out.Header["Cell-Tenant"] = []string{tenant}
			pr.Out.Header["Cell-Epoch"] = []string{"1"}
			pr.Out.Header["Cell-Admission"] = []string{admission}
		},
	}
	log := slog.New(slog.NewTextHandler(file, nil))
	server := &http.Server{Handler: logged(proxy, log), Protocols: new(http.Protocols), ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetHTTP2(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		return err
	}
	stop, err := p.profile()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	failed := make(chan error, 2)
	go func() { failed <- server.Serve(l) }()
	if p.tlsAddr != "" {
		cert, err := tls.LoadX509KeyPair(p.cert, p.key)
		if err != nil {
			return err
		}
		server.TLSConfig = serverTLS(cert)
		secure, err := net.Listen("tcp", p.tlsAddr)
		if err != nil {
			return err
		}
		go func() { failed <- server.ServeTLS(secure, "", "") }()
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(err, stop())
	}
	return stop()
}

// admission is as long as the token that the edge makes for each tenant and cell.
const admission = "1.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"

type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if v := b.pool.Get(); v != nil {
		return *v.(*[]byte)
	}
	return make([]byte, 32<<10)
}
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

// status notes what is answered.
type status struct {
	http.ResponseWriter
	code  int
	bytes int
}

func (s *status) Unwrap() http.ResponseWriter { return s.ResponseWriter }

func (s *status) WriteHeader(code int) {
	s.code = code
	s.ResponseWriter.WriteHeader(code)
}

func (s *status) Write(p []byte) (int, error) {
	n, err := s.ResponseWriter.Write(p)
	s.bytes += n
	return n, err
}

// logged writes a line for each request.
func logged(h http.Handler, log *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		s := &status{ResponseWriter: w, code: http.StatusOK}
		h.ServeHTTP(s, r)
		log.LogAttrs(r.Context(), slog.LevelInfo, "request", slog.String("method", r.Method), slog.String("path", r.URL.Path),
			slog.String("tenant", r.Header.Get(tenantHeader)), slog.Int("status", s.code), slog.Int("bytes", s.bytes), slog.Duration("took", time.Since(start)))
	})
}
