// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// Move begins a move and returns its record; the directory goes on with it. With
// an operation id that was used before it returns that move.
func (c *Client) Move(ctx context.Context, r api.MoveRequest) (api.Move, error) {
	var out api.Move
	r.DryRun = false
	_, err := c.call(ctx, request{method: http.MethodPost, path: api.PathMoves, body: r, operation: r.OperationID}, &out)
	return out, err
}

// DryRun tells what a move would do and what stands in its way; it changes nothing.
func (c *Client) DryRun(ctx context.Context, r api.MoveRequest) (api.DryRun, error) {
	var out api.DryRun
	r.DryRun = true
	_, err := c.call(ctx, request{method: http.MethodPost, path: api.PathMoves, body: r}, &out)
	return out, changesNothing(err)
}

// MoveQuery selects a page of moves.
type MoveQuery struct {
	Tenant cells.TenantID
	State  api.MoveState
	// After is MoveList.Next of the page before.
	After int64
	Limit int
}

// Moves lists moves, newest first.
func (c *Client) Moves(ctx context.Context, q MoveQuery) (api.MoveList, error) {
	var out api.MoveList
	v := page(strconv.FormatInt(q.After, 10), q.Limit)
	set(v, "tenant", string(q.Tenant))
	set(v, "state", string(q.State))
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathMoves, query: v}, &out)
	return out, err
}

func movePath(id cells.MoveID) (string, error) {
	return api.PathMoves + "/" + url.PathEscape(string(id)), id.Validate()
}

// MoveByID returns a move's record; NOT_FOUND when there is none.
func (c *Client) MoveByID(ctx context.Context, id cells.MoveID) (api.Move, error) {
	var out api.Move
	path, err := movePath(id)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path}, &out)
	}
	return out, err
}

// Rollback gives a move up before it is decided. It returns the record: rolled
// back, or still on its way there. CONFLICT when the move is decided.
func (c *Client) Rollback(ctx context.Context, id cells.MoveID, r api.RollbackRequest) (api.Move, error) {
	var out api.Move
	path, err := movePath(id)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPost, path: path + "/rollback", body: r}, &out)
	}
	return out, err
}

// CloseWindow ends the time in which the tenant's last move can be undone and returns
// its route. No open window is no error.
func (c *Client) CloseWindow(ctx context.Context, t cells.TenantID, r api.CloseWindowRequest) (cells.TenantRoute, error) {
	var out cells.TenantRoute
	path, err := tenantPath(t)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPost, path: path + "/window/close", body: r}, &out)
	}
	return out, err
}

// watchSilence is for how long a watch may say nothing before it counts as broken.
const watchSilence = 15 * time.Second

// watchAttempts is how often in a row WatchMove connects again without news.
const watchAttempts = 10

// WatchMove calls f with the record now and whenever it has changed, until it is
// final. A watch that breaks, also because the directory restarts, is taken up
// again. It returns f's error, the context's, a refusal of the directory, or an
// error that wraps [ErrWatchBroken] when the directory cannot be reached for a
// while.
func (c *Client) WatchMove(ctx context.Context, id cells.MoveID, f func(api.Move) error) error {
	path, err := movePath(id)
	if err != nil {
		return err
	}
	wait, failures := 100*time.Millisecond, 0
	for {
		final, news, err := c.watchOnce(ctx, path, f)
		var stop *stopError
		switch {
		case final:
			return nil
		case errors.As(err, &stop):
			return stop.err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		if a := cells.AnswerOf(err); a != nil && a.Code != cells.CodeBackendUnavailable {
			return a
		}
		if news {
			wait, failures = 100*time.Millisecond, 0
		}
		if failures++; failures > watchAttempts {
			return fmt.Errorf("%w: move %s: %w", ErrWatchBroken, id, err)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		case <-t.C:
		}
		wait = min(2*wait, 2*time.Second)
	}
}

// stopError carries the error of a caller's function through a watch.
type stopError struct{ err error }

func (s *stopError) Error() string { return s.err.Error() }

func (c *Client) watchOnce(ctx context.Context, path string, f func(api.Move) error) (final, news bool, _ error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := c.send(ctx, request{method: http.MethodGet, path: path, query: url.Values{"watch": {"1"}}})
	if err != nil {
		return false, false, err
	}
	defer func() { _ = resp.Body.Close() }()
	err = readLines(resp.Body, cancel, func(line []byte) error {
		var l api.MoveLine
		if err := json.Unmarshal(line, &l); err != nil {
			return err
		}
		switch {
		case l.Error != "":
			return errors.New(l.Error)
		case l.Move == nil:
			return nil
		}
		news = true
		if err := f(*l.Move); err != nil {
			return &stopError{err}
		}
		if l.Move.State.Final() {
			final = true
			return io.EOF
		}
		return nil
	})
	return final, news, err
}

// readLines calls f with each line, and cancels when none comes for a while. It
// returns f's error, or why the stream ended.
func readLines(r io.Reader, cancel context.CancelCauseFunc, f func([]byte) error) error {
	silent := time.AfterFunc(watchSilence, func() { cancel(fmt.Errorf("%w: silence", ErrWatchBroken)) })
	defer silent.Stop()
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 64<<10), maxAnswer)
	for sc.Scan() {
		silent.Reset(watchSilence)
		line := bytes.TrimSpace(sc.Bytes())
		if len(line) == 0 {
			continue
		}
		if err := f(line); err != nil {
			return err
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%w: %w", ErrWatchBroken, io.ErrUnexpectedEOF)
}

// Receipt returns the receipt of a move that is over, to be verified with package
// receipt. NOT_FOUND when there is none.
func (c *Client) Receipt(ctx context.Context, id cells.MoveID) (receipt.Receipt, error) {
	var out receipt.Receipt
	path, err := movePath(id)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path + "/receipt"}, &out)
	}
	return out, err
}
