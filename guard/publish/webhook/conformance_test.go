// SPDX-License-Identifier: Apache-2.0

package webhook_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/publish/publishertest"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
)

// receiver is a service that takes webhooks, behind a link.
type receiver struct {
	addr string
	srv  *http.Server
	link *publishertest.Link

	mu  sync.Mutex // guards log
	log []guard.Event
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err == nil {
		err = webhook.Verify([]webhook.Key{secret}, req.Header, body, time.Now(), 5*time.Minute)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e, err := webhook.Decode(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	r.log = append(r.log, e)
	r.mu.Unlock()
}

func (r *receiver) Start() error {
	ln, err := net.Listen("tcp", r.addr)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: r}
	r.addr, r.srv = ln.Addr().String(), srv
	go func() { _ = srv.Serve(ln) }()
	return nil
}

func (r *receiver) Stop() error { return r.srv.Close() }
func (r *receiver) Close() {
	r.link.Close()
	_ = r.srv.Close()
}
func (r *receiver) Link() *publishertest.Link { return r.link }
func (r *receiver) Publisher(context.Context) (publishertest.Publisher, error) {
	return webhook.New(webhook.Config{URL: "http://" + r.link.Addr(), Keys: []webhook.Key{secret}, Settle: time.Second})
}

func (r *receiver) Log(_ context.Context, tenant cells.TenantID) ([]guard.Event, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.log), func(e guard.Event) bool { return e.Tenant != tenant }), nil
}

func TestConformance(t *testing.T) {
	publishertest.Run(guardtest.Wrap(t), publishertest.Harness{Open: func(context.Context) (publishertest.Broker, error) {
		r := &receiver{addr: "127.0.0.1:0"}
		if err := r.Start(); err != nil {
			return nil, err
		}
		var err error
		r.link, err = publishertest.NewLink(r.addr)
		return r, err
	}})
}
