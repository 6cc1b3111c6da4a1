// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

const (
	// Rate is how many requests a second a listener takes, Burst how many at once.
	Rate  = 5
	Burst = 10
	// readTimeout bounds the reading of all stores for one answer.
	readTimeout = 5 * time.Second
)

// PortFromEnv returns CELL_PROBE_PORT: 1 to 65535, or 0 when it is not set or 0, and
// there is no listener.
func PortFromEnv() (int, error) {
	s := os.Getenv("CELL_PROBE_PORT")
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%w: CELL_PROBE_PORT is %.20q; want 0 to 65535", cells.ErrInvalid, s)
	}
	return int(n), nil
}

// IDHandler answers GET at [Path] with the deployment id, from memory, and leaves
// every other path to next. It stands before whatever refuses requests: gates,
// credentials, hosts and limits.
func IDHandler(d stores.DeploymentID, next http.Handler) http.Handler {
	body, err := json.Marshal(id{Deployment: d})
	if err != nil {
		panic(err) // a string
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != Path {
			next.ServeHTTP(w, r)
			return
		}
		if allowed(w, r) {
			write(w, body)
		}
	})
}

// Config is what a listener needs.
type Config struct {
	// Port is where to listen, on every address of the host; 1 to 65535. Listener, if
	// set, is listened to instead; the probe closes it.
	Port     int
	Listener net.Listener
	// Stores are the process's stores; the authority is Postgres. The probe only reads
	// them, and they outlive it.
	Stores *stores.Set
	// Deployment is the id that the process verified when it started.
	Deployment stores.DeploymentID
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Listener is a probe listener at work. It starts with [Start] and ends with Close.
type Listener struct {
	addr net.Addr
	srv  *http.Server
	done chan struct{} // closed when Serve has returned
	err  error         // of Serve; read after done
	once sync.Once
}

// Start listens and answers until Close. [cells.ErrInvalid] for a configuration
// without stores, whose authority is not Postgres, or without an id.
func Start(cfg Config) (*Listener, error) {
	switch {
	case cfg.Stores == nil:
		return nil, fmt.Errorf("%w: a probe listener needs the process's stores", cells.ErrInvalid)
	case cfg.Stores.Authority().Kind() != stores.Postgres:
		return nil, fmt.Errorf("%w: a probe listener needs Postgres as the authority, not %s", cells.ErrInvalid, cfg.Stores.Authority().Kind())
	case cfg.Listener == nil && (cfg.Port < 1 || cfg.Port > 65535):
		return nil, fmt.Errorf("%w: the probe's port is %d; want 1 to 65535", cells.ErrInvalid, cfg.Port)
	}
	if err := cfg.Deployment.Validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	ln := cfg.Listener
	if ln == nil {
		var err error
		if ln, err = net.Listen("tcp", ":"+strconv.Itoa(cfg.Port)); err != nil {
			return nil, fmt.Errorf("probe listener: %w", err)
		}
	}
	l := &Listener{addr: ln.Addr(), done: make(chan struct{}), srv: &http.Server{
		Handler: newHandler(cfg), ReadHeaderTimeout: 5 * time.Second, WriteTimeout: readTimeout + 5*time.Second, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug)}}
	// One request a connection: an address that leads to several processes shall lead
	// to another each time.
	l.srv.SetKeepAlivesEnabled(false)
	go func() {
		defer close(l.done)
		if err := l.srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			l.err = err
			cfg.Logger.Error("probe listener: ended", "err", err)
		}
	}()
	cfg.Logger.Info("probe listener: answering", "listen", l.addr.String(), "path", Path)
	return l, nil
}

// Addr returns the address that is listened at.
func (l *Listener) Addr() net.Addr { return l.addr }

// Close ends the listener and returns what ended it before, if anything did. It may
// be called again.
func (l *Listener) Close() error {
	l.once.Do(func() { _ = l.srv.Close() })
	<-l.done
	return l.err
}

// newHandler answers in full, within the rate.
func newHandler(cfg Config) http.Handler {
	limit := rate.NewLimiter(Rate, Burst)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Before anything else: requests that are refused count as well.
		if res := limit.Reserve(); res.Delay() > 0 {
			wait := res.Delay()
			res.Cancel()
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: wait,
				Detail: "the probe listener of each process takes " + strconv.Itoa(Rate) + " requests a second"})
			return
		}
		if r.URL.Path != Path {
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeNotServed, Detail: "the probe listener has " + Path + " and nothing else"})
			return
		}
		if !allowed(w, r) {
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
		defer cancel()
		a, err := read(ctx, cfg.Stores, cfg.Deployment)
		if err == nil {
			var body []byte
			if body, err = json.Marshal(a); err == nil {
				write(w, body)
				return
			}
		}
		cfg.Logger.Warn("probe listener: a store cannot be read", "err", err)
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "a store of this process cannot be read; its log says which"})
	})
}

// read asks every store now.
func read(ctx context.Context, set *stores.Set, started stores.DeploymentID) (Answer, error) {
	d, err := set.Deployment(ctx)
	if err != nil {
		return Answer{}, err
	}
	if d != started {
		return Answer{}, fmt.Errorf("%w: the stores carry %s; this process started with %s", stores.ErrMismatch, d, started)
	}
	n, err := set.ReadNonces(ctx)
	if err != nil {
		return Answer{}, err
	}
	at := set.Location()
	return Answer{Deployment: d, Bucket: at.Bucket, Prefix: at.Prefix, Stores: set.Kinds(), Nonces: n}, nil
}

// allowed answers a request with another method.
func allowed(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodGet {
		return true
	}
	w.Header().Set("Allow", http.MethodGet)
	http.Error(w, "only GET", http.StatusMethodNotAllowed)
	return false
}

func write(w http.ResponseWriter, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(body)
}
