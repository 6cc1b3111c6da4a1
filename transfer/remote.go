// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// NewRemoteSource is the client of [Handler]: the Source of another cell. urls are
// the agents of that cell's processes; any that answers will do, and the next is
// tried when one does not. A view stays with the process that opened it.
func NewRemoteSource(client *http.Client, urls []string) Source {
	c := *client
	c.Timeout = 0 // streams last; every call has its own bound
	s := &remote{client: &c}
	for _, u := range urls {
		s.urls = append(s.urls, strings.TrimSuffix(u, "/"))
	}
	return s
}

type remote struct {
	client *http.Client
	urls   []string
	at     atomic.Int64 // the url that answered last
}

// Bounds of calls: those that may have to wait for other transactions to end, or
// read many rows, and the rest.
const (
	longCall  = 10 * time.Minute
	shortCall = 10 * time.Second
)

// post sends q to one process. The caller closes the body.
func (s *remote) post(ctx context.Context, url, op string, q request) (*http.Response, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	if len(body) > maxBody {
		return nil, fmt.Errorf("%w: request of %d bytes", ErrTooLarge, len(body))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+PathTransfer+op, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(digestHeader, "1")
	if BinaryRows(ctx) {
		req.Header.Set(formHeader, FormBinary)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w: transfer: %w", cells.ErrUnavailable, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	e := &wireError{}
	if resp.Header.Get(errorHeader) == "" || json.Unmarshal(text, e) != nil {
		return nil, fmt.Errorf("%w: transfer: %s answers %s", cells.ErrUnavailable, url, resp.Status)
	}
	return nil, e
}

// call sends q to the process that answered last, or to the next that answers.
func (s *remote) call(ctx context.Context, bound time.Duration, op string, q request, out any) (url string, err error) {
	if len(s.urls) == 0 {
		return "", fmt.Errorf("%w: transfer: no live process of the source cell is known", cells.ErrUnavailable)
	}
	first := s.at.Load()
	for i := range s.urls {
		n := (first + int64(i)) % int64(len(s.urls))
		if url = s.urls[n]; err == nil || ctx.Err() == nil {
			if err = s.unary(ctx, bound, url, op, q, out); err == nil || !retryable(err) {
				s.at.Store(n)
				return url, err
			}
		}
	}
	return url, err
}

func (s *remote) unary(ctx context.Context, bound time.Duration, url, op string, q request, out any) error {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	resp, err := s.post(ctx, url, op, q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxData)).Decode(out); err != nil {
		return cutOff(err)
	}
	return nil
}

func (s *remote) position(ctx context.Context, bound time.Duration, op string, q request) (Position, error) {
	var r reply
	_, err := s.call(ctx, bound, op, q, &r)
	if err == nil {
		_, err = r.Position.Number()
	}
	return r.Position, err
}

func (s *remote) Survey(ctx context.Context, tenant cells.TenantID) (out Survey, err error) {
	m := MoveOf(ctx)
	q := request{Move: cells.MoveRef{Tenant: tenant, Source: m.Source, Target: m.Target}, Group: GroupOf(ctx)}
	_, err = s.call(ctx, longCall, "survey", q, &out)
	return out, err
}

func (s *remote) Begin(ctx context.Context, m cells.MoveRef) (Position, error) {
	return s.position(ctx, longCall, "begin", request{Move: m, Group: GroupOf(ctx)})
}

func (s *remote) Kept(ctx context.Context, m cells.MoveRef) (Position, error) {
	return s.position(ctx, shortCall, "kept", request{Move: m})
}

func (s *remote) Adopt(ctx context.Context, m cells.MoveRef) (Position, error) {
	return s.position(ctx, longCall, "adopt", request{Move: m})
}

func (s *remote) Head(ctx context.Context, m cells.MoveRef) (Position, error) {
	return s.position(ctx, shortCall, "head", request{Move: m})
}

func (s *remote) Applied(ctx context.Context, m cells.MoveRef, pos Position) error {
	_, err := s.position(ctx, shortCall, "applied", request{Move: m, From: pos})
	return err
}

func (s *remote) Check(ctx context.Context, m cells.MoveRef, l Limits) (Health, error) {
	var r reply
	_, err := s.call(ctx, shortCall, "check", request{Move: m, Limits: &l}, &r)
	if err != nil || r.Health == nil {
		return Health{}, err
	}
	return *r.Health, nil
}

func (s *remote) Release(ctx context.Context, m cells.MoveRef) error {
	_, err := s.position(ctx, longCall, "release", request{Move: m})
	return err
}

func (s *remote) View(ctx context.Context, m cells.MoveRef) (View, error) {
	return s.open(ctx, longCall, "view", m)
}

func (s *remote) Final(ctx context.Context, m cells.MoveRef) (View, error) {
	return s.open(ctx, shortCall, "final", m)
}

func (s *remote) open(ctx context.Context, bound time.Duration, op string, m cells.MoveRef) (View, error) {
	var r reply
	url, err := s.call(ctx, bound, op, request{Move: m}, &r)
	if err != nil {
		return nil, err
	}
	return &remoteView{s: s, url: url, move: m, id: r.View, pos: r.Position}, nil
}

func (s *remote) Changes(ctx context.Context, m cells.MoveRef, from Position, yield func(Batch) error) error {
	if len(s.urls) == 0 {
		return fmt.Errorf("%w: transfer: no live process of the source cell is known", cells.ErrUnavailable)
	}
	var err error
	for range s.urls {
		n := s.at.Load() % int64(len(s.urls))
		err = s.frames(ctx, s.urls[n], "changes", request{Move: m, From: from, Alone: Alone(ctx)}, yield)
		if err == nil || !retryable(err) || ctx.Err() != nil {
			return err
		}
		s.at.CompareAndSwap(n, (n+1)%int64(len(s.urls)))
		if !errors.Is(err, ErrElsewhere) {
			return err
		}
		// Nothing was yielded: the process that reads for the group is another one.
	}
	return err
}

// frames reads a stream to its end. The other side must show a sign of life in
// time; while yield waits the clock stands.
func (s *remote) frames(ctx context.Context, url, op string, q request, yield func(Batch) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(idleAfter, func() {
		cancel(fmt.Errorf("%w: transfer: %s has been silent for %v", cells.ErrUnavailable, url, idleAfter))
	})
	defer idle.Stop()
	resp, err := s.post(ctx, url, op, q)
	if err != nil {
		return causeOf(ctx, err)
	}
	defer resp.Body.Close()
	r := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		idle.Reset(idleAfter)
		kind, header, data, err := readFrame(r)
		if err != nil {
			return causeOf(ctx, err)
		}
		idle.Stop()
		switch kind {
		case frameBatch:
			var b Batch
			if err := json.Unmarshal(header, &b); err != nil {
				return fmt.Errorf("%w: transfer: frame header: %w", cells.ErrInvalid, err)
			}
			if _, err := b.Upto.Number(); err != nil {
				return err
			}
			b.Data = data
			if err := yield(b); err != nil {
				return err
			}
		case frameError:
			e := &wireError{}
			if err := json.Unmarshal(header, e); err != nil {
				return fmt.Errorf("%w: transfer: frame header: %w", cells.ErrInvalid, err)
			}
			return e
		case frameEnd:
			return nil
		}
	}
}

// causeOf returns why ctx ended, if that is why err happened.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

type remoteView struct {
	s    *remote
	url  string
	move cells.MoveRef
	id   string
	pos  Position
}

func (v *remoteView) Position() Position { return v.pos }

func (v *remoteView) q() request { return request{Move: v.move, View: v.id} }

// lost says that the view is gone when its process does not answer.
func (v *remoteView) lost(err error) error {
	if err != nil && retryable(err) && !errors.Is(err, ErrViewLost) {
		return fmt.Errorf("%w: %w", ErrViewLost, err)
	}
	return err
}

func (v *remoteView) Changes(ctx context.Context, from Position, yield func(Batch) error) error {
	q := v.q()
	q.From = from
	return v.lost(v.s.frames(ctx, v.url, "view/changes", q, yield))
}

func (v *remoteView) Rows(ctx context.Context, table string, after []byte, yield func(Batch) error) error {
	q := v.q()
	q.Table, q.After = table, after
	return v.lost(v.s.frames(ctx, v.url, "view/rows", q, yield))
}

func (v *remoteView) Fetch(ctx context.Context, set KeySet, yield func(Batch) error) error {
	q := v.q()
	q.Sets = []KeySet{set}
	return v.lost(v.s.frames(ctx, v.url, "view/fetch", q, yield))
}

// Digests asks in pieces, so that a request stays below its bound.
func (v *remoteView) Digests(ctx context.Context, sets []KeySet) ([]Digest, error) {
	var out []Digest
	for len(sets) > 0 {
		q, size := v.q(), 0
		for len(sets) > 0 && (size == 0 || size+len(sets[0].Data) < maxBody/2) {
			size += len(sets[0].Data) + 256
			q.Sets, sets = append(q.Sets, sets[0]), sets[1:]
		}
		var r reply
		if err := v.s.unary(ctx, longCall, v.url, "view/digests", q, &r); err != nil {
			return nil, v.lost(err)
		}
		out = append(out, r.Digests...)
	}
	return out, nil
}

func (v *remoteView) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), shortCall)
	defer cancel()
	var r reply
	return v.s.unary(ctx, shortCall, v.url, "view/close", v.q(), &r)
}
