// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// serve serves the source as one process of its cell.
func (w *world) serve(src transfer.Source, m cells.MoveRef) *httptest.Server {
	h := transfer.Handler(src, func(r *http.Request, got cells.MoveRef) error {
		if got.Tenant != m.Tenant || got.ID != "" && got != m {
			return errors.New("not that move")
		}
		return nil
	})
	s := httptest.NewServer(h)
	w.tb.Cleanup(func() {
		s.Close()
		_ = h.(io.Closer).Close()
	})
	return s
}

func client(tb TB) *http.Client {
	t := &http.Transport{}
	tb.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t}
}

func testRemote(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(2500 / Scale)
	w.write(func(x Exec) error { return setBig(x, w.tenant, "k00003", 3) })
	l := w.hammer(2, 30)
	m := w.move("m1")
	s := w.serve(w.a.Source(), m)
	src := transfer.NewRemoteSource(client(tb), []string{s.URL})
	v := h.agent(tb, w.b)
	_, err := v.Prepare(tb.Context(), m, src, nil)
	w.must(err)
	l.reach(30)
	_, err = w.cut(v, m, src)
	w.must(err)
	l.end()
	l.kept(w.same())
	w.commit(m)
	w.gone(w.a)

	// What is not authorised, or malformed, is refused.
	other := m
	other.Tenant = bystanders[0]
	_, err = src.Survey(tb.Context(), other.Tenant)
	if err == nil {
		tb.Errorf("another tenant was surveyed")
	}
	if _, err = src.Begin(tb.Context(), other); err == nil {
		tb.Errorf("another tenant's rows were handed out")
	}
	_, err = src.Begin(tb.Context(), cells.MoveRef{ID: "x y", Tenant: m.Tenant, Source: "a", Target: "b"})
	w.wantErr("malformed move", err, cells.ErrInvalid)
	_, err = transfer.NewRemoteSource(client(tb), nil).Head(tb.Context(), m)
	w.wantErr("no process", err, cells.ErrUnavailable)
}

// dying is a source that dies, as a process does, after a number of batches.
type dying struct {
	transfer.Source
	die   func()
	after int
	mu    sync.Mutex // guards left
	left  int
}

func (d *dying) batch(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left--; d.left == 0 {
		d.die()
		<-ctx.Done()
	}
}

func (d *dying) View(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	v, err := d.Source.View(ctx, m)
	if err != nil {
		return nil, err
	}
	return &dyingView{v, d}, nil
}

func (d *dying) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	return d.Source.Changes(ctx, m, from, func(b transfer.Batch) error { d.batch(ctx); return yield(b) })
}

type dyingView struct {
	transfer.View
	d *dying
}

func (v *dyingView) Rows(ctx context.Context, table string, after []byte, yield func(transfer.Batch) error) error {
	return v.View.Rows(ctx, table, after, func(b transfer.Batch) error { v.d.batch(ctx); return yield(b) })
}

// testRemoteLost lets the source's processes die one after the other, at each batch
// of a copy and of the changes behind it.
func testRemoteLost(tb TB, h Harness) {
	w := newWorld(tb, h)
	w.fill(3000 / Scale)
	l := w.hammer(1, 20)
	m := w.move("m1")
	var urls []string
	for n := range 4 {
		d := &dying{Source: w.a.Source(), left: 1 + n}
		s := w.serve(d, m)
		d.die = sync.OnceFunc(func() {
			_ = s.Listener.Close()
			s.CloseClientConnections()
		})
		urls = append(urls, s.URL)
	}
	urls = append(urls, "http://127.0.0.1:1", w.serve(w.a.Source(), m).URL)
	src := transfer.NewRemoteSource(client(tb), urls)
	ctx, cancel := context.WithTimeout(tb.Context(), 60*time.Second)
	defer cancel()
	v := h.agent(tb, w.b)
	_, err := v.Prepare(ctx, m, src, nil)
	w.must(err)
	l.reach(20)
	w.close(m)
	l.end()
	_, err = v.Finish(ctx, m, src, nil)
	w.must(err)
	l.kept(w.same())
	w.bystandersUntouched()
}
