// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

const (
	contentNDJSON = "application/x-ndjson"
	// progressEvery is the least time between two lines of progress.
	progressEvery = 100 * time.Millisecond
	// aliveEvery is how often a step that has nothing to say shows that it lives;
	// after silence of deadAfter its caller gives it up.
	aliveEvery = 2 * time.Second
	deadAfter  = 15 * time.Second
	// lineTimeout bounds the writing of a line to a caller that does not read.
	lineTimeout = 10 * time.Second
	// maxLine bounds a line.
	maxLine = 64 << 10
)

// lines writes the lines of one step.
type lines struct {
	mu      sync.Mutex // guards all below
	w       io.Writer
	rc      *http.ResponseController
	pending *cells.Progress
	last    time.Time // of the last line
	broken  func()    // ends the step: nobody reads any more
}

func (l *lines) write(line StepLine) {
	_ = l.rc.SetWriteDeadline(time.Now().Add(lineTimeout))
	err := json.NewEncoder(l.w).Encode(line)
	if err == nil {
		err = l.rc.Flush()
	}
	if err != nil {
		l.broken()
	}
	l.last = time.Now()
}

// progress keeps the newest progress for the next line; the last of each phase is
// always written, since its numbers are what the phase came to.
func (l *lines) progress(p cells.Progress) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending != nil && l.pending.Phase != p.Phase {
		l.write(StepLine{Progress: l.pending})
	}
	l.pending = &p
}

// tick writes what there is to say.
func (l *lines) tick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.pending != nil:
		l.write(StepLine{Progress: l.pending})
		l.pending = nil
	case time.Since(l.last) >= aliveEvery:
		l.write(StepLine{})
	}
}

// stream makes a handler of a step that reports progress: lines of StepLine, at
// most one in progressEvery and phase, the last with the result or the error.
func stream[In any](m *Member, name string, do func(context.Context, In, func(cells.Progress)) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, ok := begin[In](w, r)
		if !ok {
			return
		}
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		w.Header().Set("Content-Type", contentNDJSON)
		w.Header().Set("Cache-Control", "no-store")
		out := &lines{w: w, rc: http.NewResponseController(w), broken: cancel}
		out.mu.Lock()
		out.write(StepLine{}) // the caller learns that the step has begun
		out.mu.Unlock()

		ticking := make(chan struct{})
		stop := make(chan struct{})
		go func() {
			defer close(ticking)
			t := time.NewTicker(progressEvery)
			defer t.Stop()
			for {
				select {
				case <-t.C:
					out.tick()
				case <-stop:
					return
				}
			}
		}()
		begun := time.Now()
		result, err := do(ctx, in, out.progress)
		close(stop)
		<-ticking
		m.metrics.step(name, begun, err)

		last := StepLine{}
		if err == nil {
			last.Result, err = json.Marshal(result)
		}
		if err != nil {
			m.log.Log(ctx, level(err), "member: step failed", "step", name, "err", err)
			last.Result = nil
			last.Error, _ = stepError(r.Context(), err)
		}
		out.mu.Lock()
		defer out.mu.Unlock()
		if out.pending != nil {
			out.write(StepLine{Progress: out.pending})
		}
		out.write(last)
	})
}

// readLines reads the lines of a step. It returns the result, which is decoded
// strictly into out, or the step's error. A stream that ends without either, and
// one that is silent for deadAfter, is [cells.ErrUnavailable]. cancel ends the call.
func readLines(r io.Reader, out any, progress func(cells.Progress), cancel func(error)) error {
	silent := time.AfterFunc(deadAfter, func() {
		cancel(fmt.Errorf("%w: the agent has been silent for %s", cells.ErrUnavailable, deadAfter))
	})
	defer silent.Stop()
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 4<<10), maxLine)
	for sc.Scan() {
		silent.Reset(deadAfter)
		var line StepLine
		if err := decodeStrict(sc.Bytes(), &line); err != nil {
			return fmt.Errorf("line of a step: %w", err)
		}
		switch {
		case line.Error != nil:
			return line.Error
		case line.Result != nil:
			if err := decodeStrict(line.Result, out); err != nil {
				return fmt.Errorf("result of a step: %w", err)
			}
			return nil
		case line.Progress != nil && progress != nil:
			progress(*line.Progress)
		}
	}
	switch err := sc.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("%w: a line of a step is longer than %d bytes", cells.ErrInvalid, maxLine)
	case err != nil:
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: the agent broke off", cells.ErrUnavailable)
}
