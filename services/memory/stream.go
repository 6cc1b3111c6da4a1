// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// keepAlive is how often an idle stream sends a comment, so that whatever stands
// between sees life.
const keepAlive = 15 * time.Second

// stream answers GET /v1/events: the tenant's events as server-sent events, id =
// event_seq, from Last-Event-ID on (or ?after=; from the start without either).
// When the tenant moves the stream ends cleanly, with a comment; the client reconnects with its
// Last-Event-ID and goes on in the new cell without a gap.
func (s *Service) stream(w http.ResponseWriter, r *http.Request) {
	tenant, err := s.tenantOf(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	last := r.Header.Get("Last-Event-ID")
	if last == "" {
		last = r.URL.Query().Get("after")
	}
	var after cells.EventSeq
	if last != "" {
		n, err := strconv.ParseUint(last, 10, 63)
		if err != nil {
			s.fail(w, r, fmt.Errorf("%w: Last-Event-ID is not a number that this service gave", ErrBadRequest))
			return
		}
		after = cells.EventSeq(n)
	}
	ctx := cells.MarkStream(r.Context())
	// Read before the answer begins: a database that is down is an answer, not a
	// stream without events.
	events, err := s.readEvents(ctx, tenant, after)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if _, err := fmt.Fprint(w, "retry: 50\n\n"); err != nil || out.Flush() != nil {
		return
	}
	defer func() {
		if errors.Is(context.Cause(ctx), cells.ErrGateClosed) {
			// A comment: it has no id, so that the client's place stays.
			if _, err := fmt.Fprint(w, ": the tenant moves, connect again\n\n"); err == nil {
				_ = out.Flush()
			}
		}
	}()
	begun := false
	for read := true; ctx.Err() == nil; read = false {
		if !read {
			if events, err = s.readEvents(ctx, tenant, after); err != nil {
				if ctx.Err() == nil {
					s.log.Error("reading events failed; the stream ends", "err", err)
				}
				return
			}
		}
		for _, e := range events {
			if begun && e.Seq != after+1 {
				// The rows are being removed behind a process that slept through the cut.
				return
			}
			begun = true
			data, err := json.Marshal(e)
			if err != nil {
				return
			}
			if _, err := fmt.Fprintf(w, "id: %d\nevent: %s\ndata: %s\n\n", e.Seq, e.Type, data); err != nil {
				return
			}
			after = e.Seq
		}
		if len(events) > 0 {
			if out.Flush() != nil {
				return
			}
			continue
		}
		wait, cancel := context.WithTimeout(ctx, keepAlive)
		err = s.events.Wait(wait, tenant, after)
		timedOut := wait.Err() != nil
		cancel()
		if err != nil && timedOut && ctx.Err() == nil {
			if _, err := fmt.Fprint(w, ": alive\n\n"); err != nil || out.Flush() != nil {
				return
			}
		} else if err != nil {
			return
		}
	}
}

// readEvents reads a page of events, for at most storeWait.
func (s *Service) readEvents(ctx context.Context, tenant cells.TenantID, after cells.EventSeq) ([]guard.Event, error) {
	bctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	events, err := s.events.Events(bctx, tenant, after, 256)
	if err != nil && bctx.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: the database did not answer within %s: %w", cells.ErrUnavailable, storeWait, err)
	}
	return events, err
}
