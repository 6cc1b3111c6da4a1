// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

func (s *Server) watch(w http.ResponseWriter, r *http.Request, q map[string]string) error {
	from, err := number(q, "from", 63)
	if err != nil {
		return err
	}
	ms, err := number(q, "heartbeat_ms", 31)
	if err != nil {
		return err
	}
	if q["watch"] != "1" {
		return fmt.Errorf("%w: watch=%q", cells.ErrInvalid, q["watch"])
	}
	if err := unwanted(without(q, "watch", "from", "heartbeat_ms")); err != nil {
		return err
	}
	heartbeat := 2 * time.Second
	if ms > 0 {
		heartbeat = min(max(time.Duration(ms)*time.Millisecond, minHeartbeat), maxHeartbeat)
	}
	if err := s.allow(r, OpWatch); err != nil {
		return err
	}
	select {
	case s.watches <- struct{}{}:
		defer func() { <-s.watches }()
	default:
		return fmt.Errorf("%w: %d watches are served already", cells.ErrUnavailable, cap(s.watches))
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("%w: shutting down", cells.ErrUnavailable)
	}
	s.going.Add(1)
	s.mu.Unlock()
	defer s.going.Done()

	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	source, err := s.table.Watch(ctx, cells.Revision(from))
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }()
	out := &lineWriter{w: w, rc: http.NewResponseController(w), patience: s.patience}
	w.Header().Set("Content-Type", typeNDJSON)
	if err := out.send(line{Alive: true}); err != nil {
		return nil // the peer is gone, or cannot be streamed to
	}
	if err := s.relay(ctx, cancel, source, out, heartbeat); err != nil && r.Context().Err() == nil {
		if s.life.Err() != nil {
			err = fmt.Errorf("%w: shutting down", cells.ErrUnavailable)
		}
		f := failureOf(err)
		_ = out.send(line{Error: &f})
	}
	return nil
}

// relay sends updates, and between them heartbeats. It returns the error of the
// table's watch, or nil when the peer is gone.
func (s *Server) relay(ctx context.Context, cancel func(), source cells.RouteWatcher, out *lineWriter, heartbeat time.Duration) error {
	type step struct {
		up  cells.RouteUpdate
		err error
	}
	steps := make(chan step)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			up, err := source.Next(ctx)
			select {
			case steps <- step{up, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() {
		cancel()
		<-ended
	}()
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-beat.C:
			if out.send(line{Alive: true}) != nil {
				return nil
			}
		case st := <-steps:
			if st.err != nil {
				return st.err
			}
			if err := out.update(st.up); err != nil {
				if errors.Is(err, cells.ErrInvalid) {
					return err
				}
				return nil
			}
		}
	}
}

// lineWriter sends lines, each within a deadline.
type lineWriter struct {
	w        http.ResponseWriter
	rc       *http.ResponseController
	patience time.Duration
}

func (o *lineWriter) send(l line) error {
	b, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	// A server's own write timeout would end the watch; a server without deadlines
	// (a test recorder) has none to set.
	if err := o.rc.SetWriteDeadline(time.Now().Add(o.patience)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := o.w.Write(append(b, '\n')); err != nil {
		return err
	}
	return o.rc.Flush()
}

// update sends up in lines of bounded size. The revision of a line that is not the
// last is that of its last row: the view is as far as that.
func (o *lineWriter) update(up cells.RouteUpdate) error {
	begin, size := 0, 0
	for i := range up.Routes {
		enc, err := cells.EncodeRoute(up.Routes[i])
		if err != nil {
			return err
		}
		if size += len(enc) + 1; size > trimLine && i > begin {
			if err := o.send(line{Revision: up.Routes[i-1].Revision, Routes: up.Routes[begin:i]}); err != nil {
				return err
			}
			begin, size = i, len(enc)+1
		}
	}
	return o.send(line{Revision: up.Revision, Routes: up.Routes[begin:]})
}
