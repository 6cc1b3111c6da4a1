// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

const (
	minBeat = 20 * time.Millisecond
	maxBeat = 30 * time.Second
	// beatTimeout bounds one heartbeat's call.
	beatTimeout = 2 * time.Second
	maxReply    = 64 << 10
)

// heartbeat says how the process is.
func (m *Member) heartbeat() Heartbeat {
	ready, reason := m.Ready()
	h := Heartbeat{
		Cell: m.cfg.Cell, Instance: m.cfg.Instance, Version: m.cfg.Version, PID: os.Getpid(),
		ServiceURL: m.cfg.ServiceURL, AgentURL: m.agentURL, Ready: ready, Reason: reason, StoreDown: m.storeDown.Load(),
		Revision: m.router.Status().Revision, InFlight: m.gates.Total(), Busiest: m.load.sample(time.Now(), m.gates.Admitted),
	}
	if m.opts.store != nil {
		h.Engine = m.opts.store.Engine
	}
	if rows := m.vitals.Rows(); len(rows) > 0 {
		h.Vitals = &rows[0].Counts
	}
	return h
}

// wake has the beat loop look and report now.
func (m *Member) wake() {
	select {
	case m.poke <- struct{}{}:
	default:
	}
}

// beat judges the readiness and reports it until Close.
func (m *Member) beat() {
	every, failing := m.opts.every, false
	var said sync.Once
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-m.life.Done():
			return
		case <-t.C:
		case <-m.poke:
		}
		m.reloadKeys()
		ready, reason := m.judge(m.life)
		if m.life.Err() != nil {
			return
		}
		if m.setReady(ready, reason) {
			m.log.Info("member: readiness changed", "ready", ready, "reason", reason)
		}
		leaving := m.leaving.Load()
		var reply HeartbeatReply
		ctx, cancel := context.WithTimeout(m.life, beatTimeout)
		err := m.post(ctx, PathHeartbeat, m.heartbeat(), &reply)
		cancel()
		switch {
		case m.life.Err() != nil:
			return
		case err == nil:
			m.lastBeat.Store(time.Now().UnixNano())
			if leaving {
				said.Do(func() { close(m.told) })
			}
			if reply.Every > 0 {
				every = min(max(reply.Every, minBeat), maxBeat)
			}
			if failing {
				m.log.Info("member: the directory takes heartbeats again")
			}
		case !failing:
			m.log.Warn("member: the directory does not take heartbeats", "err", err)
		}
		failing = err != nil
		t.Reset(every)
	}
}

// post sends a JSON body to the directory and reads a JSON answer, if out is not
// nil.
func (m *Member) post(ctx context.Context, path string, body, out any) error {
	return postJSON(ctx, m.directory, m.cfg.DirectoryURL+path, body, out)
}

func postJSON(ctx context.Context, client *http.Client, url string, body, out any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(b))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return fmt.Errorf("%w: %s answers %s: %s", cells.ErrUnavailable, url, resp.Status, bytes.TrimSpace(text))
	}
	if out == nil {
		return nil
	}
	return decodeReply(resp.Body, out)
}

// decodeReply reads one JSON document of bounded size. Fields that a newer
// directory has added are ignored.
func decodeReply(r io.Reader, out any) error {
	b, err := io.ReadAll(io.LimitReader(r, maxReply+1))
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	if len(b) > maxReply {
		return fmt.Errorf("%w: answer above %d bytes", cells.ErrInvalid, maxReply)
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("%w: answer: %w", cells.ErrInvalid, err)
	}
	return nil
}
