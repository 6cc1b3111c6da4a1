// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

const (
	// aliveEvery is how often a stream that has nothing to say says so; idleAfter is
	// when the other side gives it up.
	aliveEvery = 4 * time.Second
	idleAfter  = 20 * time.Second
	// viewLease is how long a view lives that nobody uses.
	viewLease = 2 * time.Minute
	// maxViews bounds the views of one process.
	maxViews = 16
)

// request is the body of every call.
type request struct {
	Move  cells.MoveRef `json:"move"`
	View  string        `json:"view,omitempty"`
	Table string        `json:"table,omitempty"`
	After []byte        `json:"after,omitempty"`
	From  Position      `json:"from,omitempty"`
	Sets  []KeySet      `json:"sets,omitempty"`
	// Limits are those of a check.
	Limits *Limits `json:"limits,omitempty"`
	// Group is that of a begin, or of a survey for one; Alone is [ContextAlone] of changes.
	Group GroupID `json:"group,omitempty"`
	Alone bool    `json:"alone,omitempty"`
}

// reply is the body of every answer that is not a stream, but a survey's.
type reply struct {
	Position Position `json:"position,omitempty"`
	View     string   `json:"view,omitempty"`
	Digests  []Digest `json:"digests,omitempty"`
	Health   *Health  `json:"health,omitempty"`
}

// Handler serves a Source to the agents of other cells, below [PathTransfer].
// authorize decides whether the caller may have the tenant's rows for that move:
// only the agent of m.Target may, while the route names that move or keeps that way back. For a survey
// the ids of cells and the epoch may be empty.
//
// It is an io.Closer: Close closes the views that clients have left open, once
// requests have ended; later ones open none.
func Handler(source Source, authorize func(*http.Request, cells.MoveRef) error) http.Handler {
	return &server{source: source, authorize: authorize, views: map[string]*heldView{}}
}

type server struct {
	source    Source
	authorize func(*http.Request, cells.MoveRef) error

	mu     sync.Mutex // guards views and closed
	views  map[string]*heldView
	closed bool
}

// Close implements io.Closer.
func (s *server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.drop(func(*heldView) bool { return true })
	return nil
}

// heldView is a view that a client has open.
type heldView struct {
	id    string
	move  cells.MoveID
	view  View
	mu    sync.Mutex // held while the view is used
	timer *time.Timer
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	op, ok := strings.CutPrefix(r.URL.Path, PathTransfer)
	if !ok || r.Method != http.MethodPost {
		http.NotFound(w, r)
		return
	}
	var q request
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&q); err != nil {
		s.fail(w, http.StatusBadRequest, fmt.Errorf("%w: request body: %w", cells.ErrInvalid, err))
		return
	}
	err := q.Move.Tenant.Validate()
	if op != "survey" {
		err = validate(q.Move)
	}
	if q.Group != "" {
		err = errors.Join(err, q.Group.Validate())
	}
	if err != nil {
		s.fail(w, http.StatusBadRequest, err)
		return
	}
	if err := s.authorize(r, q.Move); err != nil {
		s.fail(w, http.StatusForbidden, err)
		return
	}
	ctx := ContextWithGroup(r.Context(), q.Group)
	if q.Alone {
		ctx = ContextAlone(ctx)
	}
	switch op {
	case "survey":
		out, err := s.source.Survey(ContextForMove(ctx, q.Move), q.Move.Tenant)
		s.answer(w, out, err)
	case "begin":
		pos, err := s.source.Begin(ctx, q.Move)
		s.answer(w, reply{Position: pos}, err)
	case "kept":
		pos, err := s.source.Kept(ctx, q.Move)
		s.answer(w, reply{Position: pos}, err)
	case "adopt":
		pos, err := s.source.Adopt(ctx, q.Move)
		s.answer(w, reply{Position: pos}, err)
	case "head":
		pos, err := s.source.Head(ctx, q.Move)
		s.answer(w, reply{Position: pos}, err)
	case "applied":
		s.answer(w, reply{}, s.source.Applied(ctx, q.Move, q.From))
	case "check":
		var l Limits
		if q.Limits != nil {
			l = *q.Limits
		}
		h, err := s.source.Check(ctx, q.Move, l)
		s.answer(w, reply{Health: &h}, err)
	case "release":
		s.drop(func(h *heldView) bool { return h.move == q.Move.ID })
		s.answer(w, reply{}, s.source.Release(ctx, q.Move))
	case "changes":
		s.stream(w, r, func(yield func(Batch) error) error { return s.source.Changes(ctx, q.Move, q.From, yield) })
	case "view", "final":
		s.open(w, r, q.Move, op == "final")
	case "view/close":
		s.drop(func(h *heldView) bool { return h.id == q.View && h.move == q.Move.ID })
		s.answer(w, reply{}, nil)
	case "view/rows", "view/changes", "view/fetch", "view/digests":
		h, err := s.hold(q)
		if err != nil {
			s.fail(w, http.StatusGone, err)
			return
		}
		defer s.letGo(h)
		switch op {
		case "view/rows":
			if r.Header.Get(formHeader) == FormBinary {
				ctx = ContextWithBinaryRows(ctx)
			}
			s.stream(w, r, func(yield func(Batch) error) error { return h.view.Rows(ctx, q.Table, q.After, yield) })
		case "view/changes":
			s.stream(w, r, func(yield func(Batch) error) error { return h.view.Changes(ctx, q.From, yield) })
		case "view/fetch":
			s.stream(w, r, func(yield func(Batch) error) error {
				if len(q.Sets) != 1 {
					return fmt.Errorf("%w: fetch takes one set", cells.ErrInvalid)
				}
				return h.view.Fetch(ctx, q.Sets[0], yield)
			})
		default:
			if r.Header.Get(digestHeader) == "" {
				ctx = ContextWithPlainDigests(ctx)
			}
			ds, err := h.view.Digests(ctx, q.Sets)
			s.answer(w, reply{Digests: ds}, err)
		}
	default:
		http.NotFound(w, r)
	}
}

// open opens a view that outlives the request.
func (s *server) open(w http.ResponseWriter, r *http.Request, m cells.MoveRef, final bool) {
	s.mu.Lock()
	full := len(s.views) >= maxViews
	s.mu.Unlock()
	if full {
		s.fail(w, http.StatusServiceUnavailable, fmt.Errorf("%w: %d views are open in this process", cells.ErrUnavailable, maxViews))
		return
	}
	make := s.source.View
	if final {
		make = s.source.Final
	}
	view, err := make(r.Context(), m)
	if err != nil {
		s.answer(w, nil, err)
		return
	}
	h := &heldView{id: rand.Text(), move: m.ID, view: view}
	h.timer = time.AfterFunc(viewLease, func() { s.drop(func(x *heldView) bool { return x == h }) })
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.views[h.id] = h
	}
	s.mu.Unlock()
	if closed {
		h.timer.Stop()
		s.fail(w, http.StatusServiceUnavailable, errors.Join(fmt.Errorf("%w: the agent is closed", cells.ErrUnavailable), view.Close()))
		return
	}
	s.answer(w, reply{View: h.id, Position: view.Position()}, nil)
}

func (s *server) hold(q request) (*heldView, error) {
	s.mu.Lock()
	h := s.views[q.View]
	s.mu.Unlock()
	if h == nil || h.move != q.Move.ID {
		return nil, ErrViewLost
	}
	h.timer.Stop()
	h.mu.Lock()
	return h, nil
}

func (s *server) letGo(h *heldView) {
	h.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.views[h.id] == h {
		h.timer.Reset(viewLease)
	}
}

func (s *server) drop(which func(*heldView) bool) {
	var out []*heldView
	s.mu.Lock()
	for id, h := range s.views {
		if which(h) {
			delete(s.views, id)
			h.timer.Stop()
			out = append(out, h)
		}
	}
	s.mu.Unlock()
	for _, h := range out {
		h.mu.Lock()
		_ = h.view.Close()
		h.mu.Unlock()
	}
}

func (s *server) answer(w http.ResponseWriter, v any, err error) {
	if err != nil {
		status := http.StatusConflict
		if errors.Is(err, cells.ErrUnavailable) {
			status = http.StatusServiceUnavailable
		}
		s.fail(w, status, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func (s *server) fail(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set(errorHeader, "1")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(wireError{Kind: kindOf(err), Message: err.Error()})
}

// errorHeader tells an answer of this package from that of something between.
const errorHeader = "Cell-Transfer-Error"

// stream writes what produce yields as frames. It blocks with the client.
func (s *server) stream(w http.ResponseWriter, r *http.Request, produce func(yield func(Batch) error) error) {
	w.Header().Set("Content-Type", "application/vnd.cell.transfer")
	w.Header().Set("Cache-Control", "no-store")
	rc := http.NewResponseController(w)
	var mu sync.Mutex // guards w
	send := func(kind byte, header any, data []byte) error {
		mu.Lock()
		defer mu.Unlock()
		_ = rc.SetWriteDeadline(time.Now().Add(10 * time.Minute))
		if err := writeFrame(w, kind, header, data); err != nil {
			return err
		}
		return rc.Flush()
	}
	ctx, cancel := context.WithCancel(r.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(aliveEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				if send(frameAlive, nil, nil) != nil {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	})
	err := send(frameAlive, nil, nil)
	if err == nil {
		err = produce(func(b Batch) error { return send(frameBatch, b, b.Data) })
	}
	cancel()
	wg.Wait()
	if err != nil {
		_ = send(frameError, wireError{Kind: kindOf(err), Message: err.Error()}, nil)
		return
	}
	_ = send(frameEnd, nil, nil)
}
